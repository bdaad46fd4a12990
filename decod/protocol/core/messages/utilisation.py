"""The leader's flooding query (GWTF V-B)."""

from dataclasses import dataclass, field

from decod.ids import Iteration, NodeId
from decod.protocol.core.era import Kept
from decod.protocol.core.messages.scopes import OfBatch
from decod.protocol.core.spent_time import IterationTimes


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """How busy one member is."""

    node_id: NodeId
    num_flows: int
    """Complete flows through it."""
    capacity: int
    num_microbatches: int
    """Microbatches that it has finished and the run has committed, since it joined."""
    state: str
    """One of the node states that `decod status` shows."""
    kept: tuple[Kept, ...] = ()
    """States on its disk, if the query asks for them."""
    awaited: tuple[NodeId, ...] = ()
    """Members for whom it has waited for longer than for a heartbeat, the longest first."""
    times: IterationTimes | None = None
    """What an iteration usually costs it of late; None if it has not seen two commits."""
    device: str = ""
    """What it computes on, for people."""


@dataclass(frozen=True, slots=True)
class UtilisationQuery(OfBatch):
    """The leader's flooding query (GWTF V-B); goes down the tree."""

    query_id: int
    iteration: Iteration
    with_kept: bool = False
    """A stage is lost: which states does each member's host keep?"""
    seal: bytes = field(default=b"", compare=False)
    """As in `Open`."""


@dataclass(frozen=True, slots=True)
class UtilisationAnswer(OfBatch):
    """Goes back up the tree, gathered on the way: one load for each member of the subtree."""

    query_id: int
    iteration: Iteration
    loads: tuple[NodeLoad, ...]
