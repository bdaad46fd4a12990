"""What nodes say to each other in search of better flows. All of it belongs to one view version.

Building a draft: `DraftOffer`, `RequestUnits`, `UnitsAnswer`. Agreeing on what links carry:
`DraftUnits`. Improving it: `ResidualWalk`, `RequestChange`, `ChangeAnswer`, `ChangeDecision`.
Settling it: `Claim`, `Claimed`, `Claims`, `Routes`, `Install`. What GWTF's own search says is in
`gwtf_messages`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from decod.ids import FlowId, NodeId, RelayPath
from decod.limits import (
    CAPACITY_MAX,
    ENTRIES_MAX,
    MEMBERS_MAX,
    STAGE_INDEX_MAX,
    STAGES_MAX,
    AtLeast,
    AtMost,
    ComputeTime,
    Count,
    Each,
    Number,
    NumFlows,
    Ordinal,
    SomeFlows,
    TravelsAs,
    Unique,
    length,
    malformed,
    unique,
    within,
)
from decod.protocol.core.messages.gwtf_messages import GwtfMessage
from decod.protocol.core.messages.scopes import OfDataNodes, OfView
from decod.protocol.core.residual import (
    LINK_COST_MAX,
    MAX_STEPS,
    LinkCosts,
    LinkCostValue,
    Place,
    Walk,
    WalkPlace,
    WalkSteps,
)

HOPS_MAX = STAGE_INDEX_MAX
"""Most relays on one path: one of each stage of the longest pipeline."""

PATH_COST_MAX = STAGES_MAX * LINK_COST_MAX
"""Largest cost of a unit from a node to its sink, over one link for each stage."""

CHANGE_COST_MAX = 2e113
"""Largest cost of one node's links on a walk, which are at most `MAX_STEPS` steps."""


@dataclass(frozen=True, slots=True)
class DraftOffer(OfView):
    """The sender has units on their way to a sink that the previous stage may take up."""

    view_version: Ordinal
    sequence: Number
    """Grows with each of the sender's offers; an older one that comes late is ignored."""
    units: NumFlows
    """How many. 0 withdraws the offer."""
    cost: Annotated[float, within(0, PATH_COST_MAX, cut=True)]
    """Of one of them, from the sender to the sink."""


@dataclass(frozen=True, slots=True)
class RequestUnits(OfView):
    """Request Flow (GWTF V-C) for the draft: asks for units that were offered."""

    view_version: Ordinal
    request_id: Number
    """Grows; a repeat gets the same answer."""
    units: NumFlows
    """How many."""


@dataclass(frozen=True, slots=True)
class UnitsAnswer(OfView):
    """How many of the units asked for the asker may send from now on."""

    view_version: Ordinal
    request_id: Number
    """Of the request."""
    units: NumFlows
    """0: refused."""


@dataclass(frozen=True, slots=True)
class DraftUnits(OfView):
    """How many units of the draft the sender believes a link between it and the receiver carries.

    Both ends take the smaller number until they agree; only what both know of stands.
    """

    view_version: Ordinal
    outward: bool
    """The link leads from the sender to the receiver; else the other way."""
    link_version: Number
    """How many changes the link has had; a message of another version is stale."""
    units: NumFlows
    """How many."""
    agreed: bool
    """The receiver's last word was the same."""


@dataclass(frozen=True, slots=True)
class ResidualWalk(OfView):
    """The cheapest walk through the residual network that the sender knows to end at itself."""

    view_version: Ordinal
    sequence: Number
    """Grows with each of the sender's walks; an older one that comes late is ignored."""
    exit: bool
    """It ends at the sender's exit; else at its entrance."""
    walk: Annotated[Walk, TravelsAs(WalkSteps)] | None
    """None: none is cheaper than one that begins at the sender."""


@dataclass(frozen=True, slots=True)
class RequestChange(OfView):
    """Request Change (GWTF V-C) for any walk: make ready to lead units along it."""

    view_version: Ordinal
    change_id: Number
    """Unique per sender within the view; a repeat gets the same answer."""
    places: Annotated[tuple[Place, ...], Each(WalkPlace), AtLeast(2), AtMost(MAX_STEPS), Unique()]
    """The walk, in order; the sender and the receiver are on it."""
    is_closed: bool
    """It goes on from its last place to its first; else it makes the flow larger."""
    units: SomeFlows
    """How many."""


