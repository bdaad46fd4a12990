"""Opening files that people name: what a path leads to may be a pipe or a device."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NotOrdinaryError(OSError):
    """A pipe, device, folder or socket stands where a file should be."""


@contextmanager
def open_ordinary(path: Path, *, follow_links: bool = True) -> Iterator[int]:
    """Lend the descriptor of a file, for reading. Never waits for somebody to write to a pipe.

    Raises:
        OSError: It can't be opened, or (NotOrdinaryError) is no ordinary file.
    """
    links = 0 if follow_links else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotOrdinaryError(errno.EINVAL, "it is no ordinary file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)
