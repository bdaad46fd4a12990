"""Checks of single values that came from a peer.

Each check takes a field's name and value. It returns the value with its narrow type, or raises
`MalformedMessageError`. The same checks run on this node's own messages, where a failure is a bug.
An error never shows the whole text of a peer: the text is cut and made printable.
"""

import math
import re
from collections.abc import Callable, Collection, Hashable

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.texts import clip

ITERATION_MAX = 2**48
COUNT_MAX = 2**31 - 1
NUMBER_MAX = 2**63 - 1
STAGE_INDEX_MAX = 4095
CAPACITY_MAX = 65536
DATA_NODE_INDEX_MAX = 65535
MEMBERS_MAX = 100_000
ENTRIES_MAX = 262_144
"""Most entries of all repeated fields of one message together."""
REASON_LENGTH_MAX = 200
SEAL_SIZE_MAX_BYTES = 512
BANS_SIZE_MAX_BYTES = 2 << 20
ADDRESS_LENGTH_MAX = 262
LATENCY_MAX_S = 3600.0
BANDWIDTH_MAX_BYTES_PER_S = 1e15
COMPUTE_TIME_MAX_S = 86_400.0

NODE_ID = re.compile(r"[a-z2-7]{52}")
_RUN_ID = re.compile(r"[a-z2-7]{26}")
_STATE = re.compile(r"[a-z0-9_-]{0,32}")
_NAME = re.compile(r"[A-Za-z0-9._-]{0,32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# A name or IPv4 address, or an IPv6 address in brackets (with a zone), then a port.
_ADDRESS = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.%a-z]{2,64}\]):([1-9][0-9]{0,4})")


