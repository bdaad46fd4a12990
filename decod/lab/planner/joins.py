"""Placement of new nodes: which candidate joins which stage, one after another.

All policies start from the same data: a graph, its routes of least cost, and candidates that know
their cost to the present nodes. After each placement the routes are computed anew. The value of a
placement is the fall of the mean cost per flow. If the number of flows stays the same, this is
GWTF's (cost_now - cost_after) / cost_now. If a graph lacks room for the flows that its data nodes
want, a placement may make room for more instead.

`JoinPolicy.UTILISATION` needs only local knowledge. For each of its flows, a stage tells a
candidate the hop before and the hop behind, with their costs. The candidate answers with an
estimate of its saving there, and the leader takes the largest. See `estimate_saving`.

Source: GWTF, sections V-B and VI (figure 5, table IV).
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from typing_extensions import override

from decod.ids import NodeId
from decod.lab.planner.optimal import optimal_routes
from decod.lab.planner.residual_graph import Arcs, SingleSourceFlow
from decod.planner.assignment import Applicant, StageLoad, assign_stages
from decod.planner.graph import FlowGraph, GraphNode, Route

Hop = tuple[NodeId, NodeId, NodeId]
"""A flow at one stage: the node before, the serving node and the node behind."""


class JoinPolicy(StrEnum):
    """Rule for the next candidate and its stage."""

    UTILISATION = "utilisation"
    """As `GWTF` while data nodes want more flows, then the largest estimated saving."""
    GWTF = "gwtf"
    """The largest candidate joins the most utilised stage: the plain rule of section V-B."""
    CAPACITY = "capacity"
    """The largest candidate joins a random stage."""
    RANDOM = "random"
    """A random candidate joins a random stage."""
    OPTIMAL = "optimal"
    """The best of all combinations, each tried with the exact routing."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A candidate, and its costs to the others."""

    node_id: NodeId
    capacity: int
    costs: Mapping[NodeId, float]
    """d(i, j) to each node and newcomer that it could have a link to, the same both ways."""


@dataclass(frozen=True, slots=True)
class Joined:
    """One placement, and the routing before and after it."""

    node_id: NodeId
    stage_index: int
    num_flows_before: int
    num_flows_after: int
    cost_before: float
    """Sum of the costs of all flows."""
    cost_after: float

    @property
    def improvement(self) -> float:
        """Relative fall of the mean cost per flow; 0 if there was no flow or no cost before."""
        if not self.num_flows_before or not self.cost_before:
            return 0.0
        before = self.cost_before / self.num_flows_before
        return (before - self.cost_after / self.num_flows_after) / before


def plan_joins(
    graph: FlowGraph,
    newcomers: Sequence[Newcomer],
    *,
    policy: JoinPolicy | str = JoinPolicy.UTILISATION,
    rng: random.Random,
) -> list[Joined]:
    """Return the places of all newcomers, in the order of placement.

    Args:
        graph: The graph before any newcomer has joined.
        newcomers: The candidates. If two know different costs to each other, the later's holds.
        policy: Chooses the next newcomer and its stage.
        rng: Source of the draws of random policies.

    Raises:
        ConfigError: There are several data nodes, and the solver for them is not installed.
    """
    policy = JoinPolicy(policy)
    routing = make_routing(graph)
    waiting = _both_ways(newcomers)
    joined = []
    while waiting:
        newcomer, stage_index = _choose(policy, routing, waiting, rng)
        waiting.remove(newcomer)
        flows, cost = routing.num_flows, routing.cost
        routing.add(newcomer, stage_index)
        joined.append(
            Joined(
                newcomer.node_id,
                stage_index,
                num_flows_before=flows,
                num_flows_after=routing.num_flows,
                cost_before=cost,
                cost_after=routing.cost,
            )
        )
    return joined


