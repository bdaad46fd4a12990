"""Routes over which a round is over sooner, found from those that cost least.

Where links carry one tensor at a time, and a round is over when its last microbatch is home, the
least sum of costs is not yet the shortest round: the cheapest links are everybody's. So routes that
have been settled are changed as long as that shortens the round (`planner.schedule` says how long
it is): a flow that is among the last takes another relay that has room, two flows exchange a part
of their ways, or one is let go, since two microbatches on a good way are often home before one on a
bad way is. When no such change helps, a few are made at random and the search begins again from
there, as long as there is work left to spend (iterated local search).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, pairwise
from random import Random

from decod.ids import NodeId
from decod.planner.graph import Link, Route
from decod.planner.schedule import Timing, dealt_out, finish_times

_SAVES_S = 1e-9

_WORTH = 0.97
"""Routes stay as they are unless a round takes at most this share of the time: costs are measured,
and what is found by them is not worth more than they are."""

_KICKS = 3
"""Changes that a restart begins with."""

_IN_VAIN_MAX = 12
"""Restarts in a row that found nothing better, after which no more is tried."""

_KNOWN_MAX = 8
"""Results that are remembered: a draft that has not changed is settled again and again."""

_Length = tuple[float, float]
"""When the last microbatch is home, and the mean over all. Seconds."""

_Relays = tuple[NodeId, ...] | None
"""Those that a flow goes through; None: it has been let go."""

_Change = dict[int, _Relays]
"""Flows, by index, and what would become of them."""


def shortened(
    routes: Sequence[Route],
    costs: Mapping[Link, float],
    *,
    compute_s: Mapping[NodeId, float],
    rooms: Sequence[Mapping[NodeId, int]],
    numbers: Mapping[NodeId, int],
    work_max: float,
) -> list[Route]:
    """Return routes over which a round is not longer: as many of each data node, or fewer.

    Args:
        routes: Whole ways; each hop is in `costs`.
        costs: d(i, j) of the links that may be used, in seconds.
        compute_s: Mean seconds of a pass at each node; those not in it are like the mean.
        rooms: For each relay stage: its relays, and how many flows each may carry.
        numbers: How many microbatches each data node sends out.
        work_max: Tasks of microbatches that are looked at, about 1 us each.
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
        """Flows of the microbatches that are home last."""

    def run(self, work_max: float) -> tuple[Route, ...]:
        self._work_left = work_max
        self._measure()
        settled, settled_s = [*self._relays], self._length[0]
        self._descend()
        best, least = [*self._relays], self._length
        in_vain = 0
        while self._work_left > 0 and in_vain < _IN_VAIN_MAX:
            for _ in range(_KICKS):
                self._kick()
            self._measure()
            self._descend()
            in_vain += 1
            if _shorter(self._length, least):
                in_vain = 0 if self._length[0] < least[0] - _SAVES_S else in_vain
                best, least = [*self._relays], self._length
            else:
                self._restore(best, least)
        if least[0] > _WORTH * settled_s:
            best = settled
        pairs = zip(self._owners, best, strict=True)
        return tuple(Route((owner, *way, owner)) for owner, way in pairs if way is not None)

    # --- how long a round takes ---------------------------------------------------------------

    def _measure(self) -> None:
        """Take in how long a round takes over the flows as they are."""
        found = self._try({}, math.inf)
        assert found is not None
        self._length, self._last = found

    def _try(self, change: _Change, limit_s: float) -> tuple[_Length, list[int]] | None:
        """Return how long a round takes with a change, and which flows end it.

        None if that is longer than the limit.
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
        """Change the flows that end the round as long as that helps."""
        while self._work_left > 0:
            if not any(self._improve(i) for i in [*self._last]):
                return

    def _improve(self, i: int) -> bool:
        """Make the first change of a flow that shortens the round."""
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
        """Make some change of some flow."""
        changes = [*self._changes(self._rng.randrange(len(self._relays)))]
        if changes:
            self._make(self._rng.choice(changes))

    def _changes(self, i: int) -> Iterator[_Change]:
        """Yield what could become of a flow."""
        relays, owner = self._relays[i], self._owners[i]
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
                mine, theirs = relays[begin:end], others[begin:end]
                if mine[0] != theirs[0] and mine[-1] != theirs[-1]:
                    yield from self._whole(
                        {
                            i: (*relays[:begin], *theirs, *relays[end:]),
                            j: (*others[:begin], *mine, *others[end:]),
                        }
                    )

    def _whole(self, change: _Change) -> Iterator[_Change]:
        """Yield the change, if all its links are known."""
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
    """Whether a round is over sooner, or as soon and its microbatches are home sooner."""
    if this[0] < than[0] - _SAVES_S:
        return True
    return this[0] <= than[0] + _SAVES_S and this[1] < than[1] - _SAVES_S
