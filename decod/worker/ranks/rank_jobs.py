"""What rank 0 asks of the other ranks, beside the jobs that it passes on. See `crew`."""

from dataclasses import dataclass
from typing import Annotated

from decod.ids import MicrobatchId
from decod.limits import COUNT_MAX, within
from decod.protocol.core.jobs import BaseJob, Positive


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What is free on the rank's device."""

    memory_bytes: int


@dataclass(frozen=True, slots=True)
class SumSettled:
    """The rank's sum of gradients is whole."""

    spoiled: str
    """Why it can't be used; empty if it can."""


class Collective(BaseJob):
    """A job in which the ranks wait for each other, whether a stage is spread or not."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class JoinRanks(Collective):
    """Join the group of ranks, who find each other by a file."""

    file: str
    rank: Positive
    num_ranks: Annotated[int, within(2, COUNT_MAX)]


@dataclass(frozen=True, slots=True)
class AddUp(Collective):
    """Take part in the sum of gradients."""


@dataclass(frozen=True, slots=True)
class SpreadWeights(Collective):
    """Get the weights of rank 0."""


@dataclass(frozen=True, slots=True)
class MeasureFree(BaseJob):
    """Measure the free memory."""

    result = FreeMemory


@dataclass(frozen=True, slots=True)
class MakeReady(BaseJob):
    """Read a microbatch's tokens, before a pass in which the ranks wait for each other."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class SettleSum(BaseJob):
    """Finish the sum of gradients, before all ranks add theirs up."""

    result = SumSettled
