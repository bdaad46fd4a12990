"""Minimum-cost flow of a single data node, updated one node at a time.

For each unit on a link, the residual network of a flow has a link back at the negative cost. Each
vertex has a *price*. The *reduced cost* of a residual link is `cost + price(begin) - price(end)`.
While prices exist that make all reduced costs at least 0, the flow has the least cost for its
amount, and Dijkstra's algorithm finds the next cheapest path. Each node is two vertices, a
receiving and a sending one, joined by a link of the node's capacity. The data node sends at one and
receives at the other.

Costs are floats. Differences below `_PRECISION` of the largest cost count as zero.

Source: successive shortest paths with potentials (Edmonds and Karp, 1972; Ahuja, Magnanti and
Orlin, "Network flows", section 9.7).
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from decod.ids import NodeId
from decod.planner.graph import FlowGraph, Route

_PRECISION = 1e-12
"""Share of the largest cost below which a saving counts as a rounding error."""


@dataclass(frozen=True, slots=True)
class Arcs:
    """A node's possible place: its links from the stage before and to the stage after."""

    capacity: int
    before: Mapping[NodeId, float]
    after: Mapping[NodeId, float]


@dataclass(frozen=True, slots=True)
class _Saved:
    spare: list[int]
    price: list[float]
    cost: float
    num_flows: int


