"""The state folders of training loops that have chosen none."""

from pathlib import Path

from decod.config.node_config import default_state_dir
from decod.daemon.node_folder import is_in_use

_FOLDERS_MAX = 64
"""Loops on one host that have no state folder of their own choice."""


def _folders() -> list[Path]:
    return [default_state_dir() / "loops" / str(number + 1) for number in range(_FOLDERS_MAX)]


def free_folders() -> list[Path]:
    """Return state folders that no other loop on this host uses, the one to prefer first."""
    return [folder for folder in _folders() if not is_in_use(folder)]


def folders_in_use() -> list[Path]:
    """Return the state folders of the loops that run on this host."""
    return [folder for folder in _folders() if is_in_use(folder)]
