"""Where the files of a checkpoint lie: in a folder of this host, or in an object store."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from decod.files import open_ordinary, read_at
from decod.train.checkpoint.checkpoint_files import PIECE_BYTES


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
    """Its name in the store, with the folders."""

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
