"""What the settling data node asks `planner.deciding`, and what it makes of the answer."""

from collections.abc import Iterable, Mapping

from decod.ids import NodeId
from decod.planner.deciding import Decided, LinkCosts, Unsettled
from decod.protocol.core.messages.routing_messages import Claims, SettledFlow
from decod.protocol.flows.position import Position


def unsettled(gathered: Mapping[NodeId, Claims], position: Position) -> Unsettled:
    """Return the problem of whose flows the claimed units become, and along which paths.

    Args:
        gathered: What each data node claims.
        position: Of the settling one.
    """
    outward, inward = _Told(), _Told()
    paths: list[tuple[NodeId, ...]] = []
    compute_s: dict[NodeId, float] = {}
    for data_node, claims in sorted(gathered.items()):
        outward.add(data_node, claims.costs)
        inward.add(data_node, claims.inward)
        compute_s[data_node] = claims.compute_s
        for hops in claims.claims:
            paths.append((data_node, *(hop.node_id for hop in hops)))
            for hop in hops:
                outward.add(hop.node_id, hop.costs)
                inward.add(hop.node_id, hop.inward)
                compute_s[hop.node_id] = hop.compute_s
    rooms = None if position.rooms is None else position.rooms()
    return Unsettled(
        paths=tuple(paths),
        capacities=tuple(
            (data_node, claims.capacity) for data_node, claims in sorted(gathered.items())
        ),
        outward=tuple(outward.entries),
        inward=tuple(inward.entries),
        compute_s=tuple(compute_s.items()),
        rooms=None if rooms is None else tuple(tuple(room.items()) for room in rooms),
        fair=position.fair,
        crowding=position.crowding,
        work_max=position.work_max,
    )


def flows_of(
    decided: Iterable[Decided], data_nodes: Iterable[NodeId]
) -> dict[NodeId, tuple[SettledFlow, ...]]:
    """Return the flows of each data node, which may be none."""
    flows: dict[NodeId, list[SettledFlow]] = {data_node: [] for data_node in data_nodes}
    for chosen in decided:
        path = chosen.route.path
        flows[path[0]].append(SettledFlow(path[1:-1], chosen.costs))
    return {data_node: tuple(own) for data_node, own in flows.items()}


def as_claimed(gathered: Mapping[NodeId, Claims]) -> dict[NodeId, tuple[SettledFlow, ...]]:
    """Return each data node's claims as its flows: they came home to it (GWTF)."""
    decided: dict[NodeId, tuple[SettledFlow, ...]] = {}
    for data_node, claims in sorted(gathered.items()):
        first, flows = dict(claims.costs), list[SettledFlow]()
        for hops in claims.claims:
            ends = [hop.node_id for hop in hops[1:]] + [data_node]
            costs = [dict(hop.costs).get(end) for hop, end in zip(hops, ends, strict=True)]
            known = [first[hops[0].node_id], *(cost for cost in costs if cost is not None)]
            if len(known) == len(hops) + 1:
                flows.append(SettledFlow(tuple(hop.node_id for hop in hops), tuple(known)))
        decided[data_node] = tuple(flows)
    return decided


class _Told:
    """Costs of links as nodes have told them: once for all claims that passed a node."""

    def __init__(self) -> None:
        self.entries: list[tuple[NodeId, LinkCosts]] = []
        self._last: dict[NodeId, LinkCosts] = {}

    def add(self, node_id: NodeId, costs: LinkCosts) -> None:
        if self._last.get(node_id) != costs:
            self._last[node_id] = costs
            self.entries.append((node_id, costs))
