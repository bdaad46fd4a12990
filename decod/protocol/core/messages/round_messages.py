"""What peers of a collaborative run say to each other: who is there, and one round after another.

`ReducePart` and `ReducedPart` carry a round's average, as they do in a pipeline run.
"""

from dataclasses import dataclass
from typing import Annotated

from decod.ids import AveragingId, NodeId
from decod.limits import (
    Address,
    AtLeast,
    AtMost,
    Count,
    Duration,
    Magnitude,
    NodeName,
    Number,
    Ordinal,
    ReasonText,
    Sha256,
    SomeSha256,
    Unique,
    length,
    malformed,
)
from decod.protocol.core.messages.scopes import OfAveraging, OfRun

PEERS_MAX = 1024
"""Most peers in a run."""
PAST_MAX = 256
"""Most states that a peer names of its past."""

PeerIds = Annotated[tuple[NodeId, ...], AtMost(PEERS_MAX), Unique()]
Past = Annotated[tuple[Sha256, ...], AtMost(PAST_MAX)]


@dataclass(frozen=True, slots=True)
class Height:
    """How far a state has come."""

    round: Ordinal
    """The last round whose average is in it. 0: none."""
    state_id: Sha256
    """SHA-256 of all that has led to it. Who has the same has the same state."""


@dataclass(frozen=True, slots=True)
class PeerEntry:
    """A peer, as the coordinator knows it."""

    node_id: NodeId
    address: Address
    """`host:port`."""
    level: bool
    """It has what the coordinator has. Otherwise it is loading, and gets averages to apply then."""
    name: NodeName = ""
    """For people. May be empty."""


@dataclass(frozen=True, slots=True)
class Greeting(OfRun):
    """To a peer that was found: this one is here, and would go on with whoever is further."""

    address: Address
    """At which the sender can be dialled."""
    height: Height
    """The sender's state."""
    past: Past
    """State ids before that, the newest first."""
    num_peers: Count
    """That the sender's coordinator has, itself included and the receiver left out. 0: it has not
    even the run's state."""
    coordinator: NodeId
    """Whom the sender follows; it may be itself."""
    coordinator_address: Address
    """Where the receiver finds it."""
    name: NodeName = ""
    """The sender's, for people. May be empty."""


@dataclass(frozen=True, slots=True)
class Roll(OfRun):
    """From a coordinator, whenever it has changed: who takes part."""

    term: Ordinal
    """Of the coordinator."""
    version: Number
    """Of the roll in the term."""
    height: Height
    """The run's state."""
    past: Past
    """As of `Greeting`."""
    peers: Annotated[tuple[PeerEntry, ...], AtMost(PEERS_MAX), Unique("node_id")]
    """In the order in which they came. The first that lives succeeds the coordinator."""


@dataclass(frozen=True, slots=True)
class Standing(OfRun):
    """From a coordinator, several times a round: how far the round is, and that it lives."""

    term: Ordinal
    """Of the coordinator."""
    version: Number
    """Of the roll that counts."""
    height: Height
    """The run's state."""
    committed: AveragingId | None
    """The average of the last round. None: it was a lone peer's, or there was none."""
    num_samples: Number
    """Outstanding at all peers."""
    samples_per_s: Magnitude
    """Of all peers."""
    averaging: bool
    """An average is under way."""


@dataclass(frozen=True, slots=True)
class Progress(OfRun):
    """To the coordinator: how far this peer is, and that it lives."""

    term: Ordinal
    """The coordinator's. A higher one than it has: the sender takes it for the next coordinator."""
    version: Number
    """Of the sender's roll."""
    height: Height
    """The sender's state."""
    num_samples: Number
    """Outstanding."""
    samples_per_s: Magnitude
    """Of the sender."""
    step_s: Duration
    """How long a step takes. 0: not known."""
    awaited: PeerIds = ()
    """Peers from whom something of an average is to come."""


@dataclass(frozen=True, slots=True)
class CloseRound(OfAveraging):
    """From the coordinator: the batch is full. Contribute what there is."""

    averaging: AveragingId


@dataclass(frozen=True, slots=True)
class RoundClosed(OfAveraging):
    """To the coordinator: the contribution stands."""

    averaging: AveragingId
    num_samples: Count
    """In the contribution. 0: there is none."""
    digest: Number
    """Of the contribution's pieces, so that a total can be checked."""


@dataclass(frozen=True, slots=True)
class BeginRound(OfAveraging):
    """From the coordinator: who averages."""

    averaging: AveragingId
    height: Height
    """From which the average leads on."""
    roster: Annotated[PeerIds, AtLeast(1)]
    """All who contribute and reduce."""
    weights: Annotated[tuple[Count, ...], AtMost(PEERS_MAX)]
    """Samples of each."""
    digests: Annotated[tuple[Number, ...], AtMost(PEERS_MAX)]
    """Of the contribution of each."""
    num_rows: Count = 1
    """In which they stand, one after another: `decod.protocol.collaboration.groups`."""
    listeners: PeerIds = ()
    """Peers that get the average, and contribute nothing."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if the lists do not fit together."""
        num = len(self.roster)
        length("weights", len(self.weights), low=num, high=num)
        length("digests", len(self.digests), low=num, high=num)
        if not 1 <= self.num_rows <= num:
            raise malformed("num_rows", self.num_rows, allowed=f"from 1 to {num}")
        both = {*self.roster} & {*self.listeners}
        if both:
            raise malformed("listeners", sorted(both), allowed="who is not in the roster")


@dataclass(frozen=True, slots=True)
class RoundReady(OfAveraging):
    """To the coordinator: the whole average is here, or why not."""

    averaging: AveragingId
    average_hash: SomeSha256
    """SHA-256 of the average. Empty: there is none."""
    failure: ReasonText = ""
    """Why it can't be had. Else empty."""
    lost: PeerIds = ()
    """Peers that have kept it from coming."""


@dataclass(frozen=True, slots=True)
class CommitRound(OfAveraging):
    """From the coordinator: the average counts."""

    averaging: AveragingId
    average_hash: Sha256
    """SHA-256 of the average."""


@dataclass(frozen=True, slots=True)
class Farewell(OfRun):
    """This peer leaves, or coordinates no longer."""

    successor: NodeId | None = None
    """From a coordinator: who is the next. Who is so itself takes over all of its peers."""
    successor_address: Address | None = None
    """Where that one can be dialled."""


RoundMessage = (
    Greeting
    | Roll
    | Standing
    | Progress
    | CloseRound
    | RoundClosed
    | BeginRound
    | RoundReady
    | CommitRound
    | Farewell
)
