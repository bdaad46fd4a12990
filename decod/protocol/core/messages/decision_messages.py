"""What the leader has decided and what that opens, what it asks all members, and who leads.

The question goes down the tree to all members, and the answers come up it (GWTF V-B). Elections are
in `decod.protocol.leadership.election`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from decod.ids import Iteration, NodeId
from decod.limits import (
    MEMBERS_MAX,
    Address,
    AtMost,
    Finite,
    Number,
    NumFlows,
    Ordinal,
    ReasonText,
    SealBytes,
    StateName,
    Unique,
    malformed,
    printable,
)
from decod.protocol.core.durations import IterationTimes
from decod.protocol.core.era import Hashes, KeptStates
from decod.protocol.core.messages.scopes import OfBatch, OfDataNodes, OfRun
from decod.protocol.core.view import Opening, View, ViewChange, verify_told


class Outcome(StrEnum):
    """What has become of the iteration that an opening closes."""

    BEGUN = "begun"
    """There was none: the run has its first members."""
    COMMITTED = "committed"
    """Its step is final."""
    REPEATED = "repeated"
    """It never happened. The opening repeats its iteration."""
    ROLLED_BACK = "rolled_back"
    """It never happened. A stage was lost, and another era of the run begins."""
    ENDED = "ended"
    """It never happened. The run is over: nothing is opened, and members stop."""


@dataclass(frozen=True, slots=True)
class Open(OfRun):
    """Closes one iteration and opens the next. Goes down the tree of the *new* view.

    The leader decides once for each iteration.
    """

    closed: Iteration
    """The iteration that is over."""
    outcome: Outcome
    """What has become of it."""
    opening: Opening
    """What comes next."""
    reason: ReasonText = ""
    """Why the iteration was not committed, for people."""
    hashes: Hashes = ()
    """Of all stages' parameters after the last committed step, as in `Ready`. A newcomer compares
    its own."""
    loss: Finite = 0.0
    """If committed: mean over the iteration's microbatches."""
    num_tokens: Number = 0
    """If committed: trained on in the iteration."""
    view_version: Ordinal = 0
    """If committed: of the view whose members have voted. Another roster reduces to other bits."""
    view_term: Ordinal = 0
    """Of that view: two leaders may count iterations and views alike."""
    failed: bool = False
    """If ended: the run could not go on."""
    change: ViewChange | None = None
    """Set between nodes: turns an earlier view into the opening's, which has no members then. Only
    `protocol.core.known_views` sees it."""
    seal: SealBytes = field(default=b"", compare=False)
    """Proves that a data node says it: see `protocol.core.seals`. Not part of what is said."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` unless the view is told whole or as a change."""
        verify_told(self.opening.view, self.change)
        if self.change is not None and self.opening.electors:
            raise malformed("electors", "given", allowed="none beside a change of the view")

    @property
    def committed(self) -> bool:
        """Whether the closed iteration's step is final."""
        return self.outcome is Outcome.COMMITTED

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.outcome is Outcome.ENDED


@dataclass(frozen=True, slots=True)
class Mend(OfBatch):
    """Goes down the tree of the *new* view: the iteration goes on without relays that were lost.

    Others of their stage recompute what they carried, from what their neighbours kept.
    """

    iteration: Iteration
    view: View
    """Who is left."""
    reason: ReasonText
    """Who was lost and why."""
    change: ViewChange | None = None
    """Set between nodes, as in `Open`."""
    seal: SealBytes = field(default=b"", compare=False)
    """As in `Open`."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` unless the view is told whole or as a change."""
        verify_told(self.view, self.change)
        if self.change is not None and self.change.electors is not None:
            raise malformed("electors", "given", allowed="none: only an opening tells them")


AWAITED_MAX = 8
"""Members of those that a node waits for that it tells of."""

DEVICE_LENGTH_MAX = 64
VERSION_LENGTH_MAX = 32


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
    memory_bytes: Number = 0
    """Memory of its device for the run. 0: it is not known."""
    decod_version: Annotated[str, printable(VERSION_LENGTH_MAX)] = ""


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


@dataclass(frozen=True, slots=True)
class Canvass(OfRun, OfDataNodes):
    """A data node has not heard from the leader for a while: has the receiver? Binds nobody."""

    view_term: Ordinal
    """Term of the sender's view; with what follows, how far it has got."""
    iteration: Iteration
    """The iteration that it is in."""
    view_version: Ordinal
    """Version of the view."""


@dataclass(frozen=True, slots=True)
class CanvassAnswer(OfRun):
    """What the receiver of a `Canvass` has found out by asking the leader itself."""

    view_term: Ordinal
    """As in the question, like what follows."""
    iteration: Iteration
    """As in the question."""
    view_version: Ordinal
    """As in the question."""
    silent: bool
    """The leader does not answer."""


@dataclass(frozen=True, slots=True)
class Candidacy(OfRun, OfDataNodes):
    """A data node stands for leader: the receiver may vote once in a term."""

    term: Ordinal
    """The term that it would lead."""
    view_term: Ordinal
    """Of the sender's view; with what follows, how far it has got."""
    iteration: Iteration
    """The iteration that it is in."""
    view_version: Ordinal
    """Version of the view."""


@dataclass(frozen=True, slots=True)
class Vote(OfRun):
    """The answer to a `Candidacy`. Who grants follows no leader of a lower term any more."""

    term: Ordinal
    """Of the candidacy; if it was not granted, the one that the sender is bound to."""
    granted: bool
    """The sender follows no leader of a lower term any more."""
    view_term: Ordinal
    """Of the sender's view; with what follows, how far it has got."""
    iteration: Iteration
    """The iteration that it is in."""
    view_version: Ordinal
    """Version of the view."""
    hashes: Hashes = ()
    """As in `Ready`, if the sender's subtree had cast its vote for the iteration; else none."""
    confirmed_term: Ordinal = 0
    """Of the candidate whose commit of that iteration the sender has confirmed last; 0: of none."""


@dataclass(frozen=True, slots=True)
class Confirm(OfRun, OfDataNodes):
    """A candidate is to commit its iteration, if a quorum confirms that with a `Vote` that says
    so.
    """

    term: Ordinal
    """Of the candidacy."""
    view_term: Ordinal
    """Of the sender's view; with what follows, the iteration."""
    iteration: Iteration
    """The iteration that is to be committed."""
    view_version: Ordinal
    """Version of the view."""


@dataclass(frozen=True, slots=True)
class LeaderIs(OfRun):
    """Tells a node that is behind of a higher term."""

    term: Ordinal
    """The higher one."""
    leader: NodeId | None
    """None: the sender has voted in that term, and does not know who won."""
    address: Address | None = None
    """Of the leader; None if unknown."""


ElectionMessage = Canvass | CanvassAnswer | Candidacy | Vote | Confirm | LeaderIs
"""Messages that are about terms, and say which one they mean."""
