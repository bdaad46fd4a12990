"""Ways to lay out flows from outside, with the true costs of all links, for experiments.

No node can know these costs, so none of them is a routing of a run. They show what the routings of
`decod.protocol.flows.registry` are worth.
"""

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from types import MappingProxyType

from decod.planner.fixed import fixed_routes
from decod.planner.graph import FlowGraph, Route
from decod.planner.greedy import greedy_routes
from decod.planner.optimal import optimal_routes
from decod.protocol.flows.registry import ROUTINGS

Layout = Callable[[FlowGraph, Random], list[Route]]


def _optimal(graph: FlowGraph, _: Random) -> list[Route]:
    return optimal_routes(graph)


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "greedy": greedy_routes,
        "fixed": fixed_routes,
        "optimal": _optimal,
        "closest": partial(greedy_routes, closest_only=True),
    }
)
"""SWARM's wiring, DT-FM's rigid pipelines, the exact routing, and the closest peers with room."""

ROUTING_NAMES = (*dict.fromkeys((*ROUTINGS, *(name for name in LAYOUTS if name != "closest"))),)
"""What the flows of a scenario with described hosts can come from. A name that a run file may hold
too is that of the layout: the nodes' own is asked for by `protocol.routing`."""
