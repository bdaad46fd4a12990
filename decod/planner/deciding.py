"""The leader's choice of flows: which data node gets each unit of a draft, and along which path.

First come the flows whose links cost least (`settlement`). In a run, flows over which an iteration
is shorter may then take their place (`shortening`). A choice takes tenths of a second. So the
problem and its solution are plain values, which travel to another process and back as JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from decod.ids import NodeId
from decod.planner.graph import Link, Route
from decod.planner.settlement import DraftPath, fair_shares, settle
from decod.planner.shortening import shortened

_SHORTENING_WORK_MAX = 150_000
"""About a fifth of a second."""

LinkCosts = tuple[tuple[NodeId, float], ...]
"""What one node's links cost, by the node at their other end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsettled:
    """Claims of all data nodes, to be made into flows."""

    paths: tuple[tuple[NodeId, ...], ...]
    """Claimed paths: the data node where each begins, then a relay of each stage."""
    capacities: tuple[tuple[NodeId, int], ...]
    """Number of microbatches that each data node sends out, and of flows that it can take."""
    outward: tuple[tuple[NodeId, LinkCosts], ...]
    """Costs of links, told by the nodes where they begin. A later entry replaces an earlier one."""
    inward: tuple[tuple[NodeId, LinkCosts], ...] = ()
    """Costs of links, told by the nodes where they end. `outward` goes before them."""
    compute_s: tuple[tuple[NodeId, float], ...] = ()
    """Mean seconds of a pass at each node."""
    rooms: tuple[tuple[tuple[NodeId, int], ...], ...] | None = None
    """For each relay stage: its relays, and how many flows each may carry. With it, flows are
    chosen for a short iteration, and costs are seconds. Without it, they are chosen for their
    costs."""
    fair: bool = False
    """Data nodes get flows in proportion to their capacities. Otherwise the cheapest flows count,
    whoever gets them."""
    crowding: int = 1
    """The power to which the load and cost of a link are raised. 1 minimises the sum of costs. A
    large one minimises the largest cost."""
    work_max: float
    """Limit of the work of `settle`."""


@dataclass(frozen=True, slots=True)
class Decided:
    """One flow that was chosen."""

    route: Route
    costs: tuple[float, ...]
    """Cost of each hop of `route`."""


def decide(unsettled: Unsettled) -> tuple[Decided, ...]:
    """Return the flows of all data nodes. Takes up to half a second with a hundred relays."""
    costs = {(begin, end): cost for begin, links in unsettled.outward for end, cost in links}
    paths = [DraftPath(path[0], path[1:]) for path in unsettled.paths]
    capacities = dict(unsettled.capacities)
    if unsettled.fair:
        capacities = fair_shares(capacities, len(paths))
    weights, crowding = _weights(costs, unsettled.crowding)
    routes = settle(paths, weights, capacities, crowding=crowding, work_max=unsettled.work_max)
    if unsettled.rooms is not None:
        told = {(begin, end): cost for end, links in unsettled.inward for begin, cost in links}
        costs = told | costs
        routes = shortened(
            routes,
            costs,
            compute_s=dict(unsettled.compute_s),
            rooms=[dict(room) for room in unsettled.rooms],
            numbers=dict(unsettled.capacities),
            work_max=_SHORTENING_WORK_MAX,
        )
    assert all(route.path[0] == route.path[-1] in capacities for route in routes), "all lead home"
    return tuple(
        Decided(route, tuple(costs[hop] for hop in pairwise(route.path))) for route in routes
    )


def _weights(costs: Mapping[Link, float], crowding: int) -> tuple[Mapping[Link, float], int]:
    """Return what links add to the objective with one unit, and the power of more units.

    Powers are of costs relative to the dearest: only the differences of a sum matter.
    """
    dearest = max(costs.values(), default=0.0)
    if crowding == 1 or not dearest:
        return costs, 1
    return {link: (cost / dearest) ** crowding for link, cost in costs.items()}, crowding
