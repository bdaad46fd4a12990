"""The leader's choice of flows: which data node gets each unit of a draft, and along which path.

First come the flows whose links cost least (`settlement`). In a run, flows over which an iteration
is shorter may then take their place (`shortened`). A choice takes tenths of a second. So the
problem and its solution are plain values, which travel to another process and back as JSON.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from random import Random

from decod.ids import NodeId
from decod.planner.graph import Link, Route, Timing, dealt_out, finish_times
from decod.planner.settlement import DraftPath, fair_shares, settle

_SAVES_S = 1e-9

_WORTH = 0.97
"""Largest ratio of the new length to the old at which routes change. Costs are measured, so a
smaller gain is within their error."""

_KICKS = 3
"""Number of random changes at the start of a restart."""

_IN_VAIN_MAX = 12
"""The search ends after this many restarts in a row without a better result."""

_KNOWN_MAX = 8
"""Number of cached results, because an unchanged draft is settled again and again."""

_Length = tuple[float, float]
"""When the last microbatch is home, and the mean over all microbatches. Seconds."""

_Relays = tuple[NodeId, ...] | None
"""The relays of a flow. None: the flow was dropped."""

_Change = dict[int, _Relays]
"""New relays of some flows, by the flows' indexes."""


def shortened(
    routes: Sequence[Route],
    costs: Mapping[Link, float],
    *,
    compute_s: Mapping[NodeId, float],
    rooms: Sequence[Mapping[NodeId, int]],
    numbers: Mapping[NodeId, int],
    work_max: float,
) -> list[Route]:
    """Return routes with which an iteration is not longer: as many for each data node, or fewer.

    Links carry one tensor at a time, and an iteration ends when its last microbatch is home. The
    least sum of costs is then not the shortest iteration, because all flows want the cheapest
    links. Settled routes are therefore changed as long as that shortens the iteration.
    `planner.graph` computes its length. A change does one of three things. A flow among the last
    takes another relay with room. Two flows exchange a part of their ways. Or a flow is dropped,
    because two microbatches on a good way are often home before one on a bad way. When no change
    helps, a few are made at random and the search begins again, as long as work is left (iterated
    local search).

    Args:
        routes: Whole ways. Each hop is in `costs`.
        costs: d(i, j) of the links that may be used, in seconds.
        compute_s: Mean seconds of a pass at each node. Nodes without an entry get the mean.
        rooms: For each relay stage: its relays, and how many flows each may carry.
        numbers: How many microbatches each data node sends out.
        work_max: Tasks of microbatches to look at, about 1 us each.
    """
    found = _shortened(
        tuple(routes),
        tuple(sorted(costs.items())),
        tuple(sorted(compute_s.items())),
        tuple(tuple(sorted(room.items())) for room in rooms),
        tuple(sorted(numbers.items())),
        work_max,
    )
    return [*found]


@lru_cache(maxsize=_KNOWN_MAX)
def _shortened(
    routes: tuple[Route, ...],
    costs: tuple[tuple[Link, float], ...],
    compute_s: tuple[tuple[NodeId, float], ...],
    rooms: tuple[tuple[tuple[NodeId, int], ...], ...],
    numbers: tuple[tuple[NodeId, int], ...],
    work_max: float,
) -> tuple[Route, ...]:
    if not routes or any(len(route.path) != len(rooms) + 2 for route in routes):
        return routes
    search = _Search(
        routes, dict(costs), dict(compute_s), [dict(room) for room in rooms], dict(numbers)
    )
    return search.run(work_max)


