"""Routes over which an iteration is short, against the best of all there are."""

from itertools import pairwise, product
from random import Random
from statistics import mean

import pytest

from decod.ids import NodeId
from decod.lab.planner.optimal import optimal_routes
from decod.planner.deciding import shortened
from decod.planner.graph import (
    FlowGraph,
    GraphNode,
    Link,
    Route,
    Timing,
    broken_rules,
    dealt_out,
    finish_times,
)

HOMES = [NodeId("d0"), NodeId("d1")]
SHARES = {HOMES[0]: 2, HOMES[1]: 1}


def draw(seed: int, *, capacity: int = 2) -> FlowGraph:
    """Return two stages of three relays, and data nodes that have two flows and one."""
    rng = Random(seed)
    layers = [HOMES, *([NodeId(f"{s}-{i}") for i in range(3)] for s in (1, 2))]
    nodes = {
        node_id: GraphNode(node_id, stage, SHARES.get(node_id, rng.randint(1, capacity)))
        for stage, layer in enumerate(layers)
        for node_id in layer
    }
    costs: dict[Link, float] = {
        (begin, end): rng.uniform(4, 43)
        for here, there in zip(layers, [*layers[1:], layers[0]], strict=True)
        for begin in here
        for end in there
    }
    return FlowGraph(2, nodes, costs)


def rooms_of(graph: FlowGraph) -> list[dict[NodeId, int]]:
    stages = range(1, graph.num_stages + 1)
    return [{node.node_id: node.capacity for node in graph.stage(s)} for s in stages]


def length_s(
    graph: FlowGraph, routes: list[Route], numbers: dict[NodeId, int], compute_s: float
) -> float:
    timing = Timing(graph.costs, dict.fromkeys(graph.nodes, compute_s))
    flows = dealt_out(
        [r.data_node for r in routes], [graph.path_cost(r.path) for r in routes], numbers
    )
    ways = [timing.tasks(routes[i].path) for i in flows]
    found = finish_times(ways, timing.num_resources)
    assert found is not None
    return max(found)


def shorten(
    graph: FlowGraph,
    routes: list[Route],
    numbers: dict[NodeId, int],
    *,
    compute_s: float = 0.5,
    work_max: float = 150_000,
) -> list[Route]:
    return shortened(
        routes,
        graph.costs,
        compute_s=dict.fromkeys(graph.nodes, compute_s),
        rooms=rooms_of(graph),
        numbers=numbers,
        work_max=work_max,
    )


def shortest_s(graph: FlowGraph, numbers: dict[NodeId, int], compute_s: float) -> float:
    """Return the length of the shortest iteration of all that can be."""
    pairs = [*product(*(room for room in rooms_of(graph)))]
    best = float("inf")
    for ways in [*product(pairs, repeat=3), *product(pairs, repeat=2)]:
        owners = [HOMES[1], HOMES[0], HOMES[0]]
        routes = [Route((k, *way, k)) for k, way in zip(owners, ways, strict=False)]
        if not broken_rules(graph, routes):
            best = min(best, length_s(graph, routes, numbers, compute_s))
    return best


@pytest.mark.parametrize("compute_s", [0.5, 20.0])
def test_an_iteration_is_hardly_longer_than_the_shortest_that_can_be(compute_s: float) -> None:
    """Also with more microbatches than flows, and where devices are what is waited for."""
    ratios, before = [], []
    for seed in range(5):
        graph, numbers = draw(seed), {HOMES[0]: 3, HOMES[1]: 2}
        routes = optimal_routes(graph)
        found = shorten(graph, routes, numbers, compute_s=compute_s)
        assert not broken_rules(graph, found), seed
        assert {r.data_node for r in found} == {r.data_node for r in routes}
        best_s = shortest_s(graph, numbers, compute_s)
        ratios.append(length_s(graph, found, numbers, compute_s) / best_s)
        before.append(length_s(graph, routes, numbers, compute_s) / best_s)
    assert max(ratios) < 1.1
    assert mean(ratios) < 1.03
    assert mean(before) > 1.02, "else this shows nothing"


@pytest.mark.parametrize("work_max", [0, 300, 3_000])
def test_what_little_work_finds_is_never_longer_and_breaks_no_rule(work_max: int) -> None:
    for seed in range(20):
        graph = draw(seed)
        routes = optimal_routes(graph)
        found = shorten(graph, routes, SHARES, work_max=work_max)
        assert not broken_rules(graph, found)
        assert length_s(graph, found, SHARES, 0.5) <= length_s(graph, routes, SHARES, 0.5) + 1e-6
        assert found == shorten(graph, routes, SHARES, work_max=work_max)
        if not work_max:
            assert found == routes


def test_links_that_are_unknown_are_not_used() -> None:
    for seed in range(20):
        graph = draw(seed)
        routes, rng = optimal_routes(graph), Random(seed)
        needed = {hop for route in routes for hop in pairwise(route.path)}
        costs = {hop: c for hop, c in graph.costs.items() if hop in needed or rng.random() < 0.5}
        graph = FlowGraph(2, graph.nodes, costs)
        assert not broken_rules(graph, shorten(graph, routes, SHARES))


def test_routes_of_another_length_stay_as_they_are() -> None:
    graph = draw(0)
    routes = [Route((HOMES[0], NodeId("1-0"), HOMES[0]))]
    assert shorten(graph, routes, SHARES) == routes
    assert shorten(graph, [], SHARES) == []
