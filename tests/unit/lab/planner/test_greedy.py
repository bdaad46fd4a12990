"""SWARM's wiring: the peer that is expected to be done first, within its capacity."""

import random

from hypothesis import given
from hypothesis import strategies as st

from decod.lab.planner.greedy_routes import greedy_routes
from decod.lab.planner.optimal import optimal_routes
from decod.lab.sim.instances import table5
from decod.planner.graph import FlowGraph, broken_rules
from tests.support.flow_graphs import all_paths, flow_graphs, make_graph


@given(graph=flow_graphs(), seed=st.integers(0, 9), closest_only=st.booleans())
def test_what_is_left_carries_no_further_flow(
    graph: FlowGraph, seed: int, closest_only: bool
) -> None:
    routes = greedy_routes(graph, random.Random(seed), closest_only=closest_only)
    assert broken_rules(graph, routes) == []
    assert len(routes) <= len(optimal_routes(graph))
    used = [node for route in routes for node in route.path[:-1]]
    for path in all_paths(graph):
        assert any(used.count(node) >= graph.nodes[node].capacity for node in path[:-1])


def test_work_is_shared_in_proportion_to_speed() -> None:
    """The quick relay is done with three by the time that the slow one is done with one."""
    graph = make_graph(
        [{"d": 4}, {"quick": 9, "slow": 9}],
        {("d", "quick"): 2, ("d", "slow"): 5, ("quick", "d"): 1, ("slow", "d"): 1},
    )
    taken = [route.path[1] for route in greedy_routes(graph, random.Random(0))]
    assert taken == ["quick", "quick", "slow", "quick"]
    closest = greedy_routes(graph, random.Random(0), closest_only=True)
    assert {route.path[1] for route in closest} == {"quick"}


def test_a_choice_looks_no_further_than_one_link() -> None:
    """The close relay leads to a dear link: greedy walks into it, unlike the optimum."""
    graph = make_graph(
        [{"d": 1}, {"close": 1, "far": 1}],
        {("d", "close"): 1, ("close", "d"): 100, ("d", "far"): 2, ("far", "d"): 2},
    )
    assert greedy_routes(graph, random.Random(0))[0].path[1] == "close"
    assert optimal_routes(graph)[0].path[1] == "far"


def test_a_relay_that_cannot_go_on_is_passed_over() -> None:
    graph = make_graph(
        [{"d": 2}, {"dead-end": 9, "a": 9}, {"b": 1}],
        {("d", "dead-end"): 1, ("d", "a"): 9, ("a", "b"): 1, ("b", "d"): 1},
    )
    (route,) = greedy_routes(graph, random.Random(0))
    assert route.path == ("d", "a", "b", "d")


def test_data_nodes_take_turns() -> None:
    graph = make_graph(
        [{"d0": 3, "d1": 3}, {"a": 4}],
        {("d0", "a"): 1, ("d1", "a"): 1, ("a", "d0"): 1, ("a", "d1"): 1},
    )
    homes = [route.data_node for route in greedy_routes(graph, random.Random(0))]
    assert homes == ["d0", "d1", "d0", "d1"]


def test_the_same_seed_gives_the_same_routes() -> None:
    graph = table5(6, seed=1)
    first, again = (greedy_routes(graph, random.Random(3)) for _ in range(2))
    assert first == again
