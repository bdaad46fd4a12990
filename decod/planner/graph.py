"""The routing problem, and how long an iteration takes over some routes.

A *flow graph* has data nodes at stage 0 and relays at stages 1 to S, each with a capacity for
flows. Links lead from a data node to stage 1, from stage s to stage s + 1, and from stage S back to
a data node. A *route* is the path of one flow: from its data node through one relay of each stage
and home again. A good routing has as many routes as the capacities allow, at the least cost.

Flows are found by the sum of link costs, which ignores that two microbatches may want the same
link. `finish_times` includes that. Each microbatch goes from its data node through its relays and
home, and back the same way. A link carries one tensor at a time in each direction, a device
computes one pass at a time, and both serve in the order of arrival. Nothing is random, so all nodes
that know the same costs compute the same times.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heapreplace
from itertools import pairwise

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


Task = tuple[int, float, float]
"""One need of a microbatch: a resource (a link's direction, or a device), the seconds that it takes
there, and the seconds of all later needs without waiting."""


class Timing:
    """Turns ways into tasks.

    Args:
        costs: d(i, j) of links in seconds, in the direction of the forward pass.
        compute_s: c_i of nodes: mean seconds of a pass. Nodes without an entry get the mean of all.
    """

    def __init__(self, costs: Mapping[Link, float], compute_s: Mapping[NodeId, float]) -> None:
        self._costs = costs
        self._compute_s = compute_s
        self._other_s = math.fsum(compute_s.values()) / len(compute_s) if compute_s else 0.0
        self._numbers: dict[Link | NodeId, int] = {}
        self._known: dict[tuple[NodeId, ...], list[Task]] = {}
        self._path_costs: dict[tuple[NodeId, ...], float] = {}

    @property
    def num_resources(self) -> int:
        """Number of links' directions and devices in all tasks so far."""
        return len(self._numbers)

    def tasks(self, path: tuple[NodeId, ...]) -> list[Task]:
        """Return the tasks of a microbatch from `path[0]` to the path's end and back."""
        known = self._known.get(path)
        if known is None:
            known = self._known[path] = self._tasks(path)
        return known

    def cost(self, path: tuple[NodeId, ...]) -> float:
        """Return the sum of d(i, j) along a path."""
        known = self._path_costs.get(path)
        if known is None:
            known = math.fsum(self._costs[hop] for hop in pairwise(path))
            self._path_costs[path] = known
        return known

    def alone_s(self, path: tuple[NodeId, ...]) -> float:
        """Return how long the way takes without waiting."""
        _, first_s, rest_s = self.tasks(path)[0]
        return first_s + rest_s

    def _tasks(self, path: tuple[NodeId, ...]) -> list[Task]:
        wires_s = [self._wire_s(hop) for hop in pairwise(path)]
        there_and_back = [*path, *path[-2::-1]]
        needs: list[tuple[Link | NodeId, float]] = []
        for hop, wire_s in zip(pairwise(there_and_back), [*wires_s, *wires_s[::-1]], strict=True):
            needs.append((hop, wire_s))
            if (pass_s := self._compute_s.get(hop[1], self._other_s)) > 0:
                needs.append((hop[1], pass_s))
        tasks: list[Task] = []
        rest_s = 0.0
        for resource, seconds in reversed(needs):
            number = self._numbers.setdefault(resource, len(self._numbers))
            tasks.append((number, seconds, rest_s))
            rest_s += seconds
        return tasks[::-1]

    def _wire_s(self, hop: Link) -> float:
        """Return a link's own part of d(i, j), which also contains half of each end's pass."""
        passes_s = sum(self._compute_s.get(end, self._other_s) for end in hop)
        return max(0.0, self._costs[hop] - passes_s / 2)


def finish_times(
    ways: Sequence[Sequence[Task]], num_resources: int, *, limit_s: float = math.inf
) -> list[float] | None:
    """Return when each microbatch is back. None: one of them would be later than `limit_s`.

    All begin at once. If several reach a link or device at the same instant, the first listed is
    served first.
    """
    free_s = [0.0] * num_resources
    ends_s = [0.0] * len(ways)
    due = [(0.0, i, 0) for i in range(len(ways))]
    heapify(due)
    while due:
        now_s, i, step = due[0]
        tasks = ways[i]
        if step == len(tasks):
            ends_s[i] = now_s
            heappop(due)
            continue
        resource, seconds, rest_s = tasks[step]
        begin_s = free_s[resource]
        done_s = (begin_s if begin_s > now_s else now_s) + seconds
        if done_s + rest_s > limit_s:
            return None
        free_s[resource] = done_s
        heapreplace(due, (done_s, i, step + 1))
    return ends_s


def dealt_out(
    owners: Sequence[NodeId], costs: Sequence[float], numbers: Mapping[NodeId, int]
) -> list[int]:
    """Return the flow, by its index, of each of `numbers` microbatches of each data node.

    The choice is that of data nodes. Free flows come first, the cheapest of them first. Then comes
    the flow that would finish one more microbatch first, if its microbatches went one after
    another.

    Args:
        owners: The data node of each flow.
        costs: The cost of each flow's path.
        numbers: Microbatches per data node. Without an entry: as many as the node has flows.
    """
    own: dict[NodeId, list[int]] = {}
    for index, owner in enumerate(owners):
        own.setdefault(owner, []).append(index)
    dealt: list[int] = []
    for data_node, indexes in own.items():
        indexes.sort(key=lambda i: (costs[i], i))
        num = numbers.get(data_node, len(indexes))
        assert num >= 0, (data_node, num)
        dealt += indexes[:num]
        loads = dict.fromkeys(indexes, 1)
        for _ in range(num - len(indexes)):
            chosen = min(indexes, key=lambda i: ((loads[i] + 1) * costs[i], i))
            loads[chosen] += 1
            dealt.append(chosen)
    return dealt
