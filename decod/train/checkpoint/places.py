"""Where the files of a checkpoint lie: in a folder of this host, or in an object store.

File operations are separate from the store, so that a test can crash between any two of them. The
room on this host's disk is what the node's operator leaves it.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from decod.files import open_ordinary, read_at

PIECE_BYTES = 4 << 20
"""Size of a piece to write, read or hash at a time."""


class FileOperations:
    """Operations of the operating system. Every one may raise OSError."""

    def make_folder(self, path: Path) -> None:
        """Create a folder and its missing parents."""
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def create(self, path: Path) -> int:
        """Return the descriptor of a new file. Never opens an existing file."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)

    def write(self, descriptor: int, data: memoryview | bytes) -> None:
        """Write all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def sync(self, path: Path) -> None:
        """Wait until a file's content, or a folder's list of names, has reached the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file or folder. Nothing else may have the new name."""
        path.rename(target)

    def remove_file(self, path: Path) -> None:
        """Remove a file, or a symlink itself."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


def remove_tree(folder: Path, files: FileOperations) -> None:
    """Remove a folder and its content, unless it is missing or a symlink."""
    if not is_plain_folder(folder):
        return
    for inner in sorted(folder.iterdir()):
        if is_plain_folder(inner):
            remove_tree(inner, files)
        else:
            files.remove_file(inner)
    files.remove_folder(folder)


def is_plain_folder(path: Path) -> bool:
    """Return whether a path is a folder itself, and not a symlink to one.

    Raises:
        OSError: The path may exist, but can't be examined.
    """
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


class OpenFile(Protocol):
    """A file that is being read. All methods may raise OSError."""

    def size_bytes(self) -> int:
        """Return its size."""
        ...

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return bytes from `start` on, or fewer if the file ends before."""
        ...


class Objects(Protocol):
    """What is read of an object store. All methods may raise OSError."""

    url: str
    """Or path. Maybe with a password, which the store as text does not show."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; none if there is no such folder."""
        ...

    def size_bytes(self, name: str) -> int:
        """Return the size of an object."""
        ...

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        """Return bytes of an object from `start` on, or fewer if it ends before."""
        ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in an object store. See `OpenFile`."""

    store: Objects
    path: str
    """The object's name in the store, with the folders."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def size_bytes(self) -> int:
        return self.store.size_bytes(self.path)

    def read(self, start: int, num_bytes: int) -> bytes:
        return self.store.read(self.path, start, num_bytes)

    @override
    def __str__(self) -> str:
        return f"{self.store}/{self.path}"


@dataclass(frozen=True, slots=True)
class StoredFolder:
    """A folder in an object store."""

    store: Objects
    path: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def url(self) -> str:
        """Maybe with a password."""
        return f"{self.store.url}/{self.path}"

    def names(self) -> list[str]:
        """Return the names of what it contains. May raise OSError."""
        return self.store.names(self.path)

    def __truediv__(self, name: str) -> StoredFile:
        return StoredFile(self.store, f"{self.path}/{name}")

    @override
    def __str__(self) -> str:
        return f"{self.store}/{self.path}"


Folder = Path | StoredFolder
"""A folder of a checkpoint. `folder / name` is a file in it."""

File = Path | StoredFile


@dataclass(frozen=True, slots=True)
class _Descriptor:
    descriptor: int

    def size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, start: int, num_bytes: int) -> bytes:
        return read_at(self.descriptor, start, num_bytes)


@contextmanager
def opened(file: File, *, follow_links: bool = False) -> Iterator[OpenFile]:
    """Lend a file for reading.

    Raises:
        OSError: It can't be opened, or is no ordinary file.
    """
    if isinstance(file, StoredFile):
        yield file
        return
    with open_ordinary(file, follow_links=follow_links) as descriptor:
        yield _Descriptor(descriptor)


def read_exactly(file: OpenFile, start: int, size_bytes: int) -> Iterator[bytes]:
    """Yield bytes of a file, piece by piece.

    Raises:
        EOFError: The file has fewer bytes.
        OSError: It can't be read.
    """
    end = start + size_bytes
    while start < end:
        piece = file.read(start, min(end - start, PIECE_BYTES))
        if not piece:
            raise EOFError
        start += len(piece)
        yield piece


def names_in(folder: Folder) -> list[str]:
    """Return the names of what a folder contains. May raise OSError."""
    if isinstance(folder, StoredFolder):
        return folder.names()
    return [path.name for path in folder.iterdir()]


def address_of(folder: Folder) -> str:
    """Return what `parse_folder` takes. Maybe with a password, so it is not to be shown."""
    return folder.url if isinstance(folder, StoredFolder) else str(folder)


class DiskRoom:
    """The cap on what a folder holds.

    Args:
        folder: The node's state folder.
        size_max_bytes: Most that it may hold. None: there is no cap.
    """

    def __init__(self, folder: Path, size_max_bytes: int | None = None) -> None:
        self._folder = folder
        self.size_max_bytes = size_max_bytes

    def cap(self, size_max_bytes: int | None) -> None:
        """Change the cap from now on. Nothing is removed for it."""
        self.size_max_bytes = size_max_bytes

    def require(self, size_bytes: int) -> None:
        """Check that the folder may hold so many bytes more.

        Raises:
            OSError: It may not.
        """
        most_bytes = self.size_max_bytes
        if most_bytes is None:
            return
        held_bytes = size_of_folder(self._folder)
        if held_bytes + size_bytes > most_bytes:
            held, needed, most = (n / 2**20 for n in (held_bytes, size_bytes, most_bytes))
            raise OSError(
                errno.EDQUOT,
                f"{self._folder} holds {held:.1f} MiB, this takes {needed:.1f} MiB, and the disk"
                f" limit is {most:.1f} MiB (decod set disk)",
            )


def size_of_folder(folder: Path) -> int:
    """Return the size of all files below a folder, in bytes. What vanishes meanwhile counts 0."""
    total = 0
    pending = [os.fspath(folder)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return total