def estimate_saving(
    hops: Mapping[NodeId, Sequence[Hop]],
    costs: Mapping[tuple[NodeId, NodeId], float],
    newcomer: Newcomer,
) -> float:
    """Return about how much a newcomer would save in a stage, from the stage's own knowledge.

    The result is the mean of two sums over the flows that the newcomer would take.

    - In the first sum the newcomer takes over whole flows (Request Redirect). Each saves
      d(i, u) + d(u, j) - d(i, v) - d(v, j). This is too low, because flows could be paired anew.
    - In the second sum the flows of a data node exchange their next peers at no loss (Request
      Change). The newcomer gets the best hop before from one flow and the best hop behind from
      another. This is too high, because another node must take the rest.

    Args:
        hops: The flows through the stage, by data node: only flows of the same can exchange peers.
        costs: Costs of the links in `hops`.
        newcomer: Takes at most its capacity. A node without a cost cannot be its neighbour.
    """
    whole: list[float] = []
    exchanged: list[float] = []
    for flows in hops.values():
        before = [costs[i, u] - newcomer.costs.get(i, math.inf) for i, u, _ in flows]
        behind = [costs[u, j] - newcomer.costs.get(j, math.inf) for _, u, j in flows]
        whole += [first + second for first, second in zip(before, behind, strict=True)]
        pairs = zip(sorted(before, reverse=True), sorted(behind, reverse=True), strict=True)
        exchanged += [first + second for first, second in pairs]
    return (_best(whole, newcomer.capacity) + _best(exchanged, newcomer.capacity)) / 2


def _best(savings: Iterable[float], number: int) -> float:
    return sum(sorted((saving for saving in savings if saving > 0), reverse=True)[:number])


class GrowingRouting:
    """A growing graph and its exact routing, computed anew after every change."""

    def __init__(self, graph: FlowGraph) -> None:
        self.graph = graph
        self.wanted = sum(node.capacity for node in graph.stage(0))
        self._solve()

    def _solve(self) -> None:
        self._routes = optimal_routes(self.graph)
        self.num_flows = len(self._routes)
        self.cost = sum(self.graph.path_cost(route.path) for route in self._routes)

    def routes(self) -> list[Route]:
        return self._routes

    def add(self, newcomer: Newcomer, stage_index: int) -> None:
        """Place a newcomer permanently."""
        self.graph = _grown(self.graph, newcomer, stage_index)
        self._solve()

    def try_out(self, newcomer: Newcomer, stage_index: int) -> tuple[int, float]:
        """Return the number of flows and their cost after an `add`, without changing anything."""
        grown = GrowingRouting(_grown(self.graph, newcomer, stage_index))
        return grown.num_flows, grown.cost


class _SingleSourceRouting(GrowingRouting):
    """The same for one data node, where a change costs only a few shortest paths."""

    @override
    def _solve(self) -> None:
        self._flow = SingleSourceFlow(self.graph)
        self._note()

    def _note(self) -> None:
        self.num_flows, self.cost = self._flow.num_flows, self._flow.cost

    @override
    def routes(self) -> list[Route]:
        return self._flow.routes()

    @override
    def add(self, newcomer: Newcomer, stage_index: int) -> None:
        self._flow.add(newcomer.node_id, _arcs(self.graph, newcomer, stage_index))
        self.graph = _grown(self.graph, newcomer, stage_index)
        self._note()

    @override
    def try_out(self, newcomer: Newcomer, stage_index: int) -> tuple[int, float]:
        return self._flow.try_out(_arcs(self.graph, newcomer, stage_index))


def make_routing(graph: FlowGraph) -> GrowingRouting:
    """Return the routing of a graph, by the fastest exact method."""
    return _SingleSourceRouting(graph) if len(graph.stage(0)) == 1 else GrowingRouting(graph)


def _both_ways(newcomers: Sequence[Newcomer]) -> list[Newcomer]:
    """Return the newcomers with all costs that others know to them."""
    costs = {newcomer.node_id: dict(newcomer.costs) for newcomer in newcomers}
    for newcomer in newcomers:
        for other, cost in newcomer.costs.items():
            if other in costs:
                costs[other][newcomer.node_id] = cost
    return [Newcomer(n.node_id, n.capacity, costs[n.node_id]) for n in newcomers]