class SingleSourceFlow:
    """The most flows of a graph with one data node, at the least cost. Nodes may join."""

    def __init__(self, graph: FlowGraph) -> None:
        (data_node,) = graph.stage(0)
        self.cost = 0.0
        """Sum of the costs of all flows, in the graph's unit."""
        self.num_flows = 0
        self._wanted = data_node.capacity
        # Residual link e leads to `_end[e]` and takes `_spare[e]` more units at `_cost[e]`. Its
        # opposite is e ^ 1, so the units on link e (even) are `_spare[e ^ 1]`.
        self._end: list[int] = []
        self._spare: list[int] = []
        self._cost: list[float] = []
        self._links: list[list[int]] = []
        self._price: list[float] = []
        self._receives: dict[NodeId, int] = {}
        self._sends: dict[NodeId, int] = {}
        self._owner: list[NodeId] = []
        self._tolerance = _PRECISION * max(graph.costs.values(), default=0.0)
        self._data_node = data_node.node_id
        for node in sorted(graph.nodes.values(), key=lambda n: (n.stage_index, n.node_id)):
            self._add_vertices(node.node_id)
            if node.node_id != self._data_node:
                receives, sends = self._receives[node.node_id], self._sends[node.node_id]
                self._add_link(receives, sends, min(node.capacity, self._wanted), 0.0)
        for (begin, end), cost in sorted(graph.costs.items()):
            self._add_link(self._sends[begin], self._receives[end], self._wanted, cost)
        self._augment()

    def add(self, node_id: NodeId, arcs: Arcs) -> None:
        """Add a node and use it, for cheaper flows and, if it makes room, for more.

        Only cycles and paths through the new node can have become worthwhile, so only they are
        tried.
        """
        self._add_vertices(node_id)
        receives, sends = self._receives[node_id], self._sends[node_id]
        before = {self._sends[other]: cost for other, cost in arcs.before.items()}
        after = {self._receives[other]: cost for other, cost in arcs.after.items()}
        self._tolerance = max(
            self._tolerance,
            _PRECISION * max([*arcs.before.values(), *arcs.after.values()], default=0.0),
        )
        # No more units can pass. A link with more room would need a price of its own.
        room = min(arcs.capacity, self._wanted)
        for vertex, cost in sorted(before.items()):
            self._add_link(vertex, receives, room, cost)
        for vertex, cost in sorted(after.items()):
            self._add_link(sends, vertex, room, cost)
        # Choose prices at which the node's own links cost at least 0.
        self._price[receives] = min((self._price[v] + c for v, c in before.items()), default=0.0)
        self._price[sends] = max((self._price[v] - c for v, c in after.items()), default=0.0)
        used = self._reroute(sends, receives, room)
        self._add_link(receives, sends, room, 0.0)
        self._spare[-2] -= used
        self._spare[-1] += used
        if not self.full:
            self._augment()

    def try_out(self, arcs: Arcs) -> tuple[int, float]:
        """Return the number of flows and their cost after an `add`, without changing anything."""
        saved = _Saved([*self._spare], [*self._price], self.cost, self.num_flows)
        probe = NodeId("")
        self.add(probe, arcs)
        outcome = self.num_flows, self.cost
        self._take_back(probe, saved)
        return outcome

    @property
    def full(self) -> bool:
        """Whether the data node has all the flows that it wants."""
        return self.num_flows == self._wanted

    def routes(self) -> list[Route]:
        """Return the flows' paths. Units of links are joined in the order of the nodes' ids."""
        units = [0] * len(self._end)
        for link in range(0, len(self._end), 2):
            units[link] = self._spare[link ^ 1]
        routes = []
        for _ in range(self.num_flows):
            path, vertex = [self._data_node], self._sends[self._data_node]
            while vertex != self._receives[self._data_node]:
                link = next(link for link in self._links[vertex] if link % 2 == 0 and units[link])
                units[link] -= 1
                vertex = self._end[link]
                if path[-1] != self._owner[vertex]:
                    path.append(self._owner[vertex])
            routes.append(Route(tuple(path)))
        return routes

    def _add_vertices(self, node_id: NodeId) -> None:
        for place in (self._receives, self._sends):
            place[node_id] = len(self._links)
            self._links.append([])
            self._price.append(0.0)
            self._owner.append(node_id)

    def _add_link(self, begin: int, end: int, spare: int, cost: float) -> None:
        for here, there, room, price in ((begin, end, spare, cost), (end, begin, 0, -cost)):
            self._links[here].append(len(self._end))
            self._end.append(there)
            self._spare.append(room)
            self._cost.append(price)

    def _take_back(self, node_id: NodeId, saved: _Saved) -> None:
        """Undo the last `add`."""
        size = len(saved.spare)
        for _ in range(2):
            for link in self._links.pop():
                opposite = self._links[self._end[link]]
                if opposite[-1] >= size:
                    opposite.pop()
            self._owner.pop()
        del self._end[size:], self._cost[size:]
        del self._receives[node_id], self._sends[node_id]
        self._spare, self._price = saved.spare, saved.price
        self.cost, self.num_flows = saved.cost, saved.num_flows

    def _reroute(self, sends: int, receives: int, room: int) -> int:
        """Move units to a new node as long as that saves cost. Return the number of units."""
        used = 0
        while used < room:
            distance, arrived_by = self._search(sends, receives)
            saving = self._price[sends] - self._price[receives] - distance[receives]
            if saving <= self._tolerance:
                # The node's own link has room left, so it must cost at least 0, and exactly 0 if
                # used.
                self._raise_prices(distance, max(0.0, self._price[sends] - self._price[receives]))
                break
            self._raise_prices(distance, distance[receives])
            units = self._push(arrived_by, sends, receives, room - used)
            used += units
            self.cost -= units * saving
        return used

    def _augment(self) -> None:
        """Add flows, the cheapest first, until the data node has enough or no path is left."""
        start, goal = self._sends[self._data_node], self._receives[self._data_node]
        while not self.full:
            distance, arrived_by = self._search(start, goal)
            if distance[goal] == math.inf:
                break
            self._raise_prices(distance, distance[goal])
            units = self._push(arrived_by, start, goal, self._wanted - self.num_flows)
            self.num_flows += units
            self.cost += units * (self._price[goal] - self._price[start])

    def _search(self, start: int, goal: int) -> tuple[list[float], list[int]]:
        """Return reduced distances from a vertex, and the link that reaches each vertex.

        The search stops once the goal is settled. Distances beyond the goal may then be too large,
        but are never smaller than the goal's.
        """
        distance = [math.inf] * len(self._links)
        arrived_by = [-1] * len(self._links)
        settled = [False] * len(self._links)
        distance[start] = 0.0
        heap = [(0.0, start)]
        links, ends, spare = self._links, self._end, self._spare
        costs, price = self._cost, self._price
        while heap:
            here, vertex = heapq.heappop(heap)
            if settled[vertex]:
                continue
            settled[vertex] = True
            if vertex == goal:
                break
            base = here + price[vertex]
            for link in links[vertex]:
                if spare[link]:
                    end = ends[link]
                    # Rounding may make a reduced cost slightly negative.
                    there = max(here, base + costs[link] - price[end])
                    if there < distance[end]:
                        distance[end] = there
                        arrived_by[end] = link
                        heapq.heappush(heap, (there, end))
        return distance, arrived_by

    def _raise_prices(self, distance: list[float], limit: float) -> None:
        self._price = [
            price + min(far, limit) for price, far in zip(self._price, distance, strict=True)
        ]

    def _push(self, arrived_by: list[int], start: int, goal: int, room: int) -> int:
        """Send as many units as fit along the path of a search. Return their number."""
        path = []
        vertex = goal
        while vertex != start:
            link = arrived_by[vertex]
            path.append(link)
            vertex = self._end[link ^ 1]
        units = min(room, *(self._spare[link] for link in path))
        for link in path:
            self._spare[link] -= units
            self._spare[link ^ 1] += units
        return units
