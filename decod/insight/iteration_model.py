"""What models of a round's time have in common: causes, changes, and the gain of a change.

A model holds mean times of a round as peers have recorded them. Its `round_s` is a formula. To
predict the effect of a change, the formula is evaluated again with the changed numbers. There is
one model for each mode: `PipelineModel` and `OptimizerModel`. Their modules have the
formulas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

WIRE_RATIOS: Mapping[str, float] = {
    "none": 1.0,
    "float64": 2.0,
    "float32": 1.0,
    "fp16": 0.5,
    "bf16": 0.5,
    "bfloat16": 0.5,
    "int8": 0.26,
    "int4": 0.135,
}
"""Bytes of a tensor on the wire over its bytes as float32. Other methods depend on the model."""


class Cause(StrEnum):
    """What takes time in a round."""

    DATA = "data"
    COMPUTE = "compute"
    LINKS = "links"
    """Pipeline: activations and gradients between stages."""
    LATENCY = "latency"
    """Pipeline: the stages wait for each other, though none of them is busy all the time."""
    AVERAGING = "averaging"
    """And the optimizer's step behind it."""
    MATCHMAKING = "matchmaking"
    """Until the peers have found each other. Pipeline: until the first microbatch begins."""
    PEER = "peer"
    """One peer is slower than the others, and all wait for it."""
    OTHER = "other"
    """Time outside of the loop's work, or beyond the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Something to change, and what the model predicts of it."""

    cause: Cause
    """That it makes smaller."""
    what: str
    """For people: what to do."""
    round_s: float
    """Predicted length of a round, in seconds."""
    samples_per_s: float
    """Predicted speed of the run."""
    gain: float
    """Of that speed, beside the modelled speed of today. 0.5: the run is 1.5 times as fast."""
    caution: str = ""
    """Says what else it changes, or what the prediction assumes."""


class RoundModel(Protocol):
    """A model of a round's time."""

    @property
    def round_s(self) -> float:
        """Length of a round, in seconds."""

    @property
    def samples(self) -> float:
        """Samples that all peers together train on in a round."""

    @property
    def slow_peer(self) -> str:
        """Name of the peer that all wait for; empty if there is none."""

    def causes(self) -> dict[Cause, float]:
        """Return the seconds of a round by what takes them. They add up to `round_s`."""

    def changes(self) -> list[Remedy]:
        """Return what could be changed, in any order, with predictions."""

    def unknown(self) -> list[str]:
        """Return what can't be said, since records of peers are missing, in words."""


def speed(model: RoundModel) -> float:
    """Return how many samples the run trains on in a second."""
    return model.samples / max(model.round_s, 1e-9)


def change(
    before: RoundModel, after: RoundModel, cause: Cause, what: str, caution: str = ""
) -> Remedy:
    """Return the change that leads from one model to another."""
    return Remedy(
        cause=cause,
        what=what,
        round_s=after.round_s,
        samples_per_s=speed(after),
        gain=speed(after) / max(speed(before), 1e-9) - 1,
        caution=caution,
    )


def finer_ratio(compression: str | None, to: str) -> float | None:
    """Return bytes after a change of compression over bytes before; None if it is not known."""
    before = WIRE_RATIOS.get(compression or "none")
    return None if before is None else WIRE_RATIOS[to] / before


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
