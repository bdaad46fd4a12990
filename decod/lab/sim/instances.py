"""Random instances of the routing problem, as GWTF's evaluation draws them.

Every setting and seed gives the same instance on every machine. Printed ranges are taken literally:
floor(U(1, 3)) is a uniform float, rounded down, which never gives the upper end. Link costs have no
unit.

Source: GWTF, section VI, tables IV and V. The tables do not say how much sources can carry, how
relays spread over stages that do not divide them, or which links exist. See each function.
"""

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from decod.ids import NodeId
from decod.lab.planner.joins import Newcomer
from decod.planner.graph import FlowGraph, GraphNode, Link
from decod.sim.kernel import seeded

NUM_JOINING = 20
"""Number of nodes that join in each run of figure 5."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FlowSetting:
    """A row of table V."""

    num_sources: int
    num_relays: int
    num_stages: int
    capacity: Range
    link_cost: Range


@dataclass(frozen=True, slots=True)
class JoinSetting:
    """A row of table IV's upper half. Its costs within a stage carry no flow and are left out."""

    num_stages: int
    capacity: Range
    link_cost: Range
    uneven: bool = False
    """Draw each relay's stage, instead of filling all stages equally."""
    num_relays: int = field(default=96)


TABLE_5: Mapping[int, FlowSetting] = {
    1: FlowSetting(1, 40, 8, (1, 3), (1, 20)),
    2: FlowSetting(1, 40, 10, (1, 3), (1, 20)),
    3: FlowSetting(1, 40, 8, (5, 15), (1, 20)),
    4: FlowSetting(1, 40, 8, (1, 3), (5, 100)),
    5: FlowSetting(2, 40, 8, (1, 3), (1, 20)),
    6: FlowSetting(4, 80, 8, (1, 3), (1, 20)),
}

TABLE_4: Mapping[int, JoinSetting] = {
    1: JoinSetting(8, (1, 20), (1, 100)),
    2: JoinSetting(8, (1, 20), (20, 100)),
    3: JoinSetting(8, (1, 5), (1, 100)),
    4: JoinSetting(12, (1, 20), (1, 100)),
    5: JoinSetting(8, (1, 20), (1, 100), uneven=True),
}


def table5(setting: int, seed: int) -> FlowGraph:
    """Return an instance of a flow test, 1 to 6.

    Every node is linked to every node of the next stage. The sources share the capacity of the
    smallest stage evenly. No source is then a bottleneck, as the paper asks, and every flow that a
    source wants has room.
    """
    row = TABLE_5[setting]
    rng = seeded(seed, "table 5", setting)
    stages = [1 + index * row.num_stages // row.num_relays for index in range(row.num_relays)]
    return _draw_graph(rng, row.num_stages, stages, row.capacity, row.link_cost, row.num_sources)


def table4(setting: int, seed: int) -> tuple[FlowGraph, list[Newcomer]]:
    """Return an instance of a joining test, 1 to 5, and the 20 nodes that wait to join it.

    The data node wants as many flows as the smallest stage can carry before anybody has joined. A
    newcomer knows a cost to every node and to every other newcomer. The cost of a pair is drawn
    once and holds wherever the newcomer is placed, because equation (1) is symmetric. In setting 5
    each stage gets one relay, and the stages of the other relays are drawn.
    """
    row = TABLE_4[setting]
    rng = seeded(seed, "table 4", setting)
    stages = [1 + index * row.num_stages // row.num_relays for index in range(row.num_relays)]
    if row.uneven:
        stages = list(range(1, row.num_stages + 1))
        stages += [rng.randint(1, row.num_stages) for _ in range(row.num_relays - row.num_stages)]
        stages.sort()
    graph = _draw_graph(rng, row.num_stages, stages, row.capacity, row.link_cost, 1)
    newcomers: list[Newcomer] = []
    for index in range(NUM_JOINING):
        known = [*graph.nodes, *(other.node_id for other in newcomers)]
        costs = {node_id: float(_floor(rng, row.link_cost)) for node_id in known}
        capacity = _floor(rng, row.capacity)
        newcomers.append(Newcomer(NodeId(f"new-{index + 1:02}"), capacity, costs))
    return graph, newcomers


def _draw_graph(
    rng: random.Random,
    num_stages: int,
    stages: Sequence[int],
    capacity: Range,
    link_cost: Range,
    num_sources: int,
) -> FlowGraph:
    relays = [
        GraphNode(NodeId(f"relay-{index + 1:02}"), stage_index, _floor(rng, capacity))
        for index, stage_index in enumerate(stages)
    ]
    smallest = min(
        sum(relay.capacity for relay in relays if relay.stage_index == stage_index)
        for stage_index in range(1, num_stages + 1)
    )
    sources = [
        # Rounded so that the shares add up to the whole.
        GraphNode(NodeId(f"data-{k + 1}"), 0, (smallest + k) // num_sources)
        for k in range(num_sources)
    ]
    layers = [
        sources,
        *(
            [relay for relay in relays if relay.stage_index == stage_index]
            for stage_index in range(1, num_stages + 1)
        ),
        sources,
    ]
    costs: dict[Link, float] = {}
    for here, there in itertools.pairwise(layers):
        for begin, end in _pairs(here, there):
            costs[begin, end] = float(_floor(rng, link_cost))
    nodes = {node.node_id: node for node in [*sources, *relays]}
    return FlowGraph(num_stages, nodes, costs)


def _pairs(here: Iterable[GraphNode], there: Sequence[GraphNode]) -> Iterable[Link]:
    return ((begin.node_id, end.node_id) for begin in here for end in there)


def _floor(rng: random.Random, drawn_from: Range) -> int:
    return math.floor(rng.uniform(*drawn_from))
