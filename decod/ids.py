"""Types of ids. Every id in decod is one of these, so that ids can't be mixed up."""

from dataclasses import dataclass
from functools import total_ordering
from typing import Annotated, NewType

from typing_extensions import override

from decod.limits import (
    MEMBERS_MAX,
    STAGE_INDEX_MAX,
    AtLeast,
    AtMost,
    Count,
    Index,
    Ordinal,
    Unique,
)

RunId = NewType("RunId", str)
"""One training job: 26 characters of base32, derived from the manifest and a random salt."""

NodeId = NewType("NodeId", str)
"""One `decod` identity on a host: 52 characters of base32 (the hash of its key)."""

NodeIds = Annotated[tuple[NodeId, ...], AtMost(MEMBERS_MAX), Unique()]
"""Some members, each once."""

SomeNodeIds = Annotated[NodeIds, AtLeast(1)]

RelayPath = Annotated[tuple[NodeId, ...], AtLeast(1), AtMost(STAGE_INDEX_MAX), Unique()]
"""One relay of each stage, in order."""

TensorId = NewType("TensorId", int)
"""A tensor that this node holds. Local: never sent to a peer."""

JobId = NewType("JobId", int)
"""A job given to this node's compute process. Local."""


@total_ordering
@dataclass(frozen=True, slots=True)
class Iteration:
    """One batch and its optimizer step, at one attempt. A later attempt fences an earlier one.

    Iterations are ordered by era first: after a rollback, the abandoned future is old.
    """

    number: Ordinal
    """Counted from 1; iteration 0 is the initial state."""
    attempt: Count
    """Counted from 1 within the iteration."""
    era: Count = 0
    """Number of times that the run has restarted from an earlier state, or with a rebuilt stage."""

    def __lt__(self, other: "Iteration") -> bool:
        return self._place < other._place

    @property
    def _place(self) -> tuple[int, int, int]:
        return self.era, self.number, self.attempt

    @override
    def __str__(self) -> str:
        text = f"{self.number}.{self.attempt}"
        return f"e{self.era}:{text}" if self.era else text


@dataclass(frozen=True, slots=True, order=True)
class AveragingId:
    """One average over the members of a stage. All stages average under the same id."""

    iteration: Iteration
    """Whose batch it is of."""
    view_version: Ordinal
    """The version of the view whose members take part."""

    @override
    def __str__(self) -> str:
        return f"{self.iteration}/{self.view_version}"


def iteration_of(text: str) -> int:
    """Return the number of an iteration in text form."""
    return int(text.rpartition(":")[2].partition(".")[0])


@dataclass(frozen=True, slots=True, order=True)
class MicrobatchId:
    """The unit that travels. Its tokens are a pure function of this id and the manifest."""

    iteration: Ordinal
    """The iteration whose batch it belongs to. From 1."""
    data_node_index: Index
    """Ordinal of the data node among the run's data nodes, from 0. It is not a node id, because
    the tokens follow from it, whichever node reads them."""
    index: Count
    """Position in that data node's share of the batch, from 0."""

    @override
    def __str__(self) -> str:
        return f"{self.iteration}/{self.data_node_index}/{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class FlowId:
    """One microbatch slot of one data node; its path is fixed while the flow stands."""

    data_node: NodeId
    slot: Count
    """In GWTF's own search the number of a hop."""

    @override
    def __str__(self) -> str:
        return f"{self.data_node[:8]}#{self.slot}"
