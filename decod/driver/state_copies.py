"""Files for large states on their way into and out of the compute process, so that they take no
memory.

The compute process writes a copy of its own state piece by piece, and whoever reads it gets it from
the file in the same way. A state that arrives goes to a file chunk by chunk, and the compute
process loads it piece by piece. Each file has a name until it is closed, so the cap on the disk
counts it.
"""

import errno
import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

from decod.driver.arena import ArenaRegion
from decod.files import PieceFile
from decod.train.checkpoint.entries import BytesInFile
from decod.train.checkpoint.places import DiskRoom, FileOperations, remove_tree

COPIES = "copies"
"""Name of the folder. What a process leaves there that was killed, the next removes."""

IN_MEMORY_MAX_BYTES = 256 << 20
"""Larger copies go to files. Smaller ones fit beside any model, and memory is faster than a disk:
while a state is copied, its device computes nothing."""


def goes_to_file(size_bytes: int) -> bool:
    """Return whether a copy of this size is too large for memory."""
    return size_bytes > IN_MEMORY_MAX_BYTES


class CopyFile:
    """A file with a copy of a state.

    Attributes:
        size_bytes: Of the copy.
        view: Its bytes.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path, self.size_bytes = path, size_bytes
        self._file = PieceFile(FileOperations().create(path))
        self.view = BytesInFile(self._file, size_bytes)

    def reference(self) -> dict[str, int | str]:
        """Return the form in which a request names this file to the compute process."""
        return {"offset": 0, "num_bytes": self.size_bytes, "path": str(self._path)}

    def close(self) -> None:
        """Remove the file. What it takes of the disk is free as soon as nobody writes into it."""
        with suppress(OSError):  # The next process removes it.
            self._path.unlink()
        self._file.close()


TensorRegion = ArenaRegion | CopyFile
"""Where a tensor of a job is."""


class StateCopies:
    """The files of a node's copies.

    Args:
        folder: The node's state folder.
        room: The cap on what it holds.
    """

    def __init__(self, folder: Path, room: DiskRoom) -> None:
        self._folder, self._room = (folder / COPIES).absolute(), room
        self._names = count()
        with suppress(OSError):  # `create` reports what is wrong with the folder.
            remove_tree(self._folder, FileOperations())

    def create(self, size_bytes: int) -> CopyFile | None:
        """Return a file for a copy; None if it is small enough for memory.

        Raises:
            OSError: The disk is too full, or refuses.
        """
        if not goes_to_file(size_bytes):
            return None
        self._room.require(size_bytes)
        FileOperations().make_folder(self._folder)
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < size_bytes:
            needed, free = size_bytes / 2**20, free_bytes / 2**20
            raise OSError(
                errno.ENOSPC, f"it takes {needed:.1f} MiB, and the disk has {free:.1f} MiB left"
            )
        return CopyFile(self._folder / f"{os.getpid()}-{next(self._names)}", size_bytes)
