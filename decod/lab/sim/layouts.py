"""Ways to lay out flows from outside, with the true costs of all links, for experiments.

No node can know these costs, so none of them is a routing of a run. They show what the routings of
`decod.protocol.flows.registry` are worth.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from decod.lab.planner.fixed import fixed_routes
from decod.lab.planner.greedy_routes import greedy_routes
from decod.lab.planner.optimal import optimal_routes
from decod.protocol.flows.registry import ROUTINGS
from decod.sim.scenario import FlowLayout, Scenario

_ALL = (
    FlowLayout("greedy", greedy_routes),
    FlowLayout("fixed", fixed_routes),
    FlowLayout("optimal", lambda graph, _: optimal_routes(graph)),
    FlowLayout("closest", partial(greedy_routes, closest_only=True)),
)

LAYOUTS: Mapping[str, FlowLayout] = MappingProxyType({layout.name: layout for layout in _ALL})
"""SWARM's wiring, DT-FM's rigid pipelines, the exact routing, and the closest peers with room."""

ROUTING_NAMES = (*dict.fromkeys((*ROUTINGS, *(name for name in LAYOUTS if name != "closest"))),)
"""What the flows of a scenario with described hosts can come from. A name that a run file may hold
too is that of the layout: the nodes' own is asked for by `protocol.routing`."""


def with_routing(scenario: Scenario, name: str) -> Scenario:
    """Return a copy whose flows come from a layout, or from the nodes' own routing.

    Args:
        scenario: It.
        name: One of `ROUTING_NAMES`, or `closest`. A layout's counts if the hosts are described.
    """
    if name in LAYOUTS and (scenario.hosts or name not in ROUTINGS):
        return replace(scenario, layout=LAYOUTS[name])
    return replace(scenario, layout=None, protocol=replace(scenario.protocol, routing=name))
