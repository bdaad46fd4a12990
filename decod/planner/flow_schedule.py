"""Length of an iteration: microbatches on their ways, one at a time on each link and device.

Flows are found by the sum of link costs, which ignores that two microbatches may want the same
link. This model includes that. Each microbatch goes from its data node through its relays and home,
and back the same way. A link carries one tensor at a time in each direction, a device computes one
pass at a time, and both serve in the order of arrival. Nothing is random, so all nodes that know
the same costs compute the same times.
"""

import math
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import pairwise

from decod.ids import NodeId
from decod.planner.graph import Link

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
