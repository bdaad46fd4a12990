"""The settings of a collaborative optimizer, and what is wrong with them."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decod.compression.plan import Method
from decod.errors import ConfigError

_JOIN_STRING_MAX = 8192
_SAMPLES_MAX = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The choices of a script about its run and its host. See `CollaborativeOptimizer`."""

    run: str | None = None
    join: str | None = None
    target_batch_size: int
    batch_size_per_step: int
    count: str = "samples"
    use_local_updates: bool = False
    gradient_accumulation_steps: int = 1
    overlap: bool = False
    compression: str = "none"
    averaging_timeout_s: float = 60.0
    share: int | None = None
    state_dir: str | None = None
    listen: str = "0.0.0.0:0"
    advertise: str | None = None
    name: str | None = None
    upload_max_mbit: float | None = None
    page: bool = True
    verbose: bool = True

    def __post_init__(self) -> None:
        for field in ("target_batch_size", "batch_size_per_step", "gradient_accumulation_steps"):
            _require(field, getattr(self, field), _is_count, "it is a whole number of at least 1")
        if self.share is not None:
            _require("share", self.share, _is_count, "it is a whole number of at least 1, or None")
        for field in ("use_local_updates", "overlap", "page", "verbose"):
            _require(field, getattr(self, field), _is_flag, "it is True or False")
        _require(
            "averaging_timeout_s",
            self.averaging_timeout_s,
            lambda value: type(value) in (int, float) and math.isfinite(value) and value > 0,
            "it is a number of seconds above 0",
        )
        if self.upload_max_mbit is not None:
            why = "it is a number of Mbit/s from 1 to a million, or None"
            _require("upload_max_mbit", self.upload_max_mbit, _is_rate, why)
        for field in ("run", "state_dir", "advertise", "name"):
            _require(
                field, getattr(self, field), _is_text_or_none, "it is a text that is not empty"
            )
        _require("listen", self.listen, _is_address, 'it has the form "host:port"')
        if self.advertise is not None:
            _require("advertise", self.advertise, _is_address, 'it has the form "host:port"')
        methods = tuple(method.value for method in Method)
        _require("compression", self.compression, methods.__contains__, f"it is one of {methods}")
        why = "it says what sizes are of: samples, or tokens that are targets"
        _require("count", self.count, ("samples", "tokens").__contains__, why)
        self._require_a_run()

    def _require_a_run(self) -> None:
        if (self.run is None) == (self.join is None):
            both = "both run and join are" if self.join is not None else "neither run nor join is"
            raise ConfigError(
                f"{both} given",
                why="a host either begins a run, or joins one that another host has begun",
                fix='give run="my-run" at the first host, and join=... with the join string that '
                "it shows at all others",
                code="E-CFG-090",
            )
        if self.join is not None and not 0 < len(self.join) <= _JOIN_STRING_MAX:
            raise ConfigError(
                f"join has {len(self.join)} characters",
                why="it is a join string, or the path of a file with one",
                fix="copy the join string that the first host shows",
                code="E-CFG-090",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the settings as the node process gets them."""
        return asdict(self)


def read_join(join: object) -> str | None:
    """Return the join string that `join` is, or that is in the file that it names.

    Raises:
        ConfigError: The file can't be read, or `join` is no text and no path.
    """
    if join is None:
        return None
    if not isinstance(join, (str, Path)):
        raise _refused("join", join, "it is a join string, or the path of a file with one")
    path = Path(join)
    try:
        if isinstance(join, str) and (len(join) > 255 or not path.is_file()):
            if "@" not in join and ("/" in join or path.suffix):
                raise FileNotFoundError("there is no such file")
            return join.strip()
        with path.open(encoding="utf-8") as file:
            return file.read(_JOIN_STRING_MAX + 1).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the file {str(path)[:200]!r} can't be read ({error})",
            why="the join string is expected there",
            fix="give the join string itself, or a file that this user can read",
            code="E-CFG-090",
        ) from error


def checked_batch_size(batch_size: object) -> int:
    """Return the number of samples of a step.

    Raises:
        ConfigError: It is no such number.
    """
    _require("batch_size", batch_size, _is_count, "it is a whole number of at least 1")
    assert isinstance(batch_size, int)
    return batch_size


def _require(name: str, value: Any, holds: Callable[[Any], bool], why: str) -> None:
    if not holds(value):
        raise _refused(name, value, why)


def _refused(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(
        f"{name} is {str(value)[:100]!r}"
        if isinstance(value, str)
        else f"{name} is {value!r:.100}",
        why=why,
        fix="correct the argument of decod.CollaborativeOptimizer",
        code="E-CFG-090",
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= _SAMPLES_MAX


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= 1e6


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_text_or_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and 0 < len(value) <= 4096)


def _is_address(value: object) -> bool:
    if not isinstance(value, str) or len(value) > 300:
        return False
    host, _, port = value.rpartition(":")
    return bool(host) and port.isdigit() and int(port) < 1 << 16
