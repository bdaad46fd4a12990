"""What the settling data node makes of all claims: whose flows their units become, and which way.

With decod's own search (`decide`), first the flows of which the links cost least
(`planner.settlement`); then, in a run, others over which an iteration is shorter
(`planner.shortening`). With GWTF's, the flows that were claimed, as they are (`as_claimed`).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from decod.ids import NodeId
from decod.planner.graph import Link, Route
from decod.planner.settlement import DraftPath, fair_shares, settle
from decod.planner.shortening import shortened
from decod.protocol.core.messages.negotiation import Claims, SettledFlow
from decod.protocol.flows.position import Position

Decide = Callable[[Mapping[NodeId, Claims], Position], dict[NodeId, list[SettledFlow]]]
"""Returns the flows of each data node, from what each claims and the settling one's position."""

_SHORTENING_WORK_MAX = 150_000
"""About a fifth of a second."""


def decide(
    gathered: Mapping[NodeId, Claims], position: Position
) -> dict[NodeId, list[SettledFlow]]:
    """Return the flows of each data node.

    Args:
        gathered: What each data node claims.
        position: Of the settling one.
    """
    costs: dict[Link, float] = {}
    paths: list[DraftPath] = []
    for data_node, claims in sorted(gathered.items()):
        costs.update({(data_node, peer): cost for peer, cost in claims.costs})
        for hops in claims.claims:
            paths.append(DraftPath(data_node, tuple(hop.node_id for hop in hops)))
            for hop in hops:
                costs.update({(hop.node_id, peer): cost for peer, cost in hop.costs})
    capacities = {data_node: claims.capacity for data_node, claims in gathered.items()}
    if position.fair:
        capacities = fair_shares(capacities, len(paths))
    weights, crowding = position.weights(costs)
    routes = settle(paths, weights, capacities, crowding=crowding, work_max=position.work_max)
    if position.rooms is not None:
        costs = _inward(gathered) | costs
        routes = _shortened(routes, gathered, costs, position.rooms())
    decided: dict[NodeId, list[SettledFlow]] = {k: [] for k in gathered}
    for route in routes:
        hop_costs = tuple(costs[hop] for hop in pairwise(route.path))
        decided[route.data_node].append(SettledFlow(route.path[1:-1], hop_costs))
    return decided


def as_claimed(
    gathered: Mapping[NodeId, Claims],
    position: Position,  # noqa: ARG001 - `decide` needs it.
) -> dict[NodeId, list[SettledFlow]]:
    """Return each data node's claims as its flows: they came home to it."""
    decided: dict[NodeId, list[SettledFlow]] = {}
    for data_node, claims in sorted(gathered.items()):
        first = dict(claims.costs)
        decided[data_node] = flows = []
        for hops in claims.claims:
            ends = [hop.node_id for hop in hops[1:]] + [data_node]
            costs = [dict(hop.costs).get(end) for hop, end in zip(hops, ends, strict=True)]
            known = [first[hops[0].node_id], *(cost for cost in costs if cost is not None)]
            if len(known) == len(hops) + 1:
                flows.append(SettledFlow(tuple(hop.node_id for hop in hops), tuple(known)))
    return decided


def _inward(gathered: Mapping[NodeId, Claims]) -> dict[Link, float]:
    """Return the costs of links that are known where they end: also from relays without a flow."""
    costs: dict[Link, float] = {}
    for data_node, claims in sorted(gathered.items()):
        costs.update({(peer, data_node): cost for peer, cost in claims.inward})
        for hop in (hop for hops in claims.claims for hop in hops):
            costs.update({(peer, hop.node_id): cost for peer, cost in hop.inward})
    return costs


def _shortened(
    routes: Sequence[Route],
    gathered: Mapping[NodeId, Claims],
    costs: Mapping[Link, float],
    rooms: Sequence[Mapping[NodeId, int]],
) -> list[Route]:
    compute_s: dict[NodeId, float] = {}
    for data_node, claims in sorted(gathered.items()):
        compute_s[data_node] = claims.compute_s
        compute_s.update({hop.node_id: hop.compute_s for hops in claims.claims for hop in hops})
    return shortened(
        routes,
        costs,
        compute_s=compute_s,
        rooms=rooms,
        numbers={data_node: claims.capacity for data_node, claims in gathered.items()},
        work_max=_SHORTENING_WORK_MAX,
    )
