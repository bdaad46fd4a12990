"""Going back: when a stage is lost, all go to a state that can be put together again.

A run's *eras* are counted from 0. When every member of a stage is gone the leader opens the first
iteration of the next era: it says which iteration all members go back to, and which hosts hold the
states of that iteration. Iterations are ordered by era first, so whatever belongs to the abandoned
future (a message, a vote, a state, an election) is simply old. Microbatches keep their ids: the
same tokens are read again.

An era may also begin with another cut of the model: nothing is lost then, and as a rule nothing is
repeated. Members take the blocks that are new to them from the disks of those that had them.

A *mark* is an iteration whose states hosts keep on their disks (`protocol.state.rollback`).
Every opening carries the newest two with the hashes that were committed, so that all members,
newcomers too, know which states fit together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple

from decod.ids import NodeId
from decod.limits import (
    STAGES_MAX,
    AtLeast,
    AtMost,
    Each,
    Ordinal,
    Sha256,
    StageBlocks,
    StageIndex,
    Unique,
)

MARKS_MAX = 2
"""Iterations whose states are kept: one may still be on its way to the disks."""

HOLDERS_MAX = 8
"""Hosts that are named for a stage; more are not needed to find its state."""

KEPT_MAX = 64
"""States that a host tells of."""


class StageHash(NamedTuple):
    """What a stage's parameters are."""

    stage_index: StageIndex
    parameter_hash: Sha256
    """SHA-256 of the parameters."""


Hashes = Annotated[tuple[tuple[int, str], ...], Each(StageHash), AtMost(STAGES_MAX)]
"""Of stages, as in `Ready.hashes`."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An iteration whose states are kept."""

    iteration: Ordinal
    hashes: Annotated[Hashes, Unique("stage_index")]
    """Of all stages, as they were committed."""
    cut: StageBlocks = ()
    """The cut that these stages are of."""
    mirrored: bool = True
    """Hosts of other stages keep the states, too, and not only members of the stages."""

    def hash_of(self, stage_index: int) -> str:
        """Return a stage's; empty if it is not known."""
        return dict(self.hashes).get(stage_index, "")


def add_mark(marks: Sequence[Mark], mark: Mark) -> tuple[Mark, ...]:
    """Return marks with one more, without what it replaces or has made superfluous."""
    # What was marked only for another cut is of no use any more; few hosts have its states.
    earlier = [each for each in marks if each.iteration < mark.iteration and each.mirrored]
    return (*earlier, mark)[-MARKS_MAX:]


@dataclass(frozen=True, slots=True)
class StagePart:
    """What a stage of one cut has of a stage of another."""

    cut: StageBlocks
    """How the model is cut where the part is wanted."""
    stage_index: int
    """There."""


@dataclass(frozen=True, slots=True, order=True)
class Kept:
    """A state that is whole on a host's disk."""

    stage_index: StageIndex
    iteration: Ordinal
    parameter_hash: Sha256
    """SHA-256 of its parameters."""


class Source(StrEnum):
    """What an era begins with."""

    KEPT = "kept"
    """States that hosts keep on their disks, of other stages too."""
    CHECKPOINT = "checkpoint"
    """A checkpoint on the leader's disk."""
    START = "start"
    """What the run started from."""
    NEIGHBOURS = "neighbours"
    """The lost stage's weights are made from those of its neighbours, and nobody goes back.
    Source: CheckFree (arXiv:2506.15461)."""


@dataclass(frozen=True, slots=True)
class StateHolders:
    """Hosts that have a stage's state."""

    stage_index: StageIndex
    nodes: Annotated[tuple[NodeId, ...], AtLeast(1), AtMost(HOLDERS_MAX), Unique()]


@dataclass(frozen=True, slots=True)
class Origin:
    """How an era began. Openings carry it until the era's first commit."""

    source: Source
    """Where its states come from."""
    lost: Annotated[tuple[StageIndex, ...], AtMost(STAGES_MAX), Unique()]
    """Stages that nobody was left of. None: the model is cut anew."""
    num_repeated: Ordinal
    """Iterations that had been committed and are computed again."""
    holders: Annotated[tuple[StateHolders, ...], AtMost(STAGES_MAX), Unique("stage_index")] = ()
    """Of each stage, if states are fetched from hosts."""
    cut: StageBlocks = ()
    """The cut that these stages are of."""

    @property
    def reason(self) -> str:
        """Why there is another era, for people."""
        if not self.lost:
            return "the model is cut anew"
        return f"stage {', '.join(map(str, self.lost))} was lost"

    def holders_of(self, stage_index: int) -> tuple[NodeId, ...]:
        """Return who has a stage's state."""
        found = (each.nodes for each in self.holders if each.stage_index == stage_index)
        return next(found, ())


KeptStates = Annotated[tuple[Kept, ...], AtMost(KEPT_MAX)]
