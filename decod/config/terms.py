"""The terms that all peers of a collaborative run agree on, as JSON with a hash."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from decod.compression.plan import Method
from decod.errors import ConfigError, RejectedError
from decod.run.protocol_config import PROTOCOL_VERSION
from decod.texts import no_constant, unique

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_NUMBER_MAX = 1 << 48
_TEXT_MAX = 4096

_WORDS = {
    "protocol": "the version of decod's protocol",
    "run": "the run's name",
    "target_batch_size": "the target batch size",
    "use_local_updates": "whether peers step by themselves between averages",
    "compression": "how averages are compressed",
    "wide": "the dtype of averages",
    "num_elements": "the number of the model's parameters",
    "fingerprint": "the shapes of the model, or the kind and options of the optimizer or "
    "its scheduler",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms:
    """The terms of a collaborative run."""

    run: str
    target_batch_size: int
    use_local_updates: bool
    compression: str
    wide: str
    """`float32` or `float64`: of contributions and averages."""
    num_elements: int
    """The number of all parameters that are trained."""
    fingerprint: str
    """SHA-256 of shapes and dtypes of the parameters, and of kind and options of the optimizer and
    its scheduler."""
    protocol: int = PROTOCOL_VERSION

    def to_json(self) -> str:
        """Return the terms as canonical JSON."""
        return json.dumps({"collaboration": asdict(self)}, sort_keys=True, separators=(",", ":"))

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> "RunTerms":
        """Return the terms that another peer tells.

        Raises:
            RejectedError: They are no terms of a collaborative run (E-REJ-030).
        """
        try:
            whole = json.loads(
                text[:_TEXT_MAX], object_pairs_hook=unique, parse_constant=no_constant
            )
            said = whole["collaboration"]
            found = cls(**{each.name: said[each.name] for each in fields(cls)})
            found.check()
        except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
            raise RejectedError(
                "the node that answers is in no collaborative run",
                why="it trains a language model in stages, or runs another version of decod",
                fix="use a join string that a script with decod.CollaborativeOptimizer has shown, "
                "and the same version of decod on all hosts",
                code="E-REJ-030",
            ) from error
        return found

    def check(self) -> None:
        """Check that the terms can be those of a run.

        Raises:
            ConfigError: They can't (E-CFG-090).
        """
        right = {
            "run": _is_text(self.run, _NAME),
            "target_batch_size": _is_count(self.target_batch_size),
            "use_local_updates": type(self.use_local_updates) is bool,
            "compression": self.compression in [method.value for method in Method],
            "wide": self.wide in ("float32", "float64"),
            "num_elements": _is_count(self.num_elements),
            "fingerprint": _is_text(self.fingerprint, _FINGERPRINT),
            "protocol": _is_count(self.protocol),
        }
        for name, holds in right.items():
            if not holds:
                raise ConfigError(
                    f"{name} is {ascii(getattr(self, name))[:60]}",
                    why="no run has such a value",
                    fix="a run's name has 1 to 64 letters, digits, dots, _ and -"
                    if name == "run"
                    else "correct the argument of decod.CollaborativeOptimizer",
                    code="E-CFG-090",
                )

    def require_same(self, theirs: "RunTerms") -> None:
        """Check that another peer is in a run like this.

        Raises:
            RejectedError: Something differs (E-REJ-031).
        """
        for name, words in _WORDS.items():
            own = getattr(self, name)
            other = getattr(theirs, name)
            if own == other or name == "run":
                continue
            shown = "" if name == "fingerprint" else f": {own} here, {other} there"
            raise RejectedError(
                f"this script and the run differ in {words}{shown}",
                why="averages of different models, or under different rules, mean nothing",
                fix="run the same script, with the same arguments, at all hosts",
                code="E-REJ-031",
            )


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _NUMBER_MAX


def _is_text(value: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
