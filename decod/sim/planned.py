"""Routes for a simulated run, from a planner that knows the true cost of every link."""

from collections.abc import Callable, Collection, Mapping, Sequence

from decod.ids import NodeId
from decod.planner.cost import Link, link_cost_s
from decod.planner.graph import FlowGraph, GraphNode, Route
from decod.sim.kernel import seeded
from decod.sim.network import LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Scenario

Planner = Callable[[FlowGraph], list[Route]]


class PlannedRoutes:
    """The layout of a run with described hosts, planned anew for every set of members.

    Args:
        scenario: The hosts, the links between them, and the layout's name.
        ids: Ids of all hosts, by name.

    Raises:
        ConfigError: The scenario asks for the exact routing, but its solver is not installed.
    """

    def __init__(self, scenario: Scenario, ids: Mapping[str, NodeId]) -> None:
        assert scenario.layout is not None
        rng = seeded(scenario.seed, "plan")
        lay_out = scenario.layout.lay_out
        self._plan: Planner = lambda graph: lay_out(graph, rng)
        self._graph = true_graph(scenario, ids)
        self._known: dict[frozenset[NodeId], list[Route]] = {}
        self.layout([*ids.values()])

    def layout(self, members: Collection[NodeId]) -> Sequence[Route]:
        """Return all flows among these hosts."""
        key = frozenset(members)
        if key not in self._known:
            nodes = {node_id: self._graph.nodes[node_id] for node_id in sorted(key)}
            costs = {link: cost for link, cost in self._graph.costs.items() if key.issuperset(link)}
            self._known[key] = self._plan(FlowGraph(self._graph.num_stages, nodes, costs))
        return self._known[key]

    def cost(self, path: Sequence[NodeId]) -> float:
        """Return the cost of a path, in seconds."""
        return self._graph.path_cost(path)


def true_graph(scenario: Scenario, ids: Mapping[str, NodeId]) -> FlowGraph:
    """Return the graph of a scenario's hosts, with costs by equation (1) in seconds.

    These are the costs that nodes would know if they measured without error. A node deals with
    every node of an adjacent stage here, not with `protocol.max_peers_per_stage` of them.
    """
    nodes = {
        ids[host.name]: GraphNode(ids[host.name], host.stage_index, host.capacity)
        for host in scenario.hosts
    }
    by_stage: dict[int, list[tuple[str, ComputeProfile]]] = {}
    for host in scenario.hosts:
        by_stage.setdefault(host.stage_index, []).append((host.name, host.profile))
    num_stages = scenario.stages.num_relay_stages
    costs: dict[tuple[NodeId, NodeId], float] = {}
    for stage_index in range(num_stages + 1):
        behind = (stage_index + 1) % (num_stages + 1)
        for here, mine in by_stage[stage_index]:
            for there, theirs in by_stage[behind]:
                costs[ids[here], ids[there]] = link_cost_s(
                    compute_here_s=mine.pass_s(data=stage_index == 0),
                    compute_there_s=theirs.pass_s(data=behind == 0),
                    forth=_link(scenario.links.between(here, there, seed=scenario.seed)),
                    back=_link(scenario.links.between(there, here, seed=scenario.seed)),
                    size_bytes=scenario.profile.activation_bytes,
                )
    return FlowGraph(num_stages, nodes, costs)


def _link(spec: LinkSpec) -> Link:
    return Link(spec.latency_s, spec.bandwidth_bytes_per_s)
