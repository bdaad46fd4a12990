"""Rigid pipelines: each relay has one neighbour before it and one behind it."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from decod.lab.planner.fixed import fixed_routes
from decod.lab.sim.instances import table5
from decod.planner.graph import FlowGraph, broken_rules
from tests.support.flow_graphs import flow_graphs, make_graph, total_cost


@settings(max_examples=40)
@given(graph=flow_graphs(), seed=st.integers(0, 9))
def test_a_relay_serves_one_pipeline(graph: FlowGraph, seed: int) -> None:
    routes = fixed_routes(graph, random.Random(seed), generations=3)
    assert broken_rules(graph, routes) == []
    pipelines = {route.path for route in routes}
    relays = [node for path in pipelines for node in path[1:-1]]
    assert len(relays) == len(set(relays))


def test_the_slowest_link_of_a_stage_decides() -> None:
    """Straight: slowest 6, sum 7. Crossed: slowest 4, sum 8, which DT-FM prefers."""
    near = {("d", "a0"): 0, ("d", "a1"): 0, ("b0", "d"): 0, ("b1", "d"): 0}
    costs = {("a0", "b0"): 1, ("a1", "b1"): 6, ("a0", "b1"): 4, ("a1", "b0"): 4}
    graph = make_graph([{"d": 2}, {"a0": 1, "a1": 1}, {"b0": 1, "b1": 1}], near | costs)
    routes = fixed_routes(graph, random.Random(0))
    assert {route.path[1:3] for route in routes} == {("a0", "b1"), ("a1", "b0")}
    assert total_cost(graph, routes) == 8


def test_equal_capacities_go_together() -> None:
    """Any other matching wastes room, however cheap it is."""
    stage = [("a", "b"), ("a", "B"), ("A", "b"), ("A", "B")]
    costs = dict.fromkeys(stage, 1) | {("A", "B"): 99, ("a", "b"): 99}
    costs |= {("d", "a"): 1, ("d", "A"): 1, ("b", "d"): 1, ("B", "d"): 1}
    graph = make_graph([{"d": 9}, {"a": 1, "A": 5}, {"b": 1, "B": 5}], costs)
    assert len(fixed_routes(graph, random.Random(0))) == 6


def test_longer_search_is_no_worse() -> None:
    graph = table5(1, seed=2)
    short = fixed_routes(graph, random.Random(0), generations=0)
    long = fixed_routes(graph, random.Random(0), generations=40)
    assert broken_rules(graph, long) == []
    assert len(long) >= len(short)


def test_pipelines_are_shared_out_among_data_nodes() -> None:
    graph = table5(6, seed=0)
    routes = fixed_routes(graph, random.Random(0), generations=0)
    assert {route.data_node for route in routes} == {"data-1", "data-2", "data-3", "data-4"}
