"""SWARM's routing, as a baseline: every sender picks the peer that should finish first.

For every stage, a SWARM trainer keeps a queue of that stage's peers, ordered by the time of all
the work that it gave them. It takes the first, adds the expected time of the new task, and puts the
peer back. Peers thus get work in proportion to their speed (interleaved weighted round-robin). If a
peer does not answer, the task goes to the next.

Here every sending node keeps a queue of the next stage's nodes. Deviations:

- The time of a task on a link is its cost d(i, j), known in advance. SWARM learns it as an
  exponential moving average of response times. With constant costs the average converges to them.
- The queue is ordered by the time at which the new task would be done, not by the work before it. A
  node's first choice is then its closest peer, as in GWTF's comparison with SWARM.
- Nodes have a capacity, which SWARM does not know. A peer refuses if it has no room, or if it finds
  no peer behind it. Its sender then tries the next. A flow that all peers refuse stays unrouted.

Source: SWARM parallelism (arXiv:2301.11913), section 3.2 and algorithm 1, and `ExpertBalancer` in
its public code; GWTF, section VI.
"""

import itertools
import random

from decod.ids import NodeId
from decod.planner.graph import FlowGraph, Link, Route


def greedy_routes(
    graph: FlowGraph, rng: random.Random, *, closest_only: bool = False
) -> list[Route]:
    """Return the routes of microbatch slots that are sent one after another.

    Data nodes take turns in the order of their ids. A data node stops when a slot is refused.

    Args:
        graph: The nodes and links. A node's choice depends only on its own links.
        rng: Breaks ties between peers.
        closest_only: Ignore queued work, and always choose the closest peer with room. GWTF
            describes the baseline of its figure 7 so.
    """
    wiring = _Wiring(graph, rng, closest_only=closest_only)
    waiting = {node.node_id: node.capacity for node in graph.stage(0) if node.capacity}
    routes = []
    while waiting:
        for home in list(waiting):
            route = wiring.send(home)
            if route is None:
                # Room only ever shrinks, so the next slot would be refused as well.
                del waiting[home]
                continue
            routes.append(route)
            waiting[home] -= 1
            if not waiting[home]:
                del waiting[home]
    return routes


class _Wiring:
    """The state of all nodes: the queue and the room of each."""

    def __init__(self, graph: FlowGraph, rng: random.Random, *, closest_only: bool) -> None:
        self._graph = graph
        self._rng = rng
        self._closest_only = closest_only
        self._room = {node.node_id: node.capacity for node in graph.nodes.values()}
        self._queued: dict[Link, float] = {}

    def send(self, home: NodeId) -> Route | None:
        """Return the route of one slot, or None if it cannot come home."""
        path = [home]
        refused: set[NodeId] = set()
        while len(path) == 1 or path[-1] != home:
            peer = self._choose(path, refused)
            if peer is not None:
                path.append(peer)
                continue
            refused.add(path.pop())
            if not path:
                return None
        for link in itertools.pairwise(path):
            self._queued[link] = self._queued.get(link, 0.0) + self._graph.costs[link]
        for relay in path[1:-1]:
            self._room[relay] -= 1
        return Route(tuple(path))

    def _choose(self, path: list[NodeId], refused: set[NodeId]) -> NodeId | None:
        """Return the peer that the last node of a path sends to, or None if none has room."""
        here = path[-1]
        if len(path) > self._graph.num_stages:
            return path[0] if (here, path[0]) in self._graph.costs else None
        open_to = [
            peer for peer in self._graph.next[here] if self._room[peer] and peer not in refused
        ]
        return min(open_to, key=lambda peer: self._done_at(here, peer), default=None)

    def _done_at(self, here: NodeId, peer: NodeId) -> tuple[float, float]:
        """Return when a peer would finish one more task of this sender, and a tie-breaker."""
        queued = 0.0 if self._closest_only else self._queued.get((here, peer), 0.0)
        return queued + self._graph.costs[here, peer], self._rng.random()
