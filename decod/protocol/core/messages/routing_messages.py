"""What links cost, and how nodes find flows over them. All of it belongs to one view version.

**First flows** are built from the sinks backwards (GWTF V-C): `FlowCost` to `Withdraw`.

**decod's search.** Building a draft: `DraftOffer`, `RequestUnits`, `UnitsAnswer`. Agreeing on what
links carry: `DraftUnits`. Improving it: `ResidualWalk`, `RequestChange`, `ChangeAnswer`,
`ChangeDecision`. Settling it: `Claim`, `Claimed`, `Claims`, `Routes`, `Install`.

**GWTF's own search** (V-C). Its Request Flow is that of the first flows. The paper's queries are
`PeerQuery` and `PeerFlows`; its Request Change is `ExchangeHops`, its Request Redirect
`RequestRedirect`. The other messages are ours: the paper does not say how such a request is
answered, and how a decision reaches everybody who must know it. What was found is settled with the
same messages as a draft. A hop's number names it at its node, with the data node whose flow it is
part of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from decod.ids import FlowId, NodeId, RelayPath
from decod.limits import (
    CAPACITY_MAX,
    ENTRIES_MAX,
    MEMBERS_MAX,
    STAGE_INDEX_MAX,
    STAGES_MAX,
    AtLeast,
    AtMost,
    Bandwidth,
    ComputeTime,
    Cost,
    Count,
    Duration,
    Each,
    Latency,
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
from decod.protocol.core.messages.scopes import OfDataNodes, OfRun, OfView, WithTensor
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

BYWAYS_MAX = 8
"""Data nodes that a node may choose from, beside the one that a microbatch belongs to."""


class Byway(NamedTuple):
    """A data node by way of which a tensor may come, and the link with it."""

    node_id: NodeId
    """The data node."""
    bandwidth_bytes_per_s: Bandwidth


@dataclass(frozen=True, slots=True)
class LinkReport(OfView):
    """The sender's end of equation (1): to neighbours, when it has changed (GWTF IV).

    Values that were not measured are the sender's estimates. A later report replaces an earlier.
    """

    view_version: Ordinal
    latency_s: Latency
    """Half of a round trip between the two."""
    bandwidth_bytes_per_s: Bandwidth
    """From the sender to the receiver."""
    compute_s: ComputeTime
    """c_i: the sender's time for one pass of a microbatch."""
    byways: Annotated[
        tuple[tuple[NodeId, float], ...], Each(Byway), AtMost(BYWAYS_MAX), Unique("node_id")
    ] = ()
    """Data nodes by way of which a tensor can come to the sender, if the direct link is slow, and
    the bandwidth of its links with them in bytes per second, as far as it was measured."""


@dataclass(frozen=True, slots=True)
class LinkProbe(OfRun, WithTensor):
    """With a tensor that means nothing: its way is timed. No machine ever sees one."""


@dataclass(frozen=True, slots=True)
class FlowCost(OfView):
    """A node tells the previous stage what its unpaired outflows cost to the sink (GWTF V-C)."""

    view_version: Ordinal
    data_node: NodeId
    """The sink."""
    cost_s: Cost
    """Of its cheapest unpaired outflow to `data_node`; 0 at the sink itself."""
    num_unpaired: NumFlows
    """How many such outflows wait for an inflow. 0 withdraws the offer."""
    compute_s: Duration
    """The sender's time for one microbatch: c_j of equation (1)."""


@dataclass(frozen=True, slots=True)
class RequestFlow(OfView):
    """Asks a node of the next stage to pair one unpaired outflow with the sender."""

    view_version: Ordinal
    request_id: Number
    """Unique per sender within the view; a repeat gets the first answer again."""
    data_node: NodeId
    """The sink."""
    cost_s: Duration
    """What the sender believes that outflow costs. It is refused if it costs more by now."""


@dataclass(frozen=True, slots=True)
class FlowAnswer(OfView):
    """The answer to RequestFlow."""

    view_version: Ordinal
    request_id: Number
    """Of the request."""
    flow_id: FlowId | None
    """The flow that was given, or None: refused."""
    cost_s: Cost
    """Cost to the sink of the flow given; on refusal the current cost (infinite if none)."""
    num_unpaired: NumFlows
    """What the answering node has left to that data node."""
    path: Annotated[tuple[NodeId, ...], AtMost(STAGE_INDEX_MAX), Unique()] = ()
    """Relays that the given flow passes, the answering node first. None: it is the sink."""


