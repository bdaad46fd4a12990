"""What peers of a collaborative run say to each other: who is there, and one round after another.

`ReducePart` and `ReducedPart` carry a round's average, as they do in a pipeline run.
"""

from dataclasses import dataclass

from decod.ids import AveragingId, NodeId
from decod.protocol.core.messages.scopes import OfAveraging, OfRun

PEERS_MAX = 1024
"""Most peers in a run."""
PAST_MAX = 256
"""Most states that a peer names of its past."""


@dataclass(frozen=True, slots=True)
class Height:
    """How far a state has come."""

    round: int
    """The last round whose average is in it. 0: none."""
    state_id: str
    """SHA-256 of all that has led to it. Who has the same has the same state."""


@dataclass(frozen=True, slots=True)
class PeerEntry:
    """A peer, as the coordinator knows it."""

    node_id: NodeId
    address: str
    """`host:port`."""
    level: bool
    """It has what the coordinator has. Otherwise it is loading, and gets averages to apply then."""


@dataclass(frozen=True, slots=True)
class Greeting(OfRun):
    """To a peer that was found: this one is here, and would go on with whoever is further."""

    address: str
    """At which the sender can be dialled."""
    height: Height
    past: tuple[str, ...]
    """State ids before that, the newest first."""
    num_peers: int
    """That the sender's coordinator has, itself included."""
    coordinator: NodeId
    coordinator_address: str
    """Where the receiver finds it."""


@dataclass(frozen=True, slots=True)
class Roll(OfRun):
    """From a coordinator, whenever it has changed: who takes part."""

    term: int
    version: int
    """Of the roll in the term."""
    height: Height
    past: tuple[str, ...]
    """As of `Greeting`."""
    peers: tuple[PeerEntry, ...]
    """In the order in which they came. The first that lives succeeds the coordinator."""


@dataclass(frozen=True, slots=True)
class Standing(OfRun):
    """From a coordinator, several times a round: how far the round is, and that it lives."""

    term: int
    version: int
    """Of the roll that counts."""
    height: Height
    committed: AveragingId | None
    """The average of the last round. None: it was a lone peer's, or there was none."""
    num_samples: int
    """Outstanding at all peers."""
    samples_per_s: float
    """Of all peers."""
    averaging: bool
    """An average is under way."""


@dataclass(frozen=True, slots=True)
class Progress(OfRun):
    """To the coordinator: how far this peer is, and that it lives."""

    term: int
    """The coordinator's. A higher one than it has: the sender takes it for the next coordinator."""
    version: int
    """Of the sender's roll."""
    height: Height
    num_samples: int
    """Outstanding."""
    samples_per_s: float
    step_s: float
    """How long a step takes. 0: not known."""
    awaited: tuple[NodeId, ...] = ()
    """Peers from whom something of an average is to come."""


@dataclass(frozen=True, slots=True)
class CloseRound(OfAveraging):
    """From the coordinator: the batch is full. Contribute what there is."""

    averaging: AveragingId


@dataclass(frozen=True, slots=True)
class RoundClosed(OfAveraging):
    """To the coordinator: the contribution stands."""

    averaging: AveragingId
    num_samples: int
    digest: int
    """Of the contribution's pieces, so that a total can be checked."""


@dataclass(frozen=True, slots=True)
class BeginRound(OfAveraging):
    """From the coordinator: who averages."""

    averaging: AveragingId
    height: Height
    """From which the average leads on."""
    roster: tuple[NodeId, ...]
    weights: tuple[int, ...]
    """Samples of each."""
    digests: tuple[int, ...]
    """Of the contribution of each."""
    num_rows: int = 1
    """In which they stand, one after another: `decod.protocol.collaboration.groups`."""
    listeners: tuple[NodeId, ...] = ()
    """Peers that get the average, and contribute nothing."""


@dataclass(frozen=True, slots=True)
class RoundReady(OfAveraging):
    """To the coordinator: the whole average is here, or why not."""

    averaging: AveragingId
    average_hash: str
    """SHA-256 of the average. Empty: there is none."""
    failure: str = ""
    lost: tuple[NodeId, ...] = ()
    """Peers that have kept it from coming."""


@dataclass(frozen=True, slots=True)
class CommitRound(OfAveraging):
    """From the coordinator: the average counts."""

    averaging: AveragingId
    average_hash: str


@dataclass(frozen=True, slots=True)
class Farewell(OfRun):
    """This peer leaves, or coordinates no longer."""

    successor: NodeId | None = None
    """From a coordinator: who is the next. Who is so itself takes over all of its peers."""
    successor_address: str | None = None


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
