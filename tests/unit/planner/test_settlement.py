"""The paths of a draft settled, and negative cycles, each against an exact search."""

from collections import Counter
from itertools import pairwise, permutations
from random import Random
from statistics import mean

import pytest

from decod.ids import NodeId
from decod.lab.planner.optimal import optimal_routes
from decod.planner.graph import FlowGraph, GraphNode, Route, broken_rules
from decod.planner.settlement import DraftPath, negative_cycle, settle

NUM_STAGES = 5
NUM_DATA = 4


def draw(rng: Random) -> tuple[FlowGraph, list[DraftPath]]:
    """Return paths whose ends are nobody's in particular, and the graph of what they pass."""
    homes = [NodeId(f"d{k}") for k in range(NUM_DATA)]
    paths = [
        DraftPath(
            rng.choice(homes),
            tuple(NodeId(f"{stage}-{rng.randint(0, 5)}") for stage in range(1, NUM_STAGES + 1)),
        )
        for _ in range(8)
    ]
    loads = Counter(relay for path in paths for relay in path.relays)
    nodes = {home: GraphNode(home, 0, rng.randint(2, 4)) for home in homes}
    for relay, load in loads.items():
        nodes[relay] = GraphNode(relay, int(relay.split("-")[0]), load)
    layers = [
        [node.node_id for node in nodes.values() if node.stage_index == stage]
        for stage in [*range(NUM_STAGES + 1), 0]
    ]
    costs = {
        (begin, end): round(10 ** rng.uniform(0, 2), 3)
        for here, there in pairwise(layers)
        for begin in here
        for end in there
    }
    return FlowGraph(NUM_STAGES, nodes, costs), paths


def cost_of(graph: FlowGraph, routes: list[Route]) -> float:
    return sum(graph.path_cost(route.path) for route in routes)


def peak_of(graph: FlowGraph, routes: list[Route]) -> float:
    uses = Counter(hop for route in routes for hop in pairwise(route.path))
    return max(num * graph.costs[hop] for hop, num in uses.items())


def test_all_paths_are_settled_at_little_more_than_the_least_cost() -> None:
    ratios = []
    for seed in range(15):
        graph, paths = draw(Random(seed))
        capacities = {node.node_id: node.capacity for node in graph.stage(0)}
        routes = settle(paths, graph.costs, capacities)
        assert not broken_rules(graph, routes), seed
        assert len(routes) == len(paths), seed
        ratios.append(cost_of(graph, routes) / cost_of(graph, optimal_routes(graph)))
    assert mean(ratios) < 1.01
    assert max(ratios) < 1.1


def test_the_same_paths_are_settled_in_the_same_way() -> None:
    graph, paths = draw(Random(1))
    capacities = {node.node_id: node.capacity for node in graph.stage(0)}
    assert settle(paths, graph.costs, capacities) == settle(paths, graph.costs, capacities)


def test_settling_ends_early_where_little_may_be_spent_on_it() -> None:
    """What it says then is a routing of all paths, and the dearer the less was spent."""
    found = []
    for work_max in (0, 200, 1e9):
        total = 0.0
        for seed in range(5):
            graph, paths = draw(Random(seed))
            capacities = {node.node_id: node.capacity for node in graph.stage(0)}
            routes = settle(paths, graph.costs, capacities, work_max=work_max)
            assert not broken_rules(graph, routes), seed
            assert len(routes) == len(paths), seed
            total += cost_of(graph, routes)
        found.append(total)
    assert found[0] > found[1] > found[2]


def test_three_pass_their_middle_parts_round() -> None:
    """No pair can exchange anything here: the links for it are missing."""
    letters = "abc"
    paths = [DraftPath(NodeId(f"d{x}"), (NodeId(f"{x}1"), NodeId(f"{x}2"))) for x in letters]
    costs = {}
    for x, other in zip(letters, "bca", strict=True):
        for begin, end, cost in (
            (f"d{x}", f"{x}1", 1.0),
            (f"{x}1", f"{x}2", 5.0),
            (f"{x}2", f"d{x}", 5.0),
            (f"{x}1", f"{other}2", 1.0),
            (f"{other}2", f"d{x}", 1.0),
        ):
            costs[NodeId(begin), NodeId(end)] = cost
    routes = settle(paths, costs, {path.source: 1 for path in paths})
    assert sum(costs[hop] for route in routes for hop in pairwise(route.path)) == 9.0


def test_paths_keep_off_links_that_others_crowd() -> None:
    """As the objective MAX wants it: the largest number of paths times cost of any link."""
    ratios = []
    for seed in range(5):
        graph, paths = draw(Random(seed))
        capacities = {node.node_id: node.capacity for node in graph.stage(0)}
        dearest = max(graph.costs.values())
        weights = {link: (cost / dearest) ** 8 for link, cost in graph.costs.items()}
        routes = settle(paths, weights, capacities, crowding=8)
        assert not broken_rules(graph, routes), seed
        assert len(routes) == len(paths), seed
        ratios.append(peak_of(graph, routes) / peak_of(graph, optimal_routes(graph, "max")))
    assert mean(ratios) < 1.05
    assert max(ratios) < 1.3


# --- negative cycles ------------------------------------------------------------------------------


def weights_of(rng: Random, num: int) -> list[list[float]]:
    costs = [[rng.uniform(0, 10) for _ in range(num)] for _ in range(num)]
    return [[cost - row[i] for cost in row] for i, row in enumerate(costs)]


@pytest.mark.parametrize("seed", range(50))
def test_a_cycle_is_found_just_where_an_assignment_is_better(seed: int) -> None:
    rng = Random(seed)
    num = rng.randint(1, 6)
    weights = weights_of(rng, num)
    least = min(
        sum(weights[i][j] for i, j in enumerate(order)) for order in permutations(range(num))
    )
    cycle = negative_cycle(weights, slack=1e-9)
    if not cycle:
        assert least >= -1e-6
        return
    assert len(set(cycle)) == len(cycle)
    assert sum(weights[i][j] for i, j in pairwise([*cycle, cycle[0]])) < 0


def test_differences_within_the_slack_are_no_improvement() -> None:
    assert negative_cycle([[0.0, -1e-12], [0.0, 0.0]], slack=1e-9) == []


def test_three_pass_their_things_round() -> None:
    dear = 9.0
    weights = [[0.0, -1.0, dear], [dear, 0.0, -1.0], [-1.0, dear, 0.0]]
    cycle = negative_cycle(weights, slack=1e-9)
    assert cycle[cycle.index(0) :] + cycle[: cycle.index(0)] == [0, 1, 2]