@dataclass(frozen=True, slots=True)
class Withdraw(OfView):
    """The requester gave up waiting: if that request was granted, the outflow is unpaired again."""

    view_version: Ordinal
    request_id: Number
    """Of the request."""


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


PEER_FLOWS_MAX = 256
"""Most flows that a node tells of in one message."""


@dataclass(frozen=True, slots=True)
class NextHop:
    """Where a flow goes on."""

    peer: NodeId
    """The node."""
    number: Count
    """Of the hop at the peer: with the peer it names the link that the flow takes."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a link costs, and how many flows take it: d(i, j) and f(i, j)."""

    cost: LinkCostValue
    """d(i, j)."""
    num_flows: NumFlows
    """f(i, j)."""


@dataclass(frozen=True, slots=True)
class PeerQuery(OfView):
    """Asks a node of the same stage about its flows."""

    view_version: Ordinal


@dataclass(frozen=True, slots=True)
class PeerFlow:
    """One flow at the sender."""

    number: Count
    """Of the hop."""
    version: Number
    """Grows with each change of this hop; a request says which version it saw."""
    data_node: NodeId
    """Where the flow ends."""
    upstream: NodeId
    """Where it comes from."""
    upstream_cost: LinkCostValue
    """Of the link that it comes along."""
    next: NextHop
    """Where it goes on."""
    open: bool
    """No change of it is under way."""


@dataclass(frozen=True, slots=True)
class PeerFlows(OfView):
    """The answer to PeerQuery."""

    view_version: Ordinal
    flows: Annotated[tuple[PeerFlow, ...], AtMost(PEER_FLOWS_MAX), Unique("data_node", "number")]
    """Those that come in and go on; at most `PEER_FLOWS_MAX`."""
    costs: LinkCosts
    """Of the sender's links to the next stage."""


@dataclass(frozen=True, slots=True)
class ExchangeHops(OfView):
    """Request Change: the sender and another node of its stage exchange the next hops of two flows.

    Goes to that node, which judges the change by what it sees, and to both next nodes, for each of
    which another node would be the one before.
    """

    view_version: Ordinal
    change_id: Number
    """Unique per sender within the view, for all its changes; a repeat gets the same answer."""
    data_node: NodeId
    """Where both flows end."""
    number: Count
    """Of the sender's hop."""
    next: NextHop
    """The sender's, before."""
    other: NodeId
    """The other node."""
    other_number: Count
    """Of its hop."""
    other_version: Number
    """What the sender saw. If the hop has changed since, the request is refused."""
    other_next: NextHop
    """The other node's, before."""
    less: LinkUse
    """The sender's link that the flow leaves."""
    more: LinkUse
    """The sender's link that it would take."""


@dataclass(frozen=True, slots=True)
class RequestRedirect(OfView):
    """Request Redirect: the sender offers to carry a flow in another node's place.

    Goes to that node, which judges the change, and to the nodes before and after it.
    """

    view_version: Ordinal
    change_id: Number
    """As in `ExchangeHops`."""
    data_node: NodeId
    """Where the flow ends."""
    number: Count
    """Of the sender's new hop."""
    other: NodeId
    """The node that carries it."""
    other_number: Count
    """Of its hop."""
    other_version: Number
    """As in `ExchangeHops`."""
    upstream: NodeId
    """Where the flow comes from."""
    next: NextHop
    """Where it goes on."""
    more: tuple[LinkUse, LinkUse]
    """The links that the flow would take, from `upstream` to the sender and on to `next`."""


@dataclass(frozen=True, slots=True)
class HopsAnswer(OfView):
    """Whether the sender takes part in a change. Repeated until it is told what became of it."""

    view_version: Ordinal
    change_id: Number
    """Of the request."""
    agreed: bool
    """False: refused, nothing is promised."""


@dataclass(frozen=True, slots=True)
class HopsDecision(OfView):
    """The one decision on a change, by the node that asked for it. It never changes."""

    view_version: Ordinal
    change_id: Number
    """Of the request."""
    made: bool
    """False: nothing has changed, promises are void."""


HopsRequest = ExchangeHops | RequestRedirect

GwtfMessage = PeerQuery | PeerFlows | ExchangeHops | RequestRedirect | HopsAnswer | HopsDecision

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
