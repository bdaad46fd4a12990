"""Files in shared memory, by which processes of a host hand each other large data.

The process that takes a file removes it. If both are killed before that, the next node process on
the host removes it. Otherwise its memory would be lost until the host starts again.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")  # noqa: S108 - mkstemp makes the files, for this user alone.
_PREFIX = "decod-state-"


def new_memory_file() -> tuple[int, Path]:
    """Make an empty file. Return its descriptor, open for reading and writing, and its path."""
    descriptor, path = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_folder())
    return descriptor, Path(path)


def remove_orphans() -> None:
    """Remove the files of processes that have ended without doing so."""
    for path in _folder().glob(f"{_PREFIX}*"):
        pid, _, _ = path.name.removeprefix(_PREFIX).partition("-")
        if pid.isdigit() and not _is_running(int(pid)):
            with suppress(OSError):  # Another user's, or another process has just removed it.
                path.unlink()


def _folder() -> Path:
    return _FOLDER if _FOLDER.is_dir() else Path(tempfile.gettempdir())


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
