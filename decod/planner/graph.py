"""The routing problem: each node's capacity for flows, and the cost of each hop.

A *flow graph* has data nodes at stage 0 and relays at stages 1 to S. Links lead from a data node to
stage 1, from stage s to stage s + 1, and from stage S back to a data node. A *route* is the path of
one flow: from its data node through one relay of each stage and home again. A good routing has as
many routes as the capacities allow, at the least cost.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from decod.ids import NodeId

Link = tuple[NodeId, NodeId]


class Objective(StrEnum):
    """The cost to minimise among all routings with the most flows (GWTF, section V-A)."""

    SUM = "sum"
    """The sum over all links of f(i, j) x d(i, j): equation (2)."""
    MAX = "max"
    """The largest f(i, j) x d(i, j) of any link."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node's place: stage 0 for data nodes, 1 to S for relays."""

    node_id: NodeId
    stage_index: int
    capacity: int
    """Largest number of flows through it. At a data node: flows that begin and end there."""


@dataclass(frozen=True, slots=True)
class FlowGraph:
    """Nodes and links. `config` checks graphs from files; this class trusts its caller."""

    num_stages: int
    """S, the number of relay stages, without the data nodes' stage 0."""
    nodes: Mapping[NodeId, GraphNode]
    costs: Mapping[Link, float]
    """d(i, j) >= 0 of each link, in any unit. An absent pair has no link."""
    next: Mapping[NodeId, Sequence[NodeId]] = field(init=False)
    """The nodes that each node's links lead to, sorted."""
    previous: Mapping[NodeId, Sequence[NodeId]] = field(init=False)
    """The nodes that each node's links come from, sorted."""

    def __post_init__(self) -> None:
        following: dict[NodeId, list[NodeId]] = {node_id: [] for node_id in self.nodes}
        preceding: dict[NodeId, list[NodeId]] = {node_id: [] for node_id in self.nodes}
        for begin, end in sorted(self.costs):
            following[begin].append(end)
            preceding[end].append(begin)
        object.__setattr__(self, "next", following)
        object.__setattr__(self, "previous", preceding)

    def stage(self, stage_index: int) -> list[GraphNode]:
        """Return a stage's nodes in the order of their ids."""
        nodes = [node for node in self.nodes.values() if node.stage_index == stage_index]
        return sorted(nodes, key=lambda node: node.node_id)

    def path_cost(self, path: Sequence[NodeId]) -> float:
        """Return the sum of d(i, j) along a path. Raise KeyError if a link is absent."""
        return sum(self.costs[hop] for hop in itertools.pairwise(path))


@dataclass(frozen=True, slots=True)
class Route:
    """The path of one flow."""

    path: tuple[NodeId, ...]
    """Data node, a relay of stage 1, ..., a relay of stage S, the same data node."""

    @property
    def data_node(self) -> NodeId:
        return self.path[0]


def broken_rules(graph: FlowGraph, routes: Iterable[Route]) -> list[str]:
    """Return the faults of a routing, a sentence each; an empty list if it is valid.

    Each route must end where it began, visit one node of each stage in order, and use existing
    links. No node may carry more than its capacity.
    """
    problems: list[str] = []
    loads = dict.fromkeys(graph.nodes, 0)
    for route in routes:
        path = route.path
        stages = [graph.nodes[node_id].stage_index for node_id in path]
        if path[0] != path[-1] or stages != [*range(graph.num_stages + 1), 0]:
            problems.append(f"{' > '.join(path)} is not a way through all stages and home")
        missing = [hop for hop in itertools.pairwise(path) if hop not in graph.costs]
        problems += [f"there is no link {begin} > {end}" for begin, end in missing]
        for node_id in path[:-1]:
            loads[node_id] += 1
    for node_id, load in loads.items():
        if load > (capacity := graph.nodes[node_id].capacity):
            problems.append(f"{node_id} carries {load} flows, its capacity is {capacity}")
    return problems
