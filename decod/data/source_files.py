"""Files of text on disks and in object stores: how they are found, told apart and opened."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from decod.errors import DataError
from decod.objects import StoreError, file_system, is_url, open_object, shown, translated
from decod.paths import absolute_path

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
                stream = open_object(self.name)
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


def find_files(names: Sequence[str | Path]) -> list[SourceFile]:
    """Return the files to read, in the given order. A folder becomes its files, sorted.

    Inside folders, names that start with a dot are left out.

    Args:
        names: Paths and URLs of files and folders. In a URL, `*` stands for any part of a name.

    Raises:
        DataError: A file is missing, unreadable, neither a file nor a folder, or named twice.
    """
    files: list[SourceFile] = []
    for name in [os.fspath(name) for name in names]:
        if is_url(name):
            files.extend(_find_objects(name))
            continue
        try:
            files.extend(_walk(Path(os.path.normpath(absolute_path(Path(name))))))
        except OSError as error:
            raise unreadable(name, error.strerror or str(error)) from error
    _require_once(files)
    return files


def unreadable(name: str | Path, reason: str) -> DataError:
    """Return the error for a file that can't be found or read."""
    return DataError(
        f"{name} cannot be read",
        why=reason,
        fix="give files or folders that exist and that you may read",
        code="E-DAT-010",
    )


def _require_once(files: Sequence[SourceFile]) -> None:
    """Refuse files that are named twice, also by another path, a link, or a URL."""
    seen: dict[object, SourceFile] = {}
    for file in files:
        first = seen.setdefault(_identity(file), file)
        if first is not file:
            other = f", also as {shown(first.name)}" if first.name != file.name else ""
            raise DataError(
                f"{shown(file.name)} is named twice{other}",
                why="a run would train on its text twice as often as on the other text",
                fix="name each file once, and no folder that holds a file named already; copy the "
                "file if you want its text twice",
                code="E-DAT-010",
            )


def _identity(file: SourceFile) -> object:
    """Return what all names of a file have in common."""
    scheme, _, path = file.name.rpartition("://")
    if scheme not in ("", "file", "local"):
        return file.name
    try:
        status = os.stat(path if scheme else file.name)
    except OSError:
        return file.name
    # Some network file systems give the same number to several files.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


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
        where, root = file_system(url)
        found: dict[str, dict[str, Any]] = {}
        for path, about in _matches(where, root).items():
            if about["type"] == "file":
                found[path] = about
            else:
                inside = where.find(path, detail=True)
                found |= {file: inside[file] for file in inside if not _hidden(file, path)}
    if not found:
        raise unreadable(url, "there is no such file, and no folder with files")
    # By parts, as `_walk` sorts folder by folder.
    return [
        SourceFile(
            where.unstrip_protocol(path),
            found[path].get("size") or 0,
            " ".join(
                str(found[path][field]) for field in _VERSION_FIELDS if found[path].get(field)
            ),
        )
        for path in sorted(found, key=lambda path: path.split("/"))
    ]


def _matches(where: Any, root: str) -> dict[str, dict[str, Any]]:
    """Return what a store tells of files and folders that a name with `*` may stand for."""
    if where.isfile(root):
        return {root: where.info(root)}
    if "*" not in root:
        return {root: {"type": "directory"}}
    # For paths, a shell does this. It also leaves out hidden names.
    found, base = where.glob(root, detail=True), root.partition("*")[0].rpartition("/")[0]
    return {path: found[path] for path in found if not _hidden(path, base)}


def _hidden(path: str, root: str) -> bool:
    return any(part.startswith(".") for part in path.removeprefix(root).split("/"))


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        with translated(url):
            yield
    except StoreError as error:
        raise unreadable(url, error.why) from error
