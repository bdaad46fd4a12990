"""Small flow graphs for tests, and solutions by other methods."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import networkx
from hypothesis import strategies as st

from decod.ids import NodeId
from decod.planner.graph import FlowGraph, GraphNode, Route

Capacities = Sequence[Mapping[str, int]]


def make_graph(capacities: Capacities, costs: Mapping[tuple[str, str], float]) -> FlowGraph:
    """Return a graph from each stage's nodes with their capacities, data nodes first."""
    nodes = {
        NodeId(name): GraphNode(NodeId(name), stage_index, capacity)
        for stage_index, stage in enumerate(capacities)
        for name, capacity in stage.items()
    }
    links = {(NodeId(begin), NodeId(end)): float(cost) for (begin, end), cost in costs.items()}
    return FlowGraph(len(capacities) - 1, nodes, links)


def possible_links(capacities: Capacities) -> list[tuple[str, str]]:
    """Return every pair that may have a link."""
    layers = [*capacities, capacities[0]]
    return [
        pair
        for here, there in itertools.pairwise(layers)
        for pair in itertools.product(here, there)
    ]


@st.composite
def flow_graphs(
    draw: st.DrawFn, *, max_data_nodes: int = 3, max_stages: int = 3, max_relays: int = 3
) -> FlowGraph:
    """Draw graphs with gaps: missing links, nodes without capacity, stages without nodes."""
    num_stages = draw(st.integers(1, max_stages))
    counts = [draw(st.integers(1, max_data_nodes))]
    counts += [draw(st.integers(0, max_relays)) for _ in range(num_stages)]
    capacities = [
        {f"{'dabc'[stage]}{index}": draw(st.integers(0, 3)) for index in range(count)}
        for stage, count in enumerate(counts)
    ]
    costs = {
        pair: cost
        for pair in possible_links(capacities)
        if (cost := draw(st.none() | st.integers(0, 9))) is not None
    }
    return make_graph(capacities, costs)


def total_cost(graph: FlowGraph, routes: Iterable[Route]) -> float:
    """Return the sum of the costs of all flows."""
    return sum(graph.path_cost(route.path) for route in routes)


def by_networkx(graph: FlowGraph) -> tuple[int, float]:
    """Return the flows and cost of a graph with one data node and integer costs."""
    (home,) = graph.stage(0)
    network = networkx.DiGraph()
    network.add_edge("start", ("sends", home.node_id), capacity=home.capacity, weight=0)
    network.add_node(("receives", home.node_id))
    for node in graph.nodes.values():
        if node.stage_index:
            begin, end = ("receives", node.node_id), ("sends", node.node_id)
            network.add_edge(begin, end, capacity=node.capacity, weight=0)
    for (begin, end), cost in graph.costs.items():
        network.add_edge(("sends", begin), ("receives", end), weight=int(cost))
    flow = networkx.max_flow_min_cost(network, "start", ("receives", home.node_id))
    return sum(flow["start"].values()), float(networkx.cost_of_flow(network, flow))


def all_paths(graph: FlowGraph) -> list[tuple[NodeId, ...]]:
    """Return every path of a flow."""
    paths = [(node.node_id,) for node in graph.stage(0)]
    for _ in range(graph.num_stages):
        paths = [(*path, end) for path in paths for end in graph.next[path[-1]]]
    return [(*path, path[0]) for path in paths if (path[-1], path[0]) in graph.costs]


def by_trying(
    graph: FlowGraph, worth: Callable[[FlowGraph, Sequence[Route]], tuple[float, ...]]
) -> tuple[float, ...]:
    """Return the least worth of all sets of paths that fit."""
    paths = all_paths(graph)
    room = {node.node_id: node.capacity for node in graph.nodes.values()}
    chosen: list[Route] = []
    best = worth(graph, chosen)

    def extend(start: int) -> None:
        nonlocal best
        best = min(best, worth(graph, chosen))
        for index in range(start, len(paths)):
            path = paths[index]
            if all(room[node] for node in path[:-1]):
                for node in path[:-1]:
                    room[node] -= 1
                chosen.append(Route(path))
                extend(index)
                chosen.pop()
                for node in path[:-1]:
                    room[node] += 1

    extend(0)
    return best
