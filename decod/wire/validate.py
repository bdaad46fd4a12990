"""Checks of single values that came from a peer, for what is no message of the core.

Each check takes a field's name and value. It returns the value with its narrow type, or raises
`MalformedMessageError`. An error never shows the whole text of a peer: the text is cut and made
printable. The limits of the core's messages stand in their classes (`decod.limits`).
"""

from collections.abc import Callable, Sequence
from typing import Any

from decod import limits
from decod.ids import NodeId, RunId
from decod.limits import ENTRIES_MAX as ENTRIES_MAX
from decod.limits import NUMBER_MAX as NUMBER_MAX
from decod.limits import REASON_LENGTH_MAX
from decod.limits import length as length
from decod.limits import malformed as malformed
from decod.limits import unique as unique
from decod.texts import clip


def _of(hint: Any) -> Callable[[str, Any], Any]:
    """Return the check of an annotated type."""
    (allowed,) = hint.__metadata__
    check: Callable[[str, Any], Any] = allowed.check
    return check


iteration: Callable[[str, int], int] = _of(limits.Ordinal)
number: Callable[[str, int], int] = _of(limits.Number)
stage_index: Callable[[str, int], int] = _of(limits.StageIndex)
num_blocks: Callable[[str, int], int] = _of(limits.NumBlocks)
address: Callable[[str, str], str] = _of(limits.Address)
sha256: Callable[[str, str], str] = _of(limits.Sha256)
known_sha256: Callable[[str, str], str] = _of(limits.SomeSha256)
reason: Callable[[str, str], str] = _of(limits.ReasonText)


def stage_blocks(field: str, value: Sequence[int]) -> limits.StageBlocks:
    """Return a cut: the number of blocks of each relay stage, or none."""
    length(field, len(value), low=0, high=limits.STAGES_MAX)
    return tuple(num_blocks(field, each) for each in value)


def node_id(field: str, value: str) -> NodeId:
    """Check a node id."""
    return NodeId(limits.NODE_ID.check(field, value))


def run_id(field: str, value: str) -> RunId:
    """Check a run id."""
    return RunId(limits.RUN_ID.check(field, value))


def integer(low: int, high: int) -> Callable[[str, int], int]:
    """Return a check for integers from `low` to `high`, both included."""
    return limits.within(low, high).check


def within(low: float, high: float) -> Callable[[str, float], float]:
    """Return a check for numbers from `low` to `high`, both included and finite."""
    return limits.within(low, high).check


def printable(length_max: int) -> Callable[[str, str], str]:
    """Return a check for texts of at most `length_max` characters without control characters."""
    return limits.printable(length_max).check


def blob(size_max_bytes: int) -> Callable[[str, bytes], bytes]:
    """Return a check for at most `size_max_bytes` bytes of any kind."""
    return limits.blob(size_max_bytes).check


def clip_printable(text: str, length_max: int) -> str:
    """Return `text` as one printable line of at most `length_max` characters."""
    line = "".join(c if c.isprintable() else " " for c in clip(text, length_max))
    return line.strip()


def clip_reason(text: str) -> str:
    """Return `text` as a reason that a peer accepts: one printable line of bounded length."""
    return clip_printable(text, REASON_LENGTH_MAX)
