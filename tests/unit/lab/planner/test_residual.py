"""The flow of one data node stays the cheapest while nodes are tried out and put in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.ids import NodeId
from decod.lab.planner.residual_graph import Arcs, SingleSourceFlow
from decod.planner.graph import FlowGraph, GraphNode, broken_rules
from tests.support.flow_graphs import by_networkx, flow_graphs, make_graph, total_cost


def _grown(graph: FlowGraph, node_id: NodeId, stage_index: int, arcs: Arcs) -> FlowGraph:
    costs = dict(graph.costs)
    costs |= {(other, node_id): cost for other, cost in arcs.before.items()}
    costs |= {(node_id, other): cost for other, cost in arcs.after.items()}
    node = GraphNode(node_id, stage_index, arcs.capacity)
    return FlowGraph(graph.num_stages, {**graph.nodes, node_id: node}, costs)


def _draw_arcs(data: st.DataObject, graph: FlowGraph, stage_index: int) -> Arcs:
    def links(stage: int) -> dict[NodeId, float]:
        some = st.none() | st.integers(0, 9).map(float)
        drawn = {node.node_id: data.draw(some) for node in graph.stage(stage)}
        return {node_id: cost for node_id, cost in drawn.items() if cost is not None}

    behind = (stage_index + 1) % (graph.num_stages + 1)
    return Arcs(data.draw(st.integers(0, 4)), links(stage_index - 1), links(behind))


@given(graph=flow_graphs(max_data_nodes=1), data=st.data())
def test_every_change_leaves_what_networkx_finds_from_scratch(
    graph: FlowGraph, data: st.DataObject
) -> None:
    """Trying out changes nothing; putting in changes it as trying out has said."""
    flow = SingleSourceFlow(graph)
    assert (flow.num_flows, flow.cost) == by_networkx(graph)
    for index in range(3):
        stage_index = data.draw(st.integers(1, graph.num_stages))
        arcs = _draw_arcs(data, graph, stage_index)
        grown = _grown(graph, NodeId(f"new{index}"), stage_index, arcs)
        before = (flow.num_flows, flow.cost, flow.routes())
        after = flow.try_out(arcs)
        assert after == by_networkx(grown)
        assert (flow.num_flows, flow.cost, flow.routes()) == before
        if data.draw(st.booleans()):
            flow.add(NodeId(f"new{index}"), arcs)
            graph = grown
            assert (flow.num_flows, flow.cost) == after
            routes = flow.routes()
            assert broken_rules(graph, routes) == []
            assert (len(routes), total_cost(graph, routes)) == after


@given(graph=flow_graphs(max_data_nodes=1), data=st.data())
def test_costs_that_are_no_whole_numbers_do_not_make_it_go_round_in_circles(
    graph: FlowGraph, data: st.DataObject
) -> None:
    """0.1 + 0.2 is not 0.3 in floats: ways that cost the same must not seem to save."""
    costs = {link: cost / 10 for link, cost in graph.costs.items()}
    tenths = FlowGraph(graph.num_stages, graph.nodes, costs)
    flow, exact = SingleSourceFlow(tenths), SingleSourceFlow(graph)
    stage_index = data.draw(st.integers(1, graph.num_stages))
    arcs = _draw_arcs(data, graph, stage_index)
    small = Arcs(
        arcs.capacity,
        {node: cost / 10 for node, cost in arcs.before.items()},
        {node: cost / 10 for node, cost in arcs.after.items()},
    )
    num_flows, cost = exact.try_out(arcs)
    assert flow.try_out(small) == (num_flows, pytest.approx(cost / 10, abs=1e-9))
    flow.add(NodeId("new"), small)
    assert broken_rules(_grown(tenths, NodeId("new"), stage_index, small), flow.routes()) == []


def test_a_detour_of_the_same_cost_is_not_taken() -> None:
    """0.1 + 0.2 + 0.3 is a bit more than 0.2 + 0.1 + 0.3 in floats."""
    graph = make_graph(
        [{"d": 3}, {"a": 3}, {"b": 3}], {("d", "a"): 0.1, ("a", "b"): 0.2, ("b", "d"): 0.3}
    )
    flow = SingleSourceFlow(graph)
    before = flow.routes()
    flow.add(NodeId("n"), Arcs(3, {NodeId("d"): 0.2}, {NodeId("b"): 0.1}))
    assert flow.routes() == before
