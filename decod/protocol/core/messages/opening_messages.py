"""What the leader has decided, and what that opens."""

from dataclasses import dataclass, field
from enum import StrEnum

from decod.ids import Iteration
from decod.limits import Finite, Number, Ordinal, ReasonText, SealBytes, malformed
from decod.protocol.core.era import Hashes
from decod.protocol.core.messages.scopes import OfBatch, OfRun
from decod.protocol.core.view import Opening, View
from decod.protocol.core.view_change import ViewChange, verify_told


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