class _Search:
    def __init__(
        self,
        routes: Sequence[Route],
        costs: Mapping[Link, float],
        compute_s: Mapping[NodeId, float],
        rooms: Sequence[Mapping[NodeId, int]],
        numbers: Mapping[NodeId, int],
    ) -> None:
        self._costs = costs
        self._rooms = rooms
        self._numbers = numbers
        self._timing = Timing(costs, compute_s)
        self._owners = [route.data_node for route in routes]
        self._relays: list[_Relays] = [route.path[1:-1] for route in routes]
        self._loads: Counter[NodeId] = Counter()
        self._update_loads()
        self._work_left = 0.0
        self._rng = Random(len(routes))  # noqa: S311 - the same routes are changed in the same way.
        self._length = (math.inf, math.inf)
        self._last: list[int] = []
        """Flows of the last microbatches to come home."""

    def run(self, work_max: float) -> tuple[Route, ...]:
        self._work_left = work_max
        self._measure()
        settled = [*self._relays]
        settled_s = self._length[0]
        self._descend()
        best = [*self._relays]
        least = self._length
        in_vain = 0
        while self._work_left > 0 and in_vain < _IN_VAIN_MAX:
            for _ in range(_KICKS):
                self._kick()
            self._measure()
            self._descend()
            in_vain += 1
            if _shorter(self._length, least):
                in_vain = 0 if self._length[0] < least[0] - _SAVES_S else in_vain
                best = [*self._relays]
                least = self._length
            else:
                self._restore(best, least)
        if least[0] > _WORTH * settled_s:
            best = settled
        pairs = zip(self._owners, best, strict=True)
        return tuple(Route((owner, *way, owner)) for owner, way in pairs if way is not None)

    # --- how long an iteration takes ----------------------------------------------------------

    def _measure(self) -> None:
        """Update the length of an iteration with the present flows."""
        found = self._try({}, math.inf)
        assert found is not None
        self._length, self._last = found

    def _try(self, change: _Change, limit_s: float) -> tuple[_Length, list[int]] | None:
        """Return the length of an iteration with a change, and the flows that end it.

        None if the length exceeds the limit.
        """
        timing = self._timing
        indexes: list[int] = []
        paths: list[tuple[NodeId, ...]] = []
        for i, (owner, before) in enumerate(self._ways()):
            relays = change.get(i, before)
            if relays is None:
                continue
            path = (owner, *relays, owner)
            if timing.alone_s(path) > limit_s:
                self._work_left -= len(path)
                return None
            indexes.append(i)
            paths.append(path)
        costs = [timing.cost(path) for path in paths]
        flows = dealt_out([path[0] for path in paths], costs, self._numbers)
        ways = [timing.tasks(paths[k]) for k in flows]
        self._work_left -= sum(map(len, ways))
        ends_s = finish_times(ways, timing.num_resources, limit_s=limit_s)
        if ends_s is None:
            return None
        last_s = max(ends_s)
        late = [k for k, end_s in zip(flows, ends_s, strict=True) if end_s >= last_s - _SAVES_S]
        length = last_s, math.fsum(ends_s) / len(ends_s)
        return length, [indexes[k] for k in dict.fromkeys(late)]

    # --- changes ------------------------------------------------------------------------------

    def _descend(self) -> None:
        """Change the flows that end the iteration, as long as that helps."""
        while self._work_left > 0:
            if not any(self._improve(i) for i in [*self._last]):
                return

    def _improve(self, i: int) -> bool:
        """Make the first change of a flow that shortens the iteration. Return whether one does."""
        changes = [*self._changes(i)]
        self._rng.shuffle(changes)
        for change in changes:
            if self._work_left <= 0:
                return False
            found = self._try(change, self._length[0] + _SAVES_S)
            if found is not None and _shorter(found[0], self._length):
                self._make(change)
                self._length, self._last = found
                return True
        return False

    def _kick(self) -> None:
        """Make a random change of a random flow."""
        changes = [*self._changes(self._rng.randrange(len(self._relays)))]
        if changes:
            self._make(self._rng.choice(changes))

    def _changes(self, i: int) -> Iterator[_Change]:
        """Yield all possible changes of a flow."""
        relays = self._relays[i]
        owner = self._owners[i]
        if relays is None:
            return
        if sum(k == owner and way is not None for k, way in self._ways()) > 1:
            yield {i: None}
        for stage, room in enumerate(self._rooms):
            for relay, num in room.items():
                if relay != relays[stage] and self._loads[relay] < num:
                    yield from self._whole({i: (*relays[:stage], relay, *relays[stage + 1 :])})
        for j, others in enumerate(self._relays):
            if j == i or others is None:
                continue
            for begin, end in combinations(range(len(relays) + 1), 2):
                mine = relays[begin:end]
                theirs = others[begin:end]
                if mine[0] != theirs[0] and mine[-1] != theirs[-1]:
                    yield from self._whole(
                        {
                            i: (*relays[:begin], *theirs, *relays[end:]),
                            j: (*others[:begin], *mine, *others[end:]),
                        }
                    )

    def _whole(self, change: _Change) -> Iterator[_Change]:
        """Yield the change if all its links are known."""
        ways = [
            (self._owners[i], *relays, self._owners[i])
            for i, relays in change.items()
            if relays is not None
        ]
        if all(hop in self._costs for way in ways for hop in pairwise(way)):
            yield change

    def _ways(self) -> Iterator[tuple[NodeId, _Relays]]:
        return zip(self._owners, self._relays, strict=True)

    def _make(self, change: _Change) -> None:
        for i, relays in change.items():
            self._relays[i] = relays
        self._update_loads()

    def _restore(self, relays: Sequence[_Relays], length: _Length) -> None:
        self._relays = [*relays]
        self._length = length
        self._update_loads()

    def _update_loads(self) -> None:
        self._loads = Counter(relay for way in self._relays for relay in way or ())