@dataclass(frozen=True, slots=True)
class ChangeAnswer(OfView):
    """What the sender has reserved for a change. Repeated until it is told what became of it."""

    view_version: Ordinal
    change_id: Number
    """Of the request."""
    units: NumFlows
    """0: refused, nothing is reserved."""
    cost: Annotated[float, within(-CHANGE_COST_MAX, CHANGE_COST_MAX)]
    """Of one unit over those of the walk's links that begin at the sender, by its measurements."""


@dataclass(frozen=True, slots=True)
class ChangeDecision(OfView):
    """The one decision on a change, by the node that asked for it."""

    view_version: Ordinal
    change_id: Number
    """Of the request."""
    units: NumFlows
    """Led along the walk from now on; 0: nothing has changed, reservations are void."""


@dataclass(frozen=True, slots=True)
class Settle(OfView, OfDataNodes):
    """The settling data node tells the others to claim. Repeated until their claims are there."""

    view_version: Ordinal
    epoch: Number
    """Settlements of a view are counted from 1."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One node that a claim has passed, what its links cost, and how fast it is."""

    node_id: NodeId
    """The node."""
    costs: LinkCosts
    """Of its links to the next stage."""
    inward: LinkCosts = ()
    """Of its links from the stage before."""
    compute_s: ComputeTime = 0.0
    """c_i: mean time of a pass."""


Hops = Annotated[tuple[Hop, ...], AtMost(HOPS_MAX), Unique("node_id")]


@dataclass(frozen=True, slots=True)
class Claim(OfView):
    """Goes along a unit of the draft, from the data node where it begins to the one where it ends.

    It holds still what it passes: the draft does not change there until all claims have ended.
    """

    view_version: Ordinal
    epoch: Number
    """Which settlement; an older one than the receiver's is ignored."""
    flow_id: FlowId
    """Of the data node where the unit begins."""
    hops: Hops
    """The nodes that it has passed, in order."""


@dataclass(frozen=True, slots=True)
class Claimed(OfView):
    """A claim has come to an end; the data node there tells the one that sent it."""

    view_version: Ordinal
    epoch: Number
    """Of the claim."""
    flow_id: FlowId
    hops: Hops
    """Empty: the unit was let go."""


@dataclass(frozen=True, slots=True)
class IndexedCost:
    """What the link to one node of a `ClaimTable` costs."""

    node_index: Count
    """The node at its end: index in `node_ids` of the table."""
    cost: LinkCostValue


IndexedCosts = Annotated[tuple[IndexedCost, ...], AtMost(MEMBERS_MAX), Unique("node_index")]


@dataclass(frozen=True, slots=True)
class IndexedHop:
    """A `Hop` whose nodes are in a `ClaimTable`."""

    node_index: Count
    """The node: index in `node_ids` of the table."""
    costs: IndexedCosts
    """Of its links to the next stage."""
    inward: IndexedCosts
    """Of its links from the stage before."""
    compute_s: ComputeTime
    """Mean time of a pass."""


@dataclass(frozen=True, slots=True)
class IndexedClaim:
    """A claim whose hops are in a `ClaimTable`."""

    hop_indexes: Annotated[tuple[Count, ...], AtLeast(1), AtMost(HOPS_MAX)]
    """Indexes in `hops` of the table, in the order of the path. Each node once."""


