"""Safe reading of files that people name, and files that are written in pieces.

A path that somebody names may lead to a pipe or a device.
"""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_PIECE_BYTES = 4 << 20
"""Size of one read: a multiple of every number's size."""


class NotOrdinaryError(OSError):
    """The path leads to a pipe, device, folder or socket instead of a file."""


@contextmanager
def open_ordinary(path: Path, *, follow_links: bool = True) -> Iterator[int]:
    """Lend the descriptor of a file, for reading. Never waits for the writer of a pipe.

    Raises:
        OSError: The file can't be opened.
        NotOrdinaryError: It is not an ordinary file.
    """
    links = 0 if follow_links else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)
    _require_ordinary(path, descriptor)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> IO[bytes]:
    """Return a file to lock, which is created if missing. Raises as `open_ordinary`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    _require_ordinary(path, descriptor)
    return open(descriptor, "r+b", buffering=0)


def _require_ordinary(path: Path, descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotOrdinaryError(errno.EINVAL, f"{path.name} is no ordinary file", str(path))


def read_pieces(descriptor: int, start: int, end: int | None) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` to before `end` (None: to the file's end), in pieces.

    Raises:
        OSError: The bytes can't be read, or the file ends before `end`.
    """
    while end is None or start < end:
        piece = read_at(
            descriptor, start, _PIECE_BYTES if end is None else min(_PIECE_BYTES, end - start)
        )
        if not piece and end is None:
            return
        if not piece:
            raise OSError(errno.EIO, f"it ends at byte {start}")
        start += len(piece)
        yield piece


def read_at(descriptor: int, start: int, size_bytes: int) -> bytes:
    """Return `size_bytes` bytes of a file from `start` on, or fewer if the file ends before."""
    content = os.pread(descriptor, size_bytes, start)
    # Some file systems return less than there is.
    while len(content) < size_bytes:
        more = os.pread(descriptor, size_bytes - len(content), start + len(content))
        if not more:
            break
        content += more
    return content


def read_beginning(path: Path, size_bytes: int) -> bytes:
    """Return at most `size_bytes` bytes from the start of a file. Raises as `open_ordinary`."""
    with open_ordinary(path) as descriptor:
        return b"".join(read_pieces(descriptor, 0, min(size_bytes, os.fstat(descriptor).st_size)))


def read_end(path: Path, size_max_bytes: int) -> bytes:
    """Return the last whole lines of a file, of at most so many bytes.

    Raises as `open_ordinary`.
    """
    with open_ordinary(path) as descriptor:
        size = os.fstat(descriptor).st_size
        start = max(0, size - size_max_bytes)
        content = read_at(descriptor, start, size - start)
    return content if not start else content.partition(b"\n")[2]


class PieceFile:
    """A file that is written in pieces, in any order and by several threads.

    A thread may still be writing when the file is closed, because nothing can stop it. It is waited
    for, and later writes fail. Otherwise they would go into the next file of this number.

    Args:
        descriptor: Of the file, open for reading and writing. It is closed by `close`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._closed = False

    def resize(self, size_bytes: int) -> None:
        """Give the file its size. New bytes are zero, and take no room on most disks."""
        with self._opened() as descriptor:
            os.ftruncate(descriptor, size_bytes)

    def write_at(self, start: int, piece: memoryview | bytes | bytearray) -> None:
        """Write a piece, all of it."""
        rest = memoryview(piece)
        with self._opened() as descriptor:
            while rest:
                written = os.pwrite(descriptor, rest, start)
                rest, start = rest[written:], start + written

    def read_at(self, start: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes from `start` on, or fewer if the file ends before."""
        with self._opened() as descriptor:
            return read_at(descriptor, start, size_bytes)

    def close(self) -> None:
        """Close the file, once nobody writes into it."""
        with self._lock:
            if not self._closed:
                os.close(self._descriptor)
            self._closed = True

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "it is closed")
            yield self._descriptor
