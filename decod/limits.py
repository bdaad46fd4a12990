"""Limits of the values that travel between nodes, written as annotations of fields.

    path: Annotated[tuple[NodeId, ...], AtLeast(1), AtMost(HOPS_MAX), Unique()]

A class whose objects travel says here all that others may rely on. `decod.wire` derives from it how
they are written, read and counted, and `scripts/gen_protos.py` derives `control.proto`. A rule
about several fields is a method `verify`, which raises `malformed`.

The limits hold in both directions. A peer's value beyond them is malformed. An own one is a bug.
"""

import math
import re
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Annotated, Any

from decod.errors import MalformedMessageError

ORDINAL_MAX = 2**48
COUNT_MAX = 2**31 - 1
NUMBER_MAX = 2**63 - 1
STAGE_INDEX_MAX = 4095
STAGES_MAX = STAGE_INDEX_MAX + 1
NUM_BLOCKS_MAX = 99_999
"""Most blocks of a stage."""
CAPACITY_MAX = 65536
DATA_NODE_INDEX_MAX = 65535
MEMBERS_MAX = 100_000
ENTRIES_MAX = 262_144
"""Most entries of all repeated fields of one message together."""
REASON_LENGTH_MAX = 200
SEAL_SIZE_MAX_BYTES = 512
DIGEST_BYTES = 32
"""The size of a SHA-256."""
PROOF_BYTES = DIGEST_BYTES + 96
"""A proof is a digest, and then what shows who has signed it."""
ADDRESS_LENGTH_MAX = 262
LATENCY_MAX_S = 3600.0
BANDWIDTH_MAX_BYTES_PER_S = 1e15
COMPUTE_TIME_MAX_S = 86_400.0
_FLOAT_MAX = math.nextafter(math.inf, 0.0)


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


def unique(field: str, values: Collection[Hashable]) -> None:
    """Raise `MalformedMessageError` if a value comes twice."""
    if len(set(values)) != len(values):
        raise malformed(field, "an entry twice", allowed="each entry once")


def length(field: str, value: int, *, low: int, high: int) -> None:
    """Raise `MalformedMessageError` unless a repeated field has from `low` to `high` entries."""
    if not low <= value <= high:
        raise malformed(field, f"{value} entries", allowed=f"{low} to {high} entries")


# --- single values ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Allowed:
    """The range of a single value."""

    fits: Callable[[Any], object]
    """Returns something true for a value that is allowed."""
    text: str
    """The allowed values, in words for people."""
    low: float | None = None
    """Set with `high` for numbers: then the two say everything, NaN never fits."""
    high: float | None = None
    length_max: int = 0
    """The length of a text for people."""
    cut: bool = False
    """The sender cuts its own value to what is allowed: it may quote an exception, say."""

    def check(self, field: str, value: Any) -> Any:
        """Return a field's value, or raise `MalformedMessageError`."""
        if not self.fits(value):
            raise self.refusal(field, value)
        return value

    def refusal(self, field: str, value: object) -> MalformedMessageError:
        """Return the error for a value that does not fit."""
        shown = f"{len(value)} bytes" if isinstance(value, bytes) else value
        return malformed(field, shown, allowed=self.text)


def within(low: float, high: float, text: str = "", *, cut: bool = False) -> Allowed:
    """Numbers from `low` to `high`, both included."""
    text = text or f"from {_shown(low)} to {_shown(high)}"
    # Written so that NaN fails.
    return Allowed(lambda value: low <= value <= high, text, low, high, cut=cut)


def _shown(number: float) -> str:
    return str(number).removesuffix(".0")


def one_of(choices: Collection[int]) -> Allowed:
    """Some whole numbers."""
    return Allowed(choices.__contains__, f"one of {', '.join(map(str, choices))}")


def matching(pattern: str, text: str) -> Allowed:
    """Texts that match a pattern as a whole."""
    return Allowed(re.compile(pattern).fullmatch, text)


def printable(length_max: int, *, cut: bool = False) -> Allowed:
    """Texts of at most `length_max` characters without control characters."""
    return Allowed(
        lambda value: len(value) <= length_max and value.isprintable(),
        f"at most {length_max} printable characters",
        length_max=length_max,
        cut=cut,
    )


def blob(size_max_bytes: int) -> Allowed:
    """At most so many bytes, of any kind."""
    return Allowed(lambda value: len(value) <= size_max_bytes, f"at most {size_max_bytes} bytes")


def exactly(num_bytes: int) -> Allowed:
    """So many bytes, of any kind."""
    return Allowed(lambda value: len(value) == num_bytes, f"{num_bytes} bytes")


