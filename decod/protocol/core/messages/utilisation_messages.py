"""The leader's flooding query (GWTF V-B)."""

from dataclasses import dataclass, field
from typing import Annotated

from decod.ids import Iteration, NodeId
from decod.limits import (
    MEMBERS_MAX,
    AtMost,
    Number,
    NumFlows,
    SealBytes,
    StateName,
    Unique,
    printable,
)
from decod.protocol.core.era import KeptStates
from decod.protocol.core.messages.scopes import OfBatch
from decod.protocol.core.spent_time import IterationTimes

AWAITED_MAX = 8
"""Members of those that a node waits for that it tells of."""

DEVICE_LENGTH_MAX = 64


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """How busy one member is."""

    node_id: NodeId
    """The member."""
    num_flows: NumFlows
    """Complete flows through it."""
    capacity: NumFlows
    """Microbatches that it can hold."""
    num_microbatches: Number
    """Microbatches that it has finished and the run has committed, since it joined."""
    state: StateName
    """One of the node states that `decod status` shows."""
    kept: KeptStates = ()
    """States on its disk, if the query asks for them."""
    awaited: Annotated[tuple[NodeId, ...], AtMost(AWAITED_MAX), Unique()] = ()
    """Members for whom it has waited for longer than for a heartbeat, the longest first."""
    times: IterationTimes | None = None
    """What an iteration usually costs it of late; None if it has not seen two commits."""
    device: Annotated[str, printable(DEVICE_LENGTH_MAX)] = ""
    """What it computes on, for people."""


@dataclass(frozen=True, slots=True)
class UtilisationQuery(OfBatch):
    """The leader's flooding query (GWTF V-B); goes down the tree."""

    query_id: Number
    """Chosen by the leader."""
    iteration: Iteration
    with_kept: bool = False
    """A stage is lost: which states does each member's host keep?"""
    seal: SealBytes = field(default=b"", compare=False)
    """As in `Open`."""


@dataclass(frozen=True, slots=True)
class UtilisationAnswer(OfBatch):
    """Goes back up the tree, gathered on the way: one load for each member of the subtree."""

    query_id: Number
    """Of the query."""
    iteration: Iteration
    loads: Annotated[tuple[NodeLoad, ...], AtMost(MEMBERS_MAX)]
    """One for each member of the subtree."""
