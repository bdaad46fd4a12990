"""Files in shared memory, by which processes of a host hand each other large data.

A container may have little shared memory. A file that does not fit there goes to a folder for
temporary files.

The process that takes a file removes it. If both are killed before that, the next node process on
the host removes it. Otherwise its memory would be lost until the host starts again.
"""

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")  # noqa: S108 - mkstemp makes the files, for this user alone.
_ON_DISK = Path("/var/tmp")  # noqa: S108 - likewise. `/tmp` may be small memory, too.
_PREFIX = "decod-state-"


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
    descriptor, name = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=folder)
    try:
        if size_bytes:
            os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        os.close(descriptor)
        Path(name).unlink(missing_ok=True)
        raise
    return descriptor, Path(name)


def is_in_memory(path: Path) -> bool:
    """Whether a file lies in shared memory."""
    return path.parent == _FOLDER


def remove_orphans() -> None:
    """Remove the files of processes that have ended without doing so."""
    for path in (path for folder in _folders() for path in folder.glob(f"{_PREFIX}*")):
        pid, _, _ = path.name.removeprefix(_PREFIX).partition("-")
        if pid.isdigit() and not _is_running(int(pid)):
            with suppress(OSError):  # Another user's, or another process has just removed it.
                path.unlink()


def _folders() -> list[Path]:
    """Return where files may lie, the best place first."""
    all_folders = (_FOLDER, Path(tempfile.gettempdir()), _ON_DISK)
    return [folder for folder in dict.fromkeys(all_folders) if folder.is_dir()]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
