"""What an average is of, and how it travels: the leader decides, and says so in openings."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from decod.ids import NodeId
from decod.limits import (
    MEMBERS_MAX,
    STAGES_MAX,
    AtMost,
    Each,
    Ordinal,
    StageIndex,
    Unique,
    one_of,
    within,
)
from decod.planner.partition import SHARE_FULL

FRAGMENTS_MAX = 1024
RANK_MAX = 1 << 20

BITS = (0, 4, 8, 16, 32)
"""Widths of numbers on their way. 0: what the run file says."""


@dataclass(frozen=True, slots=True)
class AverageSpec:
    """One average of a stage. All its members are told the same."""

    fragment: Annotated[int, within(0, FRAGMENTS_MAX)] = 0
    """The part of the parameters that is averaged, from 1. 0: all of them."""
    rank: Annotated[int, within(0, RANK_MAX)] = 0
    """Of the factors of matrices. 0: as the run file says, or there are none."""
    bits: Annotated[int, one_of(BITS)] = 0
    """Of each number on its way. 0: as the run file says."""


WHOLE = AverageSpec()
"""All parameters, as the run file says."""


@dataclass(frozen=True, slots=True)
class AverageFormat:
    """A format in which averages can travel."""

    spec: AverageSpec
    num_bytes: int
    """Of one member's contribution, in the largest stage."""


class SlowShare(NamedTuple):
    """A member that sends slowly."""

    node_id: NodeId
    share: Annotated[int, within(0, SHARE_FULL - 1)]
    """Of an average's parts, in relation to 16 for a member that is as fast as most."""


SlowShares = Annotated[
    tuple[tuple[NodeId, int], ...], Each(SlowShare), AtMost(MEMBERS_MAX), Unique("node_id")
]


class StageVersion(NamedTuple):
    """The version of a stage's average."""

    stage_index: StageIndex
    version: Ordinal
    """In a vote, 0: some member of the stage does not have the average yet."""


StageVersions = Annotated[
    tuple[tuple[int, int], ...], Each(StageVersion), AtMost(STAGES_MAX), Unique("stage_index")
]
