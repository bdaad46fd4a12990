"""The folder in which a node keeps its identity and its logs. One daemon uses it at a time."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from decod.errors import ConfigError
from decod.files import open_lock
from decod.texts import why_of

_LOCK_FILE = "lock"


class StateFolder:
    """The folder of one node, locked while its daemon runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    def lock(self) -> None:
        """Lock the folder.

        Raises:
            ConfigError: Another daemon uses the folder (E-CFG-041), or it can't be used
                (E-CFG-042).
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open_lock(self.path / _LOCK_FILE)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.unlock()
            raise ConfigError(
                f"another decod daemon uses {self.path}",
                why="a folder holds one node's identity",
                fix="stop it, or give this one its own --state-dir",
                code="E-CFG-041",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"can't use the state folder {self.path}",
                why=why_of(error),
                fix="give a --state-dir that you may write to",
                code="E-CFG-042",
            ) from error

    def unlock(self) -> None:
        if self._lock is not None:
            # Closing may report an error of the disk, but releases the lock in any case.
            with suppress(OSError):
                self._lock.close()
            self._lock = None


def is_in_use(path: Path) -> bool:
    """Whether a daemon uses a state folder."""
    try:
        descriptor = os.open(path / _LOCK_FILE, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def nearest_folder(path: Path) -> Path:
    """Return a folder itself, or what exists of the way to it if it is yet to be made."""
    # A parent that may not be searched counts as missing. `Path.exists` would raise.
    return next(each for each in (path, *path.parents) if os.path.exists(each))