def _shorter(this: _Length, than: _Length) -> bool:
    """Return whether an iteration ends sooner, or as soon with its microbatches home sooner."""
    if this[0] < than[0] - _SAVES_S:
        return True
    return this[0] <= than[0] + _SAVES_S and this[1] < than[1] - _SAVES_S


_SHORTENING_WORK_MAX = 150_000
"""About a fifth of a second."""

LinkCosts = tuple[tuple[NodeId, float], ...]
"""What one node's links cost, by the node at their other end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsettled:
    """Claims of all data nodes, to be made into flows."""

    paths: tuple[tuple[NodeId, ...], ...]
    """Claimed paths: the data node where each begins, then a relay of each stage."""
    capacities: tuple[tuple[NodeId, int], ...]
    """Number of microbatches that each data node sends out, and of flows that it can take."""
    outward: tuple[tuple[NodeId, LinkCosts], ...]
    """Costs of links, told by the nodes where they begin. A later entry replaces an earlier one."""
    inward: tuple[tuple[NodeId, LinkCosts], ...] = ()
    """Costs of links, told by the nodes where they end. `outward` goes before them."""
    compute_s: tuple[tuple[NodeId, float], ...] = ()
    """Mean seconds of a pass at each node."""
    rooms: tuple[tuple[tuple[NodeId, int], ...], ...] | None = None
    """For each relay stage: its relays, and how many flows each may carry. With it, flows are
    chosen for a short iteration, and costs are seconds. Without it, they are chosen for their
    costs."""
    fair: bool = False
    """Data nodes get flows in proportion to their capacities. Otherwise the cheapest flows count,
    whoever gets them."""
    crowding: int = 1
    """The power to which the load and cost of a link are raised. 1 minimises the sum of costs. A
    large one minimises the largest cost."""
    work_max: float
    """Limit of the work of `settle`."""


@dataclass(frozen=True, slots=True)
class Decided:
    """One flow that was chosen."""

    route: Route
    costs: tuple[float, ...]
    """Cost of each hop of `route`."""


def decide(unsettled: Unsettled) -> tuple[Decided, ...]:
    """Return the flows of all data nodes. Takes up to half a second with a hundred relays."""
    costs = {(begin, end): cost for begin, links in unsettled.outward for end, cost in links}
    paths = [DraftPath(path[0], path[1:]) for path in unsettled.paths]
    capacities = dict(unsettled.capacities)
    if unsettled.fair:
        capacities = fair_shares(capacities, len(paths))
    weights, crowding = _weights(costs, unsettled.crowding)
    routes = settle(paths, weights, capacities, crowding=crowding, work_max=unsettled.work_max)
    if unsettled.rooms is not None:
        told = {(begin, end): cost for end, links in unsettled.inward for begin, cost in links}
        costs = told | costs
        routes = shortened(
            routes,
            costs,
            compute_s=dict(unsettled.compute_s),
            rooms=[dict(room) for room in unsettled.rooms],
            numbers=dict(unsettled.capacities),
            work_max=_SHORTENING_WORK_MAX,
        )
    assert all(route.path[0] == route.path[-1] in capacities for route in routes), "all lead home"
    return tuple(
        Decided(route, tuple(costs[hop] for hop in pairwise(route.path))) for route in routes
    )


def _weights(costs: Mapping[Link, float], crowding: int) -> tuple[Mapping[Link, float], int]:
    """Return what links add to the objective with one unit, and the power of more units.

    Powers are of costs relative to the dearest: only the differences of a sum matter.
    """
    dearest = max(costs.values(), default=0.0)
    if crowding == 1 or not dearest:
        return costs, 1
    return {link: (cost / dearest) ** crowding for link, cost in costs.items()}, crowding