@dataclass(frozen=True, slots=True)
class ClaimTable:
    """Claims, in which most nodes and hops occur many times: each is said once."""

    node_ids: Annotated[tuple[NodeId, ...], AtMost(ENTRIES_MAX), Unique()]
    """All nodes that the hops speak of."""
    hops: Annotated[tuple[IndexedHop, ...], AtMost(ENTRIES_MAX)]
    """All hops of the claims. A node may have several, which differ in cost."""
    claims: Annotated[tuple[IndexedClaim, ...], AtMost(CAPACITY_MAX)]

    @staticmethod
    def of(claims: Sequence[tuple[Hop, ...]]) -> "ClaimTable":
        """Return claims as they travel."""
        nodes: dict[NodeId, int] = {}
        hops: dict[Hop, int] = {}
        rows = []
        for claim in claims:
            unique("hops", [hop.node_id for hop in claim])
            rows.append(IndexedClaim(tuple(hops.setdefault(hop, len(hops)) for hop in claim)))

        def index_of(node_id: NodeId) -> int:
            return nodes.setdefault(node_id, len(nodes))

        def indexed(costs: LinkCosts) -> tuple[IndexedCost, ...]:
            return tuple(IndexedCost(index_of(node_id), cost) for node_id, cost in costs)

        table = tuple(
            IndexedHop(
                index_of(hop.node_id), indexed(hop.costs), indexed(hop.inward), hop.compute_s
            )
            for hop in hops
        )
        return ClaimTable(tuple(nodes), table, tuple(rows))

    def told(self) -> tuple[tuple[Hop, ...], ...]:
        """Return the claims."""
        hops = [
            Hop(
                _entry("node_index", self.node_ids, hop.node_index),
                self._named(hop.costs),
                self._named(hop.inward),
                hop.compute_s,
            )
            for hop in self.hops
        ]
        claims = []
        for each in self.claims:
            claim = tuple(_entry("hop_indexes", hops, index) for index in each.hop_indexes)
            unique("hops", [hop.node_id for hop in claim])
            claims.append(claim)
        return tuple(claims)

    def _named(self, costs: Sequence[IndexedCost]) -> tuple[tuple[NodeId, float], ...]:
        return tuple(
            (_entry("node_index", self.node_ids, each.node_index), each.cost) for each in costs
        )


def _entry(field: str, table: Sequence[Any], index: int) -> Any:
    if index >= len(table):
        raise malformed(field, index, allowed=f"less than {len(table)}")
    return table[index]


@dataclass(frozen=True, slots=True)
class Claims(OfView):
    """A data node tells the settling one all claims that began at it. Repeated until answered."""

    view_version: Ordinal
    epoch: Number
    """As in `Claim`."""
    capacity: NumFlows
    """How many flows it can be the data node of."""
    costs: LinkCosts
    """Of its links to the first relay stage."""
    claims: Annotated[tuple[tuple[Hop, ...], ...], TravelsAs(ClaimTable)]
    """Each as the nodes that it has passed, in order."""
    inward: LinkCosts = ()
    """Of its links from the last relay stage."""
    compute_s: ComputeTime = 0.0
    """c_i: mean time of its passes, head included."""


@dataclass(frozen=True, slots=True)
class SettledFlow:
    """One settled flow, as its data node knows it."""

    path: RelayPath
    """One relay of each stage, in order."""
    costs: Annotated[
        tuple[Annotated[float, within(0.0, LINK_COST_MAX)], ...], AtLeast(2), AtMost(HOPS_MAX + 1)
    ]
    """d(i, j) of each hop, those from and to the data node included."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` unless there is one cost more than relays."""
        num = len(self.path) + 1
        length("costs", len(self.costs), low=num, high=num)


@dataclass(frozen=True, slots=True)
class Routes(OfView, OfDataNodes):
    """The settled flows of one data node."""

    view_version: Ordinal
    epoch: Number
    """Of the claims."""
    routes: Annotated[tuple[SettledFlow, ...], AtMost(CAPACITY_MAX)]
    """One for each flow, in the order of their slots."""


@dataclass(frozen=True, slots=True)
class Install(OfView):
    """Goes along a settled path, from its data node and home again: each node notes its hop."""

    view_version: Ordinal
    epoch: Number
    """As in `Claim`."""
    flow_id: FlowId
    path: RelayPath
    """One relay of each stage, in order."""


@dataclass(frozen=True, slots=True)
class Installed(OfView):
    """A data node tells the settling one that all its flows of a settlement stand."""

    view_version: Ordinal
    epoch: Number
    """As in `Claim`."""


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