def _arcs(graph: FlowGraph, newcomer: Newcomer, stage_index: int) -> Arcs:
    def known(stage: int) -> dict[NodeId, float]:
        ids = [node.node_id for node in graph.stage(stage)]
        return {node_id: newcomer.costs[node_id] for node_id in ids if node_id in newcomer.costs}

    behind = (stage_index + 1) % (graph.num_stages + 1)
    return Arcs(newcomer.capacity, known(stage_index - 1), known(behind))


def _grown(graph: FlowGraph, newcomer: Newcomer, stage_index: int) -> FlowGraph:
    arcs, node_id = _arcs(graph, newcomer, stage_index), newcomer.node_id
    costs = dict(graph.costs)
    costs |= {(other, node_id): cost for other, cost in arcs.before.items()}
    costs |= {(node_id, other): cost for other, cost in arcs.after.items()}
    node = GraphNode(node_id, stage_index, newcomer.capacity)
    return FlowGraph(graph.num_stages, {**graph.nodes, node_id: node}, costs)


def _choose(
    policy: JoinPolicy, routing: GrowingRouting, waiting: Sequence[Newcomer], rng: random.Random
) -> tuple[Newcomer, int]:
    stages = range(1, routing.graph.num_stages + 1)
    match policy:
        case JoinPolicy.UTILISATION if routing.num_flows == routing.wanted:
            return _choose_by_saving(routing, waiting)
        case JoinPolicy.UTILISATION | JoinPolicy.GWTF:
            largest = _largest(waiting)
            return largest, _most_utilised(routing, largest)
        case JoinPolicy.CAPACITY:
            return _largest(waiting), rng.choice(stages)
        case JoinPolicy.RANDOM:
            return rng.choice(waiting), rng.choice(stages)
        case JoinPolicy.OPTIMAL:
            return _choose_by_trial(routing, waiting)
        case _:
            assert_never(policy)


def _largest(waiting: Sequence[Newcomer]) -> Newcomer:
    return min(waiting, key=lambda newcomer: (-newcomer.capacity, newcomer.node_id))


def _most_utilised(routing: GrowingRouting, newcomer: Newcomer) -> int:
    capacities = dict.fromkeys(range(1, routing.graph.num_stages + 1), 0)
    for node in routing.graph.nodes.values():
        if node.stage_index:
            capacities[node.stage_index] += node.capacity
    loads = [StageLoad(stage, routing.num_flows, room) for stage, room in capacities.items()]
    candidate = Applicant(newcomer.node_id, newcomer.capacity)
    return assign_stages([candidate], loads)[newcomer.node_id]


def _choose_by_saving(routing: GrowingRouting, waiting: Sequence[Newcomer]) -> tuple[Newcomer, int]:
    """Return the newcomer and stage of the largest estimate, ties to the larger newcomer.

    If no placement saves anything: the largest newcomer, at the most utilised stage.
    """
    stages = range(1, routing.graph.num_stages + 1)
    hops: dict[int, dict[NodeId, list[Hop]]] = {stage: {} for stage in stages}
    for route in routing.routes():
        for stage in stages:
            hop = (route.path[stage - 1], route.path[stage], route.path[stage + 1])
            hops[stage].setdefault(route.data_node, []).append(hop)
    largest = _largest(waiting)
    best, best_saving = (largest, _most_utilised(routing, largest)), 0.0
    for newcomer in sorted(waiting, key=lambda n: (-n.capacity, n.node_id)):
        for stage in stages:
            saving = estimate_saving(hops[stage], routing.graph.costs, newcomer)
            if saving > best_saving:
                best, best_saving = (newcomer, stage), saving
    return best


def _choose_by_trial(routing: GrowingRouting, waiting: Sequence[Newcomer]) -> tuple[Newcomer, int]:
    """Return the newcomer and stage with the most flows, then the least cost."""
    best: tuple[int, float] | None = None
    choice = None
    for newcomer in sorted(waiting, key=lambda n: (-n.capacity, n.node_id)):
        for stage in range(1, routing.graph.num_stages + 1):
            num_flows, cost = routing.try_out(newcomer, stage)
            if best is None or (-num_flows, cost) < best:
                best, choice = (-num_flows, cost), (newcomer, stage)
    assert choice is not None
    return choice