def malformed(field: str, value: object, *, allowed: str) -> MalformedMessageError:
    """Return the error for one field. It shows at most 60 characters of the value."""
    # Cut before quoting: a text may have megabytes.
    shown = repr(value[:61] if isinstance(value, (str, bytes)) else value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return MalformedMessageError(
        f"{field} is {shown}",
        why=f"it must be {allowed}",
        fix="run the same version of decod on every node",
    )


def integer(low: int, high: int) -> Callable[[str, int], int]:
    """Return a check for integers from `low` to `high`, both included."""

    def check(field: str, value: int) -> int:
        if not low <= value <= high:
            raise malformed(field, value, allowed=f"from {low} to {high}")
        return value

    return check


def _pattern(pattern: re.Pattern[str], allowed: str) -> Callable[[str, str], str]:
    def check(field: str, value: str) -> str:
        if pattern.fullmatch(value) is None:
            raise malformed(field, value, allowed=allowed)
        return value

    return check


name = _pattern(_NAME, "at most 32 letters, digits, dots, _ and -")
state = _pattern(_STATE, "at most 32 of a-z, 0-9, hyphen and underscore")
sha256 = _pattern(_SHA256, "64 lower-case hexadecimal digits")
known_sha256 = _pattern(
    re.compile(r"([0-9a-f]{64})?"), "64 lower-case hexadecimal digits, or nothing"
)
_node_id = _pattern(NODE_ID, "52 characters of a-z and 2-7")
_run_id = _pattern(_RUN_ID, "26 characters of a-z and 2-7")


def node_id(field: str, value: str) -> NodeId:
    """Check a node id."""
    return NodeId(_node_id(field, value))


def run_id(field: str, value: str) -> RunId:
    """Check a run id."""
    return RunId(_run_id(field, value))


def address(field: str, value: str) -> str:
    """Check the form of `host:port`, with IPv6 in brackets, but not whether it can be dialled."""
    match = _ADDRESS.fullmatch(value) if len(value) <= ADDRESS_LENGTH_MAX else None
    if match is None or int(match[2]) > 65535:
        raise malformed(field, value, allowed="host:port with a port from 1 to 65535")
    return value


def printable(length_max: int) -> Callable[[str, str], str]:
    """Return a check for texts of at most `length_max` characters without control characters."""

    def check(field: str, value: str) -> str:
        if len(value) > length_max or not value.isprintable():
            raise malformed(field, value, allowed=f"at most {length_max} printable characters")
        return value

    return check


def blob(size_max_bytes: int) -> Callable[[str, bytes], bytes]:
    """Return a check for at most `size_max_bytes` bytes of any kind."""

    def check(field: str, value: bytes) -> bytes:
        if len(value) > size_max_bytes:
            raise malformed(field, f"{len(value)} bytes", allowed=f"at most {size_max_bytes} bytes")
        return value

    return check


reason = printable(REASON_LENGTH_MAX)


def clip_printable(text: str, length_max: int) -> str:
    """Return `text` as one printable line of at most `length_max` characters."""
    line = "".join(c if c.isprintable() else " " for c in clip(text, length_max))
    return line.strip()


def clip_reason(text: str) -> str:
    """Return `text` as a reason that a peer accepts: one printable line of bounded length."""
    return clip_printable(text, REASON_LENGTH_MAX)


def duration(field: str, value: float) -> float:
    """Check a duration in seconds: finite and not negative."""
    if not math.isfinite(value) or value < 0:
        raise malformed(field, value, allowed="a finite number of seconds, at least 0")
    return value


def magnitude(field: str, value: float) -> float:
    """Check a number that must be finite and not negative."""
    if not math.isfinite(value) or value < 0:
        raise malformed(field, value, allowed="a finite number, at least 0")
    return value


def _bounded(high: float, unit: str) -> Callable[[str, float], float]:
    def check(field: str, value: float) -> float:
        # Written so that NaN fails.
        if not 0 <= value <= high:
            raise malformed(field, value, allowed=f"from 0 to {high:g} {unit}")
        return value

    return check


latency = _bounded(LATENCY_MAX_S, "seconds")
bandwidth = _bounded(BANDWIDTH_MAX_BYTES_PER_S, "bytes a second")
compute_time = _bounded(COMPUTE_TIME_MAX_S, "seconds")


def cost(field: str, value: float) -> float:
    """Check a cost in seconds: not negative, but possibly infinite."""
    if math.isnan(value) or value < 0:
        raise malformed(field, value, allowed="a number of seconds, at least 0")
    return value


def finite(field: str, value: float) -> float:
    """Check a number that must be neither infinite nor NaN."""
    if not math.isfinite(value):
        raise malformed(field, value, allowed="a finite number")
    return value


def length(field: str, value: int, *, low: int, high: int) -> None:
    """Raise unless a repeated field has from `low` to `high` entries."""
    if not low <= value <= high:
        raise malformed(field, f"{value} entries", allowed=f"{low} to {high} entries")


def unique(field: str, values: Collection[Hashable]) -> None:
    """Raise if a value comes twice."""
    if len(set(values)) != len(values):
        raise malformed(field, "an entry twice", allowed="each entry once")


def one_of(choices: Collection[int]) -> Callable[[str, int], int]:
    """Return a check for one of some whole numbers."""

    def check(field: str, value: int) -> int:
        if value not in choices:
            raise malformed(field, value, allowed=f"one of {', '.join(map(str, choices))}")
        return value

    return check


def within(low: float, high: float) -> Callable[[str, float], float]:
    """Return a check for numbers from `low` to `high`, both included and finite."""

    def check(field: str, value: float) -> float:
        if not low <= value <= high:
            raise malformed(field, value, allowed=f"from {low} to {high}")
        return value

    return check


def boolean(_field: str, value: bool) -> bool:  # noqa: FBT001 - A value to check, not a switch.
    """Return the value, which protobuf has checked already."""
    return value


iteration = integer(0, ITERATION_MAX)
number = integer(0, NUMBER_MAX)
count = integer(0, COUNT_MAX)
stage_index = integer(0, STAGE_INDEX_MAX)
num_stages = integer(1, STAGE_INDEX_MAX + 1)
capacity = integer(1, CAPACITY_MAX)
usable_capacity = integer(0, CAPACITY_MAX)
num_flows = integer(0, CAPACITY_MAX)
index = integer(0, DATA_NODE_INDEX_MAX)
num_parts = integer(1, DATA_NODE_INDEX_MAX)
num_summed = integer(1, COUNT_MAX)
data_node_index = integer(-1, DATA_NODE_INDEX_MAX)
