"""What only Linux has, and a portable way beside each.

Nothing else in decod makes these calls (a test sees to it). With `DECOD_PORTABLE` in the
environment, Linux takes the portable ways, too, so that tests can try them where there is no Mac.

| what | on Linux | elsewhere |
|---|---|---|
| memory that processes share by a descriptor | memfd | POSIX shared memory |
| a file for a secret, which `ssl` reads | memfd | a file of this user, removed at once |
| a folder in memory | `/dev/shm` | none: folders for temporary files serve |
| room in a file, taken at once | `posix_fallocate` | zeros are written |
| a name that one process has | an abstract socket | a lock on a file |
| a process ends with its parent | `prctl` | a thread looks every half second |
| freed memory goes back | `madvise`, glibc's `malloc_trim` | when the process ends |
| what is read again comes from the disk | `posix_fadvise` | it may come from the system's cache |
| limits of a container | control groups, affinity | none |
| the kernel's word on the clock, routes and sockets | `adjtimex`, `IP_MTU`, `/proc` | not known |
"""

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

IS_LINUX = sys.platform == "linux" and not os.environ.get("DECOD_PORTABLE")

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

SHARED_MEMORY = Path("/dev/shm") if IS_LINUX else None  # noqa: S108 - it is no temporary file.
"""A folder whose files are in memory. None: there is none."""

PROC = Path("/proc") if IS_LINUX else Path("/nonexistent")
"""The kernel's folder of processes."""


# Files and memory.


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file without a name, whose content is in memory if possible.

    Args:
        name: For people who look at the process.
    """
    if IS_LINUX:
        return os.memfd_create(name)
    with suppress(ImportError, OSError):
        # The part of multiprocessing.shared_memory that needs no further process.
        import _posixshmem  # type: ignore[import-not-found, unused-ignore]

        unique = f"/{secrets.token_hex(8)}"
        descriptor: int = _posixshmem.shm_open(unique, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        _posixshmem.shm_unlink(unique)
        return descriptor
    descriptor, path = tempfile.mkstemp(prefix=name)
    os.unlink(path)
    return descriptor


@contextmanager
def secret_file(text: bytes) -> Iterator[str]:
    """Lend a file with a secret that nobody else can open."""
    if IS_LINUX:
        descriptor = os.memfd_create("decod-secret")
        try:
            os.write(descriptor, text)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(text)
        file.flush()
        yield file.name


def take_room(descriptor: int, size_bytes: int) -> None:
    """Take so many bytes for a file, which then can be written without an error.

    Raises:
        OSError: There is no room.
    """
    if IS_LINUX:
        os.posix_fallocate(descriptor, 0, size_bytes)
        return
    folder = os.fstatvfs(descriptor)
    if size_bytes > folder.f_bavail * folder.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    piece = bytes(1 << 20)
    written = 0
    while written < size_bytes:
        written += os.pwrite(descriptor, piece[: size_bytes - written], written)


def give_back_pages(mapping: mmap.mmap) -> None:
    """Give the memory of a mapped file back at once, where the system can. It then reads zeros."""
    if IS_LINUX:
        with suppress(OSError):
            mapping.madvise(mmap.MADV_REMOVE)


def forget_cached(descriptor: int, offset: int, num_bytes: int) -> None:
    """Have the next read of a part of a file come from the disk, where the system can."""
    if IS_LINUX:
        os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def opened_again(descriptor: int, flags: int) -> int:
    """Return another descriptor of the same terminal or pipe, with flags of its own.

    Raises:
        OSError: The system does not open it, as elsewhere a pipe.
    """
    place = f"/proc/self/fd/{descriptor}" if IS_LINUX else os.ttyname(descriptor)
    return os.open(place, flags)


@contextmanager
def short_path(folder: Path) -> Iterator[Path]:
    """Lend a short name for a folder, since names of sockets may have 100 bytes."""
    if IS_LINUX:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return
    with tempfile.TemporaryDirectory(prefix="decod-") as place:
        link = Path(place) / "at"
        link.symlink_to(folder.absolute(), target_is_directory=True)
        yield link


# Processes.


class HeldName:
    """A name that one process of this host has at a time. It is free once the process has ended.

    Args:
        name: Up to 80 letters, digits and dashes.

    Raises:
        FileExistsError: Another process has it.
        OSError: The system refuses for another reason.
    """

    def __init__(self, name: str) -> None:
        self._held: socket.socket | None = None
        self._descriptor = -1
        try:
            if IS_LINUX:
                self._held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._held.bind(f"\0decod/{name}")
            else:
                path = Path(tempfile.gettempdir()) / f"decod-{name}.lock"
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(path, flags, 0o600)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.end()
            if error.errno in (errno.EADDRINUSE, errno.EWOULDBLOCK):
                raise FileExistsError(errno.EEXIST, "another process has the name") from error
            raise

    def end(self) -> None:
        """Let others have the name."""
        if self._held is not None:
            self._held.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._held = None
        self._descriptor = -1


_PR_SET_PDEATHSIG = 1
"""The option of Linux's `prctl` for the signal that a process gets when its parent ends."""

_LOOK_S = 0.5


def die_with_parent() -> None:
    """Have this process killed once its parent has ended, whatever it waits for then.

    On Linux even a stopped process ends so, and gives its device's memory back. The parent is the
    thread that has started this process. If it has ended before, nothing happens.
    """
    if IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_KEPT_BYTES = 32 << 20
"""Largest threshold that glibc accepts. Larger blocks are mapped as before."""

_KEPT_BYTES = 1 << 30
"""Amount of freed memory at the top of the heap that the process keeps."""


def keep_freed_memory() -> None:
    """Have this process keep freed memory for the next tensor.

    By default glibc maps every large block anew and returns it when it is freed. Each tensor that
    passes through then costs one page fault per 4 KiB. For 1 MiB activations over gRPC, both ends
    together took 8.6 ms of CPU time per transfer, and 4.2 ms with blocks kept. Does nothing if the
    C library has no such setting.
    """
    with suppress(OSError, AttributeError):
        if IS_LINUX:
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
            mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_memory() -> None:
    """Give freed memory back to the system. Does nothing if the C library can't be asked to.

    glibc keeps what lies between blocks in use. Once a stage's weights had been made narrow, that
    was a quarter of a byte for each of them.
    """
    with suppress(OSError, AttributeError):
        if IS_LINUX:
            ctypes.CDLL(None).malloc_trim(0)


def num_allowed_processors() -> int:
    """Return how many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if IS_LINUX else (os.cpu_count() or 1)


# What the kernel knows.

_TIMEX_SIZE_BYTES = 512
"""At least that of `struct timex` on any architecture. Zeroes ask, and change nothing."""
_TIME_ERROR = 5
"""What adjtimex returns if nothing keeps the clock. From the kernel's timex.h."""


def clock_synchronised() -> bool | None:
    """Return whether a time service keeps the clock; None if the kernel does not say."""
    if not IS_LINUX:
        return None
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_SIZE_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


# From the kernel's in.h and in6.h. Python has no names for them.
_IP_MTU = 14
_IPV6_MTU = 24


def path_mtu_bytes(connected: socket.socket) -> int | None:
    """Return the largest packet on the way to where a socket leads; None if it is not known."""
    if not IS_LINUX:
        return None
    six = connected.family == socket.AF_INET6
    with suppress(OSError):
        level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if six else (socket.IPPROTO_IP, _IP_MTU)
        return connected.getsockopt(level, option)
    return None
