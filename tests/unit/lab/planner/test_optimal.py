"""The exact routing agrees with other exact methods, wherever they apply."""

import sys
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings

from decod.errors import ConfigError
from decod.lab.planner.optimal import largest_link_cost, optimal_routes
from decod.lab.planner.residual_graph import SingleSourceFlow
from decod.lab.sim.instances import table5
from decod.planner.graph import FlowGraph, Route, broken_rules
from tests.support.flow_graphs import (
    all_paths,
    by_networkx,
    by_trying,
    flow_graphs,
    make_graph,
    total_cost,
)


@given(flow_graphs(max_data_nodes=1))
def test_one_data_node_costs_what_networkx_finds(graph: FlowGraph) -> None:
    routes = optimal_routes(graph)
    assert broken_rules(graph, routes) == []
    assert (len(routes), total_cost(graph, routes)) == by_networkx(graph)


def _by_sum(graph: FlowGraph, routes: Sequence[Route]) -> tuple[float, ...]:
    return -len(routes), total_cost(graph, routes)


def _by_max(graph: FlowGraph, routes: Sequence[Route]) -> tuple[float, ...]:
    return -len(routes), largest_link_cost(graph, routes), total_cost(graph, routes)


@pytest.mark.parametrize(("objective", "worth"), [("sum", _by_sum), ("max", _by_max)])
@settings(max_examples=60)
@given(graph=flow_graphs(max_data_nodes=3, max_stages=2))
def test_several_data_nodes_cost_what_trying_everything_finds(
    graph: FlowGraph,
    objective: str,
    worth: Callable[[FlowGraph, Sequence[Route]], tuple[float, ...]],
) -> None:
    assume(len(all_paths(graph)) <= 16)
    assume(sum(node.capacity for node in graph.stage(0)) <= 5)
    routes = optimal_routes(graph, objective)
    assert broken_rules(graph, routes) == []
    assert worth(graph, routes) == by_trying(graph, worth)


def test_a_flow_must_return_to_its_own_data_node() -> None:
    """The cheap links lead from each data node to the other, which is no way home."""
    graph = make_graph(
        [{"d0": 1, "d1": 1}, {"a0": 1, "a1": 1}],
        {
            ("d0", "a0"): 1,
            ("a0", "d1"): 1,
            ("d1", "a1"): 1,
            ("a1", "d0"): 1,
            ("d0", "a1"): 50,
            ("a0", "d0"): 50,
            ("d1", "a0"): 50,
            ("a1", "d1"): 50,
        },
    )
    routes = optimal_routes(graph)
    assert {route.path[0] == route.path[-1] for route in routes} == {True}
    assert total_cost(graph, routes) == 102


def test_a_flow_more_is_worth_any_cost() -> None:
    """Costs over twelve decades: the second flow must use the dearest links."""
    graph = make_graph(
        [{"d": 2}, {"a": 1, "b": 1}],
        {("d", "a"): 1e-6, ("a", "d"): 1e-6, ("d", "b"): 1e6, ("b", "d"): 1e6},
    )
    assert len(optimal_routes(graph)) == 2


def test_data_nodes_share_the_limit_of_a_link() -> None:
    """One flow each over the cheap link between relays would make 2 there; apart it is 1.5."""
    ends = {(d, r): 0 for d in ("d0", "d1") for r in ("a", "b")}
    ends |= {(r, d): 0 for d in ("d0", "d1") for r in ("x", "y")}
    graph = make_graph(
        [{"d0": 1, "d1": 1}, {"a": 2, "b": 2}, {"x": 2, "y": 2}],
        ends | {("a", "x"): 1, ("b", "y"): 1.5},
    )
    assert largest_link_cost(graph, optimal_routes(graph, "sum")) == 2
    assert largest_link_cost(graph, optimal_routes(graph, "max")) == 1.5


def test_the_busiest_link_is_relieved_first_and_then_the_sum() -> None:
    """Two flows over the link of cost 3 would cost 6 there; apart they cost 5 at most."""
    graph = make_graph(
        [{"d": 2}, {"a": 2, "b": 2, "c": 2}],
        {
            ("d", "a"): 3,
            ("a", "d"): 0,
            ("d", "b"): 5,
            ("b", "d"): 0,
            ("d", "c"): 5,
            ("c", "d"): 4,
        },
    )
    assert {route.path[1] for route in optimal_routes(graph)} == {"a"}
    routes = optimal_routes(graph, "max")
    assert sorted(route.path[1] for route in routes) == ["a", "b"]
    assert largest_link_cost(graph, routes) == 5


@pytest.mark.parametrize("setting", [1, 2, 3, 4])
def test_the_papers_instances_cost_what_networkx_finds(setting: int) -> None:
    graph = table5(setting, seed=0)
    routes = optimal_routes(graph)
    found = (len(routes), total_cost(graph, routes))
    flow = SingleSourceFlow(graph)
    assert found == by_networkx(graph) == (flow.num_flows, flow.cost)


def test_the_papers_sources_get_all_their_flows() -> None:
    graph = table5(5, seed=0)
    routes = optimal_routes(graph)
    assert len(routes) == sum(node.capacity for node in graph.stage(0))


def test_a_graph_that_carries_nothing_has_no_routes() -> None:
    assert optimal_routes(make_graph([{"d": 4}, {}], {})) == []
    full = {("d", "a"): 1.0, ("a", "d"): 1.0}
    assert optimal_routes(make_graph([{"d": 4}, {"a": 0}], full)) == []
    assert optimal_routes(make_graph([{"d": 0}, {"a": 4}], full)) == []
    free = dict.fromkeys(full, 0.0)
    assert len(optimal_routes(make_graph([{"d": 4}, {"a": 3}], free))) == 3


def test_a_missing_solver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    graph = make_graph([{"d": 1}, {"a": 1}], {("d", "a"): 1.0, ("a", "d"): 1.0})
    with pytest.raises(ConfigError, match=r"E-CFG-060 .*the extra `lab`"):
        optimal_routes(graph)
