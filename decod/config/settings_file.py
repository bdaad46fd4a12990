"""The file that keeps what a host's operator has set, over restarts of the node.

    STATE_DIR/settings.json     {"upload": "20Mbit", "schedule": "22:00-07:00"}

`decod set` writes it. An option of the command line wins over the file, for that start.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decod.config.node_settings import SETTINGS, parse_setting
from decod.config.strict import StrictModel, list_model_keys, read_json
from decod.errors import ConfigError
from decod.files import replace_durably
from decod.texts import why_of

SETTINGS_FILE = "settings.json"


class SettingsFile(StrictModel):
    """The content of the file. A missing key means that the default holds."""

    upload: str | None = None
    download: str | None = None
    threads: str | None = None
    disk: str | None = None
    device_memory: str | None = None
    schedule: str | None = None
    pause_when: str | None = None


def read_settings(state_dir: Path) -> dict[str, Any]:
    """Return the values in a node's settings file by the names of their settings. No file: none.

    Raises:
        ConfigError: The file can't be read, is no JSON (E-CFG-050, E-CFG-051), has a key or type
            that is unknown (E-CFG-052), or an impossible value (E-CFG-056).
    """
    path = state_dir / SETTINGS_FILE
    if not os.path.lexists(path):
        return {}
    guide = "docs/reference.md"
    found = read_json(path, SettingsFile, list_model_keys([SettingsFile]), guide=guide)
    texts = found.model_dump(exclude_none=True)
    return {name: parse_setting(name, text, place=f"{path}: ") for name, text in texts.items()}


def write_settings(state_dir: Path, values: Mapping[str, Any]) -> None:
    """Replace a node's settings file, completely or not at all.

    Raises:
        ConfigError: The disk refuses (E-CFG-057). The old file is unchanged.
    """
    texts = {name: SETTINGS[name].show(value) for name, value in values.items()}
    path = state_dir / SETTINGS_FILE
    try:
        replace_durably(path, json.dumps(texts, indent=2).encode() + b"\n", mode=0o600)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written",
            why=f"{why_of(error)}, and a setting that the next start forgets is none",
            fix="make room or mend the disk; nothing has changed",
            code="E-CFG-057",
        ) from error
