"""What nodes say to each other in search of better flows. All of it belongs to one view version.

Building a draft: `DraftOffer`, `RequestUnits`, `UnitsAnswer`. Agreeing on what links carry:
`DraftUnits`. Improving it: `ResidualWalk`, `RequestChange`, `ChangeAnswer`, `ChangeDecision`.
Settling it: `Claim`, `Claimed`, `Claims`, `Routes`, `Install`. What GWTF's own search says is in
`gwtf_messages`.
"""

from dataclasses import dataclass

from decod.ids import FlowId, NodeId
from decod.protocol.core.messages.gwtf import GwtfMessage
from decod.protocol.core.messages.scopes import OfView
from decod.protocol.core.residual import Place, Walk

HOPS_MAX = 4095
"""Most relays on one path: one of each stage of the longest pipeline."""


@dataclass(frozen=True, slots=True)
class DraftOffer(OfView):
    """The sender has units on their way to a sink that the previous stage may take up."""

    view_version: int
    sequence: int
    """Grows with each of the sender's offers; an older one that comes late is ignored."""
    units: int
    cost: float
    """Of one of them, from the sender to the sink."""


@dataclass(frozen=True, slots=True)
class RequestUnits(OfView):
    """Request Flow (GWTF V-C) for the draft: asks for units that were offered."""

    view_version: int
    request_id: int
    """Grows; a repeat gets the same answer."""
    units: int


@dataclass(frozen=True, slots=True)
class UnitsAnswer(OfView):
    """How many of the units asked for the asker may send from now on."""

    view_version: int
    request_id: int
    units: int


@dataclass(frozen=True, slots=True)
class DraftUnits(OfView):
    """How many units of the draft the sender believes a link between it and the receiver carries.

    Both ends take the smaller number until they agree; only what both know of stands.
    """

    view_version: int
    outward: bool
    """The link leads from the sender to the receiver; else the other way."""
    link_version: int
    """How many changes the link has had; a message of another version is stale."""
    units: int
    agreed: bool
    """The receiver's last word was the same."""


@dataclass(frozen=True, slots=True)
class ResidualWalk(OfView):
    """The cheapest walk through the residual network that the sender knows to end at itself."""

    view_version: int
    sequence: int
    """Grows with each of the sender's walks; an older one that comes late is ignored."""
    exit: bool
    """It ends at the sender's exit; else at its entrance."""
    walk: Walk | None
    """None: none is cheaper than one that begins at the sender."""


@dataclass(frozen=True, slots=True)
class RequestChange(OfView):
    """Request Change (GWTF V-C) for any walk: make ready to lead units along it."""

    view_version: int
    change_id: int
    """Unique per sender within the view; a repeat gets the same answer."""
    places: tuple[Place, ...]
    """The walk, in order; the sender and the receiver are on it."""
    is_closed: bool
    """It goes on from its last place to its first; else it makes the flow larger."""
    units: int


@dataclass(frozen=True, slots=True)
class ChangeAnswer(OfView):
    """What the sender has reserved for a change. Repeated until it is told what became of it."""

    view_version: int
    change_id: int
    units: int
    """0: refused, nothing is reserved."""
    cost: float
    """Of one unit over those of the walk's links that begin at the sender, by its measurements."""


@dataclass(frozen=True, slots=True)
class ChangeDecision(OfView):
    """The one decision on a change, by the node that asked for it."""

    view_version: int
    change_id: int
    units: int
    """Led along the walk from now on; 0: nothing has changed, reservations are void."""


@dataclass(frozen=True, slots=True)
class Settle(OfView):
    """The settling data node tells the others to claim. Repeated until their claims are there."""

    view_version: int
    epoch: int
    """Settlements of a view are counted from 1."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One node that a claim has passed, what its links cost, and how fast it is."""

    node_id: NodeId
    costs: tuple[tuple[NodeId, float], ...]
    """Of its links to the next stage."""
    inward: tuple[tuple[NodeId, float], ...] = ()
    """Of its links from the stage before."""
    compute_s: float = 0.0
    """c_i: mean time of a pass."""


@dataclass(frozen=True, slots=True)
class Claim(OfView):
    """Goes along a unit of the draft, from the data node where it begins to the one where it ends.

    It holds still what it passes: the draft does not change there until all claims have ended.
    """

    view_version: int
    epoch: int
    flow_id: FlowId
    """Of the data node where the unit begins."""
    hops: tuple[Hop, ...]
    """The nodes that it has passed, in order."""


@dataclass(frozen=True, slots=True)
class Claimed(OfView):
    """A claim has come to an end; the data node there tells the one that sent it."""

    view_version: int
    epoch: int
    flow_id: FlowId
    hops: tuple[Hop, ...]
    """Empty: the unit was let go."""


@dataclass(frozen=True, slots=True)
class Claims(OfView):
    """A data node tells the settling one all claims that began at it. Repeated until answered."""

    view_version: int
    epoch: int
    capacity: int
    """How many flows it can be the data node of."""
    costs: tuple[tuple[NodeId, float], ...]
    """Of its links to the first relay stage."""
    claims: tuple[tuple[Hop, ...], ...]
    inward: tuple[tuple[NodeId, float], ...] = ()
    """Of its links from the last relay stage."""
    compute_s: float = 0.0
    """c_i: mean time of its passes, head included."""


@dataclass(frozen=True, slots=True)
class SettledFlow:
    """One settled flow, as its data node knows it."""

    path: tuple[NodeId, ...]
    """One relay of each stage, in order."""
    costs: tuple[float, ...]
    """d(i, j) of each hop, those from and to the data node included."""


@dataclass(frozen=True, slots=True)
class Routes(OfView):
    """The settled flows of one data node."""

    view_version: int
    epoch: int
    routes: tuple[SettledFlow, ...]


@dataclass(frozen=True, slots=True)
class Install(OfView):
    """Goes along a settled path, from its data node and home again: each node notes its hop."""

    view_version: int
    epoch: int
    flow_id: FlowId
    path: tuple[NodeId, ...]
    """One relay of each stage, in order."""


@dataclass(frozen=True, slots=True)
class Installed(OfView):
    """A data node tells the settling one that all its flows of a settlement stand."""

    view_version: int
    epoch: int


RoutingMessage = (
    DraftOffer
    | RequestUnits
    | UnitsAnswer
    | DraftUnits
    | ResidualWalk
    | RequestChange
    | ChangeAnswer
    | ChangeDecision
    | Settle
    | Claim
    | Claimed
    | Claims
    | Routes
    | Install
    | Installed
    | GwtfMessage
)
