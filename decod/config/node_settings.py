"""Settings that a host's operator may change while its node runs. Values are written as for the
options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from decod.config.node_config import (
    NUM_THREADS_MAX,
    NodeConfig,
    read_rate,
    read_size,
    show_rate,
    show_size,
)
from decod.config.schedule import ALWAYS, DEFAULT_PAUSE_RULES, WorkHours, read_rules, show_rules
from decod.errors import ConfigError

UNSET = "default"
"""The word that `decod set` takes instead of a value, to go back to the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing that can be set."""

    name: str
    field: str
    """Its field of `NodeConfig`. None there means that the default holds."""
    option: str
    """The option of the command line for the same."""
    read: Callable[[str], Any]
    """Returns the value that a text describes, or raises ValueError."""
    show: Callable[[Any], str]
    """Returns the text of a value."""
    default: str
    """The value that holds if it is not set."""
    counts: str
    """The time from which a change counts."""
    for_volunteers: bool = False
    """True if data nodes, which can't be paused, do without it."""


def _read_threads(text: str) -> int:
    plain = text.isascii() and text.isdecimal() and len(text) <= 4
    if not plain or not 1 <= int(text) <= NUM_THREADS_MAX:
        raise ValueError(f"{text[:60]!r} is no number of threads from 1 to {NUM_THREADS_MAX}")
    return int(text)


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            name="upload",
            field="upload_max_mbit",
            option="--upload-max",
            read=read_rate,
            show=show_rate,
            default="no limit",
            counts="from now on",
        ),
        Setting(
            name="download",
            field="download_max_mbit",
            option="--download-max",
            read=read_rate,
            show=show_rate,
            default="no limit",
            counts="from now on",
        ),
        Setting(
            name="threads",
            field="num_threads",
            option="--threads",
            read=_read_threads,
            show=str,
            default="as many as torch takes",
            counts="from the next job of the compute process on",
        ),
        Setting(
            name="disk",
            field="disk_max_bytes",
            option="--disk-max",
            read=read_size,
            show=show_size,
            default="no limit",
            counts="for what is written from now on; nothing is removed for it",
        ),
        Setting(
            name="device_memory",
            field="device_memory_max_bytes",
            option="--device-memory-max",
            read=read_size,
            show=show_size,
            default="what is free",
            counts="when this node next joins: restart it, or `decod pause --free-device` and then"
            " `decod resume`",
        ),
        Setting(
            name="schedule",
            field="schedule",
            option="--schedule",
            read=WorkHours.parse,
            show=str,
            default=ALWAYS,
            counts="from now on",
            for_volunteers=True,
        ),
        Setting(
            name="pause_when",
            field="pause_when",
            option="--pause-when",
            read=read_rules,
            show=show_rules,
            default=show_rules(DEFAULT_PAUSE_RULES),
            counts="from now on",
            for_volunteers=True,
        ),
    )
}


def parse_setting(name: str, text: str, *, place: str = "") -> Any:
    """Return the value of a known setting that a text describes.

    Args:
        name: Of the setting.
        text: The value, as on the command line.
        place: Where the text is from, for errors.

    Raises:
        ConfigError: It describes none, or one that no node can have (E-CFG-056).
    """
    setting = SETTINGS[name]
    try:
        value = setting.read(text)
        replace(NodeConfig(), **{setting.field: value})
    except ValueError as error:
        why = str(error)
    except ConfigError as error:
        why = f"{error.what}: {error.why}"
    else:
        return value
    raise ConfigError(
        f"{place}{name} can't be {text[:60]!r}",
        why=why,
        fix=f"see {setting.option} in docs/reference.md, or leave {name} out for the default,"
        f" {setting.default}",
        code="E-CFG-056",
    )


def given_in(config: NodeConfig) -> dict[str, Any]:
    """Return the values of a configuration that are not the defaults, by their settings' names."""
    values = {name: getattr(config, setting.field) for name, setting in SETTINGS.items()}
    return {name: value for name, value in values.items() if value is not None}


def with_values(config: NodeConfig, values: Mapping[str, Any]) -> NodeConfig:
    """Return a configuration with these values. All other settings are at their defaults."""
    fields: dict[str, Any] = {s.field: values.get(name) for name, s in SETTINGS.items()}
    return replace(config, **fields)
