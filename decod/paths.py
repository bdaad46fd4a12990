"""Paths that depend on this user and this process: folders of the home, and relative ones.

A container may run a process for a user without an entry in the password file and without HOME. The
folder in which a command was started may be gone. Neither is a bug of decod.
"""

import os
from pathlib import Path

import platformdirs

from decod.errors import ConfigError

_KINDS = {
    "state": (platformdirs.user_state_path, "XDG_STATE_HOME or --state-dir"),
    "cache": (platformdirs.user_cache_path, "XDG_CACHE_HOME"),
    "config": (platformdirs.user_config_path, "XDG_CONFIG_HOME"),
}
"""Kinds of folders: what finds them, and what else than HOME says where they are."""


def user_folder(kind: str, name: str = "decod") -> Path:
    """Return the system's folder of a kind for this user's files of a program.

    Args:
        kind: `state`, `cache` or `config`.
        name: The program's.

    Raises:
        ConfigError: The system does not know the user's home (E-CFG-100).
    """
    find, others = _KINDS[kind]
    try:
        found = find(name)
    except (RuntimeError, KeyError, OSError) as error:
        raise _homeless(kind, others) from error
    if not found.is_absolute():
        raise _homeless(kind, others)
    return found


def full_path(path: Path) -> Path:
    """Return an absolute path, with the home for a `~` at its beginning.

    Raises:
        ConfigError: The home is not known (E-CFG-100), or the path is relative to a folder that is
            gone (E-CFG-101).
    """
    try:
        expanded = path.expanduser()
    except (RuntimeError, KeyError) as error:
        raise ConfigError(
            f"can't find the home in {path}",
            why="neither HOME nor the system's list of users says where it is",
            fix="write the path in full, or set HOME",
            code="E-CFG-100",
        ) from error
    return absolute_path(expanded)


def absolute_path(path: Path) -> Path:
    """Return an absolute path.

    Raises:
        ConfigError: It is relative to a folder that is gone (E-CFG-101).
    """
    return path if path.is_absolute() else current_folder() / path


def current_folder() -> Path:
    """Return the folder in which this command works.

    Raises:
        ConfigError: It is gone (E-CFG-101).
    """
    try:
        return Path(os.getcwd())
    except OSError as error:
        raise ConfigError(
            "the folder in which this command was started is gone",
            why="relative paths begin there",
            fix="change to another folder, or give full paths",
            code="E-CFG-101",
        ) from error


def _homeless(kind: str, others: str) -> ConfigError:
    return ConfigError(
        f"can't find a folder for decod's {kind}: this user's home is not known",
        why="HOME is not set, and the system's list of users has no entry for this user",
        fix=f"set HOME, {others}",
        code="E-CFG-100",
    )
