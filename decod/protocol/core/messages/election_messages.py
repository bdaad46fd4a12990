"""What members say to each other about who leads (`decod.protocol.leadership.election`)."""

from dataclasses import dataclass

from decod.ids import Iteration, NodeId
from decod.limits import Address, Ordinal
from decod.protocol.core.era import Hashes
from decod.protocol.core.messages.scopes import OfDataNodes, OfRun


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
