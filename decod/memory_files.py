"""Files in shared memory, by which processes of a host hand each other large data, and sockets.

A container may have little shared memory. A file that does not fit there goes to a folder for
temporary files.

The process that takes a file removes it. If both are killed before that, the next node process on
the host removes it. Otherwise its memory would be lost until the host starts again.

Containers may share this memory, and still have process ids of their own. Whether a file's maker
lives is therefore not asked of its id. Each maker locks a file of its own for as long as it lives,
and the kernel shows that lock to all. The data themselves carry no lock: whoever holds a descriptor
of a removed file keeps its memory taken.
"""

import atexit
import errno
import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from decod.system import SHARED_MEMORY, take_room

_FOLDER = SHARED_MEMORY
_ON_DISK = Path("/var/tmp")  # noqa: S108 - mkstemp makes the files. `/tmp` may be small memory, too.
_PREFIX = "decod-state-"
_LOCK_SUFFIX = ".lock"

_held = dict[Path, tuple[int, Path]]()
"""The lock that this process holds in each folder: its descriptor, and its file."""


def new_memory_file(size_bytes: int = 0) -> tuple[int, Path]:
    """Make a file. Return its descriptor, open for reading and writing, and its path.

    Args:
        size_bytes: Taken at once: a hole that can't be filled later would end the process.

    Raises:
        OSError: No folder has room for it. The message names them all.
    """
    problems = list[str]()
    for folder in _folders():
        try:
            return _file_in(folder, size_bytes)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    raise OSError(
        errno.ENOSPC, f"no folder has room for {size_bytes} bytes ({', '.join(problems)})"
    )


def _file_in(folder: Path, size_bytes: int) -> tuple[int, Path]:
    if folder not in _held or not _held[folder][1].exists():
        _held[folder] = _new_lock(folder)
    maker = _held[folder][1].name.removesuffix(_LOCK_SUFFIX)
    descriptor, name = tempfile.mkstemp(prefix=f"{maker}-", dir=folder)
    try:
        if size_bytes:
            take_room(descriptor, size_bytes)
    except OSError:
        os.close(descriptor)
        Path(name).unlink(missing_ok=True)
        raise
    return descriptor, Path(name)


def new_local_socket() -> tuple[socket.socket, Path]:
    """Make a local socket to which only processes of this user can connect, and its path.

    Raises:
        OSError: No folder can hold it.
    """
    descriptor, path = new_memory_file()
    os.close(descriptor)
    path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        path.chmod(0o600)  # Nobody can connect before it listens.
    except OSError:
        bound.close()
        raise
    return bound, path


def remove_local_socket(bound: socket.socket, path: Path) -> None:
    """Close a local socket, and remove its name."""
    bound.close()
    path.unlink(missing_ok=True)


def is_in_memory(path: Path) -> bool:
    """Return whether a file lies in shared memory."""
    return path.parent == _FOLDER


def remove_orphans() -> None:
    """Remove the files of processes that have ended without doing so."""
    for lock in (
        path for folder in _folders() for path in folder.glob(f"{_PREFIX}*{_LOCK_SUFFIX}")
    ):
        with suppress(OSError):  # Its maker lives, or it is another user's, or just removed.
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in _files_of(lock):
                    path.unlink(missing_ok=True)
                lock.unlink()
            finally:
                os.close(descriptor)


def _folders() -> list[Path]:
    """Return where files may lie, the best place first."""
    all_folders = [] if _FOLDER is None else [_FOLDER]
    with suppress(OSError):  # There is none that this process may use.
        all_folders.append(Path(tempfile.gettempdir()))
    all_folders.append(_ON_DISK)
    return [folder for folder in dict.fromkeys(all_folders) if folder.is_dir()]


def _files_of(lock: Path) -> list[Path]:
    """Return the files of the process that holds a lock."""
    return list(lock.parent.glob(f"{lock.name.removesuffix(_LOCK_SUFFIX)}-*"))


def _new_lock(folder: Path) -> tuple[int, Path]:
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_LOCK_SUFFIX, dir=folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Before it was locked, another process may have taken it for an orphan.
        if os.fstat(descriptor).st_nlink:
            return descriptor, Path(name)
        os.close(descriptor)


def _let_go() -> None:
    """Remove the lock of a process that ends, unless some of its files are yet to be taken."""
    for _, lock in _held.values():
        if not _files_of(lock):
            lock.unlink(missing_ok=True)


def _forget() -> None:
    """Leave the locks to the parent: otherwise they would last as long as this child."""
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


atexit.register(_let_go)
os.register_at_fork(after_in_child=_forget)