def none_or(num_bytes: int) -> Allowed:
    """So many bytes, or none."""
    return Allowed(lambda value: len(value) in (0, num_bytes), f"none, or {num_bytes} bytes")


# A name or IPv4 address, or an IPv6 address in brackets (with a zone), then a port.
_ADDRESS = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.%a-z]{2,64}\]):([1-9][0-9]{0,4})")


def _is_address(value: str) -> bool:
    match = _ADDRESS.fullmatch(value) if len(value) <= ADDRESS_LENGTH_MAX else None
    return match is not None and int(match[2]) <= 65535


NODE_ID = matching(r"[a-z2-7]{52}", "52 characters of a-z and 2-7")
RUN_ID = matching(r"[a-z2-7]{26}", "26 characters of a-z and 2-7")
BANDWIDTH = within(
    0, BANDWIDTH_MAX_BYTES_PER_S, f"from 0 to {BANDWIDTH_MAX_BYTES_PER_S:g} bytes a second"
)

Ordinal = Annotated[int, within(0, ORDINAL_MAX)]
"""The largest number of an iteration, a version or a term."""
Number = Annotated[int, within(0, NUMBER_MAX)]
Count = Annotated[int, within(0, COUNT_MAX)]
StageIndex = Annotated[int, within(0, STAGE_INDEX_MAX)]
NumStages = Annotated[int, within(1, STAGES_MAX)]
NumFlows = Annotated[int, within(0, CAPACITY_MAX)]
"""The largest number of flows or microbatches through one node."""
SomeFlows = Annotated[int, within(1, CAPACITY_MAX)]
Index = Annotated[int, within(0, DATA_NODE_INDEX_MAX)]
NumBlocks = Annotated[int, within(1, NUM_BLOCKS_MAX)]
DataNodeIndex = Annotated[int, within(-1, DATA_NODE_INDEX_MAX)]
Duration = Annotated[float, within(0, _FLOAT_MAX, "a finite number of seconds, at least 0")]
Cost = Annotated[float, within(0, math.inf, "a number of seconds, at least 0")]
Magnitude = Annotated[float, within(0, _FLOAT_MAX, "a finite number, at least 0")]
Finite = Annotated[float, within(-_FLOAT_MAX, _FLOAT_MAX, "a finite number")]
Latency = Annotated[float, within(0, LATENCY_MAX_S, f"from 0 to {LATENCY_MAX_S:g} seconds")]
Bandwidth = Annotated[float, BANDWIDTH]
ComputeTime = Annotated[
    float, within(0, COMPUTE_TIME_MAX_S, f"from 0 to {COMPUTE_TIME_MAX_S:g} seconds")
]
Address = Annotated[str, Allowed(_is_address, "host:port with a port from 1 to 65535")]
NodeName = Annotated[
    str, matching(r"[A-Za-z0-9._-]{0,32}", "at most 32 letters, digits, dots, _ and -")
]
StateName = Annotated[
    str, matching(r"[a-z0-9_-]{0,32}", "at most 32 of a-z, 0-9, hyphen and underscore")
]
Sha256 = Annotated[str, matching(r"[0-9a-f]{64}", "64 lower-case hexadecimal digits")]
SomeSha256 = Annotated[
    str, matching(r"([0-9a-f]{64})?", "64 lower-case hexadecimal digits, or nothing")
]
ReasonText = Annotated[str, printable(REASON_LENGTH_MAX, cut=True)]
"""For people."""
SealBytes = Annotated[bytes, blob(SEAL_SIZE_MAX_BYTES)]
ProofBytes = Annotated[bytes, none_or(PROOF_BYTES)]


# --- tuples -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AtMost:
    """Most entries of a tuple. Every tuple needs one."""

    num: int


StageBlocks = Annotated[tuple[NumBlocks, ...], AtMost(STAGES_MAX)]
"""A cut: the number of blocks of each relay stage. None: as the run file says."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Fewest entries of a tuple."""

    num: int


class Unique:
    """No entry comes twice.

    Args:
        by: Fields of an entry that together come once. None: the whole entry.
    """

    def __init__(self, *by: str) -> None:
        self.by = by


@dataclass(frozen=True, slots=True)
class Each:
    """What the entries of a tuple are that are plain tuples in the core: it names their parts."""

    cls: type
    """A named tuple."""


@dataclass(frozen=True, slots=True)
class TravelsAs:
    """The value has another form on its way.

    Attributes:
        cls: That form. `cls.of(value)` makes it, `told` gives the value back.
    """

    cls: Any
