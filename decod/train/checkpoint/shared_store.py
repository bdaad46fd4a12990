"""The store that members share: a folder, such as one of NFS, or an object store of fsspec.

Credentials and addresses of object stores come from fsspec's own settings on each host, and never
travel. Every object is written once. Its name appears only when all of it is there, in a folder by
a rename, in an object store because such stores put an object as a whole.
"""

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from decod.errors import ConfigError, DataError, DecodError, install_hint
from decod.files import open_ordinary, read_at
from decod.objects import file_system, is_url, shown
from decod.texts import clip
from decod.train.checkpoint.checkpoint_files import FileOperations, is_plain_folder, remove_tree
from decod.train.checkpoint.places import Folder, Objects, StoredFolder

_REASON_MAX = 200

Content = Iterable[memoryview | bytes]


class SharedStore(Objects, Protocol):
    """A place for objects with names like `a/b/c`. All methods may raise OSError."""

    def write(self, name: str, content: Content) -> None:
        """Write an object. If anything fails, there is no object of this name."""

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder of objects, one of them before the others. It may be missing."""

    def folder(self, name: str) -> Folder:
        """Return a folder for reading."""
        ...


def open_store(text: str) -> SharedStore:
    """Return the store of a path or a URL. Nothing is read or written.

    Raises:
        ConfigError: The URL is of no store that this host has a package for (E-CFG-095).
    """
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return UrlStore(text) if is_url(text) else FolderStore(Path(text))


def parse_folder(text: str) -> Folder:
    """Return a checkpoint's folder from its address; see `address_of`.

    Raises:
        ConfigError: As `open_store`.
    """
    if not is_url(text):
        return Path(text)
    url, run_id, name = text.rsplit("/", 2)
    return open_store(url).folder(f"{run_id}/{name}")


class FolderStore:
    """A folder that all members see, each maybe by another path. See `SharedStore`.

    Permissions of new files and folders follow from the process's umask, so that a group can share
    them.

    Args:
        path: The folder. It is created with the first object.
        files: Operations on files.
    """

    def __init__(self, path: Path, files: FileOperations | None = None) -> None:
        self._path, self._files = path, files or FileOperations()
        self.url = str(path)

    @override
    def __str__(self) -> str:
        return str(self._path)

    def folder(self, name: str) -> Path:
        return self._path / name

    def names(self, folder: str) -> list[str]:
        path = self._path / folder
        return [inner.name for inner in path.iterdir()] if is_plain_folder(path) else []

    def size_bytes(self, name: str) -> int:
        with open_ordinary(self._path / name, follow_links=False) as descriptor:
            return os.fstat(descriptor).st_size

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        with open_ordinary(self._path / name, follow_links=False) as descriptor:
            return read_at(descriptor, start, num_bytes)

    def write(self, name: str, content: Content) -> None:
        path, files = self._path / name, self._files
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(scratch, flags, 0o666)
            try:
                for piece in content:
                    files.write(descriptor, piece)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            files.rename(scratch, path)
            files.sync(path.parent)
        except BaseException:
            with suppress(OSError):
                files.remove_file(scratch)
            raise

    def remove(self, folder: str, first: str) -> None:
        path = self._path / folder
        with suppress(FileNotFoundError):
            self._files.remove_file(path / first)
        remove_tree(path, self._files)


class UrlStore:
    """An object store that fsspec knows. See `SharedStore`.

    Args:
        url: Such as `s3://bucket/folder`.

    Raises:
        ConfigError: This host has no package for it (E-CFG-095).
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            files, root = file_system(self.url)
        except (DataError, ValueError) as error:
            reason = error.why if isinstance(error, DataError) else str(error)
            raise ConfigError(
                f"the checkpoint store {self} can't be used",
                why=clip(" ".join(reason.split()), _REASON_MAX),
                fix=f"{install_hint('objects')}; a store other than S3 needs its own package too",
                code="E-CFG-095",
            ) from error
        self._files: Any = files
        self._root = root.rstrip("/")

    @override
    def __str__(self) -> str:
        return shown(self.url)

    def folder(self, name: str) -> StoredFolder:
        return StoredFolder(self, name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def names(self, folder: str) -> list[str]:
        with _translated():
            # Members write at any time, so what was listed before says nothing.
            self._files.invalidate_cache()
            try:
                found: list[str] = self._files.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
        names = (path.rstrip("/").rpartition("/")[2] for path in found)
        return [name for name in names if name]

    def size_bytes(self, name: str) -> int:
        with _translated():
            self._files.invalidate_cache()
            return int(self._files.info(self._path(name))["size"])

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        with _translated():
            return bytes(self._files.cat_file(self._path(name), start=start, end=start + num_bytes))

    def write(self, name: str, content: Content) -> None:
        path = self._path(name)
        with _translated():
            stream = self._new(path)
            try:
                for piece in content:
                    stream.write(piece)
                stream.close()
            except BaseException:
                _discard(stream)
                with suppress(Exception):
                    self._files.rm_file(path)
                raise

    def _new(self, path: str) -> Any:
        try:
            return self._files.open(path, "wb")
        except FileNotFoundError:
            # Object stores have no folders. There the bucket is missing, and a slip of the pen must
            # not make one.
            if getattr(self._files, "async_impl", False):
                raise
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._files.open(path, "wb")

    def remove(self, folder: str, first: str) -> None:
        with _translated():
            self._files.invalidate_cache()
            for path in (f"{folder}/{first}", folder):
                with suppress(FileNotFoundError):
                    self._files.rm(self._path(path), recursive=True)


def _discard(stream: Any) -> None:
    """Give an unfinished object up: closing it would complete it, and so would forgetting it."""
    with suppress(Exception):
        stream.discard()
    with suppress(Exception):
        stream.closed = True


@contextmanager
def _translated() -> Iterator[None]:
    """Turn the exceptions of all stores, which have no common base, into OSError."""
    try:
        yield
    except DecodError:
        raise
    except Exception as error:
        # Stores make OSErrors without a number, whose text is in no field of its own.
        told = (isinstance(error, OSError) and error.strerror) or str(error)
        text = " ".join(told.split()) or type(error).__name__
        missing = isinstance(error, FileNotFoundError)
        # The number decides the type.
        raise OSError(errno.ENOENT if missing else errno.EIO, clip(text, _REASON_MAX)) from error
