"""Files of text on disks and in object stores: how they are found, told apart and opened.

A name with `://` is a URL of fsspec, such as `s3://bucket/folder`. Any other name is a path of this
host. Credentials and addresses of object stores come from fsspec's own settings.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from decod.errors import DataError, install_hint

if TYPE_CHECKING:
    import fsspec

# Object stores answer slowly but send fast, so one request fetches megabytes.
_FETCH_SIZE_BYTES = 8 * 2**20
# What object stores call the version of an object, or the time of its last change.
_VERSION_FIELDS = (
    "ETag",
    "etag",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when it was listed."""

    name: str
    """Absolute path, or URL."""
    size_bytes: int
    """0 if the store doesn't tell."""
    version: str
    """Another string after every change of the file. May be empty if the store doesn't tell."""

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Lend the file for reading and seeking, without a buffer.

        Raises:
            DataError: It can't be opened, or has changed since it was listed.
        """
        if is_url(self.name):
            with _translated(self.name):
                file_system, path = _file_system(self.name)
                stream = file_system.open(path, "rb", block_size=_FETCH_SIZE_BYTES)
            with stream:
                yield stream
            return
        with open(self.name, "rb", buffering=0) as file:
            if _described(self.name, os.fstat(file.fileno())) != self:
                raise DataError(
                    f"{self.name} has changed since the command began",
                    why="the corpus would mix text of two versions",
                    fix="run the same command again, while nobody writes to the file",
                    code="E-DAT-010",
                )
            yield file


def is_url(name: str) -> bool:
    """Return whether a name is a URL rather than a path."""
    return "://" in name


def find_files(names: Sequence[str | Path]) -> list[SourceFile]:
    """Return the files to read, in the given order. A folder becomes its files, sorted.

    Inside folders, names that start with a dot are left out.

    Args:
        names: Paths and URLs of files and folders.

    Raises:
        DataError: A file is missing, unreadable, or neither a file nor a folder.
    """
    files: list[SourceFile] = []
    for name in [os.fspath(name) for name in names]:
        if is_url(name):
            files.extend(_find_objects(name))
            continue
        try:
            files.extend(_walk(Path(os.path.abspath(name))))
        except OSError as error:
            raise unreadable(name, error.strerror or str(error)) from error
    return files


def unreadable(name: str | Path, reason: str) -> DataError:
    """Return the error for a file that can't be found or read."""
    return DataError(
        f"{name} cannot be read",
        why=reason,
        fix="give files or folders that exist and that you may read",
        code="E-DAT-010",
    )


def _walk(path: Path) -> Iterator[SourceFile]:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        for child in sorted(path.iterdir(), key=lambda child: child.name):
            if not child.name.startswith("."):
                # A link to a folder may lead back up, and the walk would never end.
                if child.is_symlink() and child.is_dir():
                    raise unreadable(child, "it is a link to a folder")
                yield from _walk(child)
    elif stat.S_ISREG(status.st_mode):
        yield _described(str(path), status)
    else:
        raise unreadable(path, "it is neither a file nor a folder")


def _described(path: str, status: os.stat_result) -> SourceFile:
    return SourceFile(path, status.st_size, f"{status.st_mtime_ns}")


def _find_objects(url: str) -> list[SourceFile]:
    with _translated(url):
        file_system, root = _file_system(url)
        found: dict[str, dict[str, Any]]
        if file_system.isfile(root):
            found = {root: file_system.info(root)}
        else:
            found = file_system.find(root, detail=True)
            found = {path: found[path] for path in found if not _hidden(path, root)}
    if not found:
        raise unreadable(url, "there is no such file, and no folder with files")
    # By parts, as `_walk` sorts folder by folder.
    return [
        SourceFile(
            file_system.unstrip_protocol(path),
            found[path].get("size") or 0,
            " ".join(
                str(found[path][field]) for field in _VERSION_FIELDS if found[path].get(field)
            ),
        )
        for path in sorted(found, key=lambda path: path.split("/"))
    ]


def _hidden(path: str, root: str) -> bool:
    return any(part.startswith(".") for part in path.removeprefix(root).split("/"))


def _file_system(url: str) -> "tuple[fsspec.AbstractFileSystem, str]":
    """Return the file system of a URL, and the path on it."""
    try:
        import fsspec.core

        # Packages of single stores, such as s3fs, are imported here.
        file_system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{url} needs the Python package `{error.name or 'fsspec'}`",
            why=f"it reads files that are not on this host's disks ({_one_line(error)})",
            fix=f"{install_hint('objects')}; a store other than S3 needs its own package too",
            code="E-DAT-014",
        ) from error
    return file_system, path


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    # Every store has exceptions of its own, which have no common base.
    except Exception as error:
        raise unreadable(url, _one_line(error) or type(error).__name__) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
