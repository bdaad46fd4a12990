"""Assignment of a draft's paths to data nodes, at little more than the draft's cost.

A draft's path may begin at one data node and end at another. Two paths may cross: behind some
stage, they exchange the rest of their ways, at the cost of two other links. A crossing at one stage
exchanges their ends. Crossings at two stages exchange the part in between. Dynamic programming
along a pair of paths finds its best crossings and the best data nodes for the result. Pairs are
improved, the most rewarding first, until none improves.

Rotations find improvements that pairs miss. They cut all paths at the same two stages and deal out
the middle parts anew. The best deal is an assignment problem, whose negative cycles show the
exchanges. When neither method helps, a few parts are exchanged at random and the search begins
again (iterated local search), as long as work is left.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from random import Random

from decod.ids import NodeId
from decod.planner.graph import Link, Route


def negative_cycle(weights: Sequence[Sequence[float]], *, slack: float) -> list[int]:
    """Return a cycle whose weights add up to less than 0, or an empty list.

    Each member of the cycle takes the next one's thing, and the last takes the first one's. The
    method is Bellman and Ford's relaxation from all nodes at once, in at most cubic time.

    Every node holds one thing. `weights[i][j]` is the extra cost if node i held j's thing instead
    of its own. If passing things round a ring lowers the total cost, that ring is a cycle of
    negative weight. If there is no negative cycle, the assignment is the cheapest (Klein, 1967).

    Args:
        weights: Square, with zeros on the diagonal.
        slack: Tolerance for rounding: weights that differ by less count as equal.
    """
    num = len(weights)
    assert all(len(row) == num and not row[i] for i, row in enumerate(weights)), "as documented"
    distances = [0.0] * num
    parents = [-1] * num
    for _ in range(num + 1):
        relaxed = False
        for i, row in enumerate(weights):
            distance = distances[i]
            for j, weight in enumerate(row):
                if distance + weight < distances[j] - slack:
                    distances[j] = distance + weight
                    parents[j] = i
                    relaxed = True
        if not relaxed:
            return []
        if cycle := _cycle(parents):
            assert len(set(cycle)) == len(cycle) > 1, "a ring passes each node once"
            return cycle
    return []


def _cycle(parents: Sequence[int]) -> list[int]:
    """Return a cycle of parents, first parents first, or an empty list."""
    visits = [-1] * len(parents)
    for start in range(len(parents)):
        here = start
        while here >= 0 and visits[here] < 0:
            visits[here] = start
            here = parents[here]
        if here >= 0 and visits[here] == start:
            cycle = [here]
            while (parent := parents[cycle[-1]]) != here:
                cycle.append(parent)
            return cycle[::-1]
    return []


_SAVES = 1e-9

_RESTARTS_MAX = 60
_RESTART_WORK_MAX = 60_000
"""Limits of the restarts: their number, and the sum of stages times pairs of paths over all of
them. That takes at most half a second, and 10 paths of 8 stages get all restarts."""

_RESTART_EXCHANGES = 3
"""Parts that a restart exchanges. Fewer are soon undone; more lose the earlier result."""

_KNOWN_MAX = 8
"""Number of cached settlements, because an unchanged draft is settled again and again."""

_State = tuple[list[list[NodeId]], list[NodeId], dict[NodeId, int]]
"""The paths' relays, their owners, and how many paths each data node owns."""


@dataclass(frozen=True, slots=True)
class DraftPath:
    """A path of the draft: its first data node, and one relay of each stage."""

    source: NodeId
    relays: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class _Better:
    """A pair's improvement."""

    saving: float
    crossed: tuple[bool, ...]
    """Whether the pair exchanges its relays, by stage."""
    owners: tuple[NodeId, NodeId]


def settle(
    paths: Sequence[DraftPath],
    costs: Mapping[Link, float],
    capacities: Mapping[NodeId, int],
    *,
    crowding: int = 1,
    work_max: float = math.inf,
) -> list[Route]:
    """Return routes through the same relays, each back to where it began.

    There are as many routes as paths, unless links are missing: a path that no data node can close
    is left out.

    Args:
        paths: Paths of the draft. Left out are paths that differ from the first in length, paths
            that begin at a node outside `capacities`, and paths beyond the total capacity.
        costs: Costs of the known links, including those of `paths`. Other links are not used.
        capacities: Flows that each data node can take.
        crowding: A link with n paths costs n to this power times its cost with one path.
        work_max: Stages of pairs of paths to look at, about 5 us each. At the limit the best result
            so far is returned.
    """
    named = tuple(sorted(costs.items())), tuple(sorted(capacities.items()))
    return [*_settled(tuple(paths), *named, crowding, work_max)]


@lru_cache(maxsize=_KNOWN_MAX)
def _settled(
    paths: tuple[DraftPath, ...],
    costs: tuple[tuple[Link, float], ...],
    capacities: tuple[tuple[NodeId, int], ...],
    crowding: int,
    work_max: float,
) -> tuple[Route, ...]:
    return tuple(_Settlement(paths, dict(costs), dict(capacities), crowding, work_max).run())


def fair_shares(capacities: Mapping[NodeId, int], num_flows: int) -> dict[NodeId, int]:
    """Return how many of `num_flows` flows each data node gets, in proportion to its capacity.

    Largest remainders come first, ties by id. The shares add up to `num_flows` or to the total
    capacity, whichever is less.
    """
    total = sum(capacities.values())
    num = min(num_flows, total)
    shares = {k: num * capacity // total if total else 0 for k, capacity in capacities.items()}
    rest = sorted(capacities, key=lambda k: (-(num * capacities[k] % max(1, total)), k))
    for k in rest[: num - sum(shares.values())]:
        shares[k] += 1
    assert sum(shares.values()) == num, (shares, num)
    assert all(share <= capacities[k] for k, share in shares.items()), (shares, capacities)
    return shares


class _Settlement:
    def __init__(
        self,
        paths: Sequence[DraftPath],
        costs: Mapping[Link, float],
        capacities: Mapping[NodeId, int],
        crowding: int,
        work_max: float,
    ) -> None:
        self._crowding = crowding
        self._work_left = work_max
        self._costs = costs
        self._capacities = capacities
        paths = _usable(paths, capacities)
        self._paths = [list(path.relays) for path in paths]
        self._owners = [path.source for path in paths]
        self._loads = dict.fromkeys(capacities, 0)
        for owner in self._owners:
            self._loads[owner] += 1
        self._uses: Counter[Link] = Counter()
        """Number of paths on each link. Kept only if it affects the links' costs."""
        self._versions = [0] * len(paths)
        """Version of each path, which grows with each change of a pair."""
        hops = len(paths) * (len(paths[0].relays) + 1) if paths else 0
        self._no_link = 1.0 + hops * max(costs.values(), default=0.0)
        """Cost of a missing link: more than all paths together, so none is used without need."""

    def run(self) -> list[Route]:
        if self._paths:
            self._choose_owners()
            self._search()
            self._restart()
        owned = Counter(self._owners)
        assert all(owned[k] == load for k, load in self._loads.items()), "loads are kept beside"
        assert all(num <= self._capacities[k] for k, num in owned.items()), "more than fit"
        pairs = zip(self._owners, self._paths, strict=True)
        routes = [Route((owner, *path, owner)) for owner, path in pairs]
        return [
            route for route in routes if all(hop in self._costs for hop in pairwise(route.path))
        ]

    def _search(self) -> None:
        """Improve pairs, and rotate parts among all paths, until neither helps."""
        self._improve_pairs()
        best = self._state()
        least = self._total()
        while self._work_left > 0 and self._rotate_all():
            self._improve_pairs()
            # A rotation ignores that other paths use the same links.
            if (total := self._total()) >= least:
                self._restore(best)
                break
            best = self._state()
            least = total

    def _restart(self) -> None:
        """Exchange some parts at random and search again. Keep the result if it is cheaper."""
        num = len(self._paths)
        if num < 2 or len(self._capacities) < 2:
            return
        rng = Random(num)  # noqa: S311 - the same paths are settled in the same way.
        best = self._state()
        least = self._total()
        work = num * num * len(self._paths[0])
        for _ in range(min(_RESTARTS_MAX, _RESTART_WORK_MAX // work)):
            if self._work_left <= 0:
                break
            for _ in range(_RESTART_EXCHANGES):
                first, second = rng.sample(self._paths, 2)
                begin = rng.randrange(len(first))
                part = slice(begin, rng.randint(begin + 1, len(first)))
                first[part], second[part] = second[part], first[part]
            self._search()
            if (total := self._total()) < least - _SAVES:
                best = self._state()
                least = total
            else:
                self._restore(best)

    def _state(self) -> _State:
        return [list(path) for path in self._paths], list(self._owners), dict(self._loads)

    def _restore(self, state: _State) -> None:
        paths, owners, loads = state
        self._paths = [list(path) for path in paths]
        self._owners = list(owners)
        self._loads = dict(loads)

    def _total(self) -> float:
        cost = self._costs.get
        no_link = self._no_link
        uses = self._count_uses()
        return sum(cost(hop, no_link) * float(num) ** self._crowding for hop, num in uses.items())

    def _count_uses(self) -> Counter[Link]:
        return Counter(hop for i in range(len(self._paths)) for hop in self._hops(i))

    def _hops(self, i: int) -> Iterator[Link]:
        return pairwise((self._owners[i], *self._paths[i], self._owners[i]))

    def _improve_pairs(self) -> None:
        if self._crowding > 1:
            self._uses = self._count_uses()
        queue: list[tuple[float, int, int, int, int, _Better]] = []
        for second in range(len(self._paths)):
            for first in range(second):
                self._consider(queue, first, second)
        while queue and self._work_left > 0:
            _, first, second, first_version, second_version, better = heapq.heappop(queue)
            if (first_version, second_version) != (self._versions[first], self._versions[second]):
                continue
            outdated = self._crowding > 1 and self._best(first, second) != better
            if outdated or not self._take(first, second, better):
                self._consider(queue, first, second)
                continue
            for changed in (first, second):
                for other in range(len(self._paths)):
                    if other != changed and (other, changed) != (first, second):
                        self._consider(queue, min(other, changed), max(other, changed))

    def _rotate_all(self) -> bool:
        """Rotate the parts between any two cuts until none helps. Return whether any did."""
        cuts = list(combinations(range(len(self._paths[0]) + 1), 2))
        helped = False
        tried_in_vain = 0
        while tried_in_vain < len(cuts):
            for begin, end in cuts:
                improved = self._work_left > 0 and self._rotate(begin, end)
                helped |= improved
                tried_in_vain = 0 if improved else tried_in_vain + 1
                if tried_in_vain >= len(cuts):
                    break
        return helped

    def _rotate(self, begin: int, end: int) -> bool:
        """Deal out anew the parts from stage `begin` to before `end`, counted from 0, if it helps.

        Whole paths are dealt out to data nodes, including those with room for more.
        """
        paths = self._paths
        cost = self._costs.get
        no_link = self._no_link
        whole = (begin, end) == (0, len(paths[0]))
        spare = self._spare_owners() if whole else []
        owners = [*self._owners, *spare]
        upstreams = [path[begin - 1] for path in paths] if begin else owners
        downstreams = [path[end] for path in paths] if end < len(paths[0]) else owners
        parts = [path[begin:end] for path in paths]
        ends = [(part[0], part[-1]) for part in parts]
        weights: list[list[float]] = []
        for i, (before, behind) in enumerate(zip(upstreams, downstreams, strict=True)):
            row = [
                cost((before, head), no_link) + cost((tail, behind), no_link) for head, tail in ends
            ]
            row += [0.0] * len(spare)
            now = row[i]
            weights.append([weight - now for weight in row])
        self._work_left -= len(weights) * len(weights)
        cycle = negative_cycle(weights, slack=_SAVES)
        for taker, giver in pairwise([*cycle, *cycle[:1]]):
            if not whole:
                paths[taker][begin:end] = parts[giver]
            elif giver < len(paths):
                self._loads[self._owners[giver]] -= 1
                self._owners[giver] = owners[taker]
                self._loads[owners[taker]] += 1
        return bool(cycle)

    def _spare_owners(self) -> list[NodeId]:
        """Return each data node once per further path that it could own and use."""
        num = len(self._paths)
        return [
            owner
            for owner, load in self._loads.items()
            for _ in range(min(num, self._capacities[owner] - load))
        ]

    def _ends(self, owner: NodeId, head: NodeId, tail: NodeId) -> float:
        cost = self._costs.get
        return cost((owner, head), math.inf) + cost((tail, owner), math.inf)

    def _choose_owners(self) -> None:
        """Give each path the nearest data node that has room. The dearest path comes first."""
        order = sorted(
            range(len(self._paths)),
            key=lambda i: (-self._ends(self._owners[i], self._paths[i][0], self._paths[i][-1]), i),
        )
        for i in order:
            path = self._paths[i]
            self._loads[self._owners[i]] -= 1
            # Some data node has room, because the paths fit into the total capacity.
            free = [k for k, load in self._loads.items() if load < self._capacities[k]]
            self._owners[i] = min(free, key=lambda k: (self._ends(k, path[0], path[-1]), k))
            self._loads[self._owners[i]] += 1

    def _consider(
        self, queue: list[tuple[float, int, int, int, int, _Better]], i: int, j: int
    ) -> None:
        if self._work_left <= 0:
            return
        self._work_left -= len(self._paths[i])
        better = self._best(i, j)
        if better is not None:
            versions = (self._versions[i], self._versions[j])
            heapq.heappush(queue, (-better.saving, i, j, *versions, better))

    def _best(self, i: int, j: int) -> _Better | None:
        """Return the best crossings of two paths, or None if nothing beats the present state."""
        first = self._paths[i]
        second = self._paths[j]
        both = self._price_of_both(i, j)
        owner = self._owners[i]
        other = self._owners[j]
        now = both((owner, first[0]), (other, second[0]))
        now += both((first[-1], owner), (second[-1], other))
        straight = 0.0
        crossed = math.inf
        choices: list[tuple[bool, bool]] = []
        for a, a_next, b, b_next in zip(first, first[1:], second, second[1:], strict=False):
            keep = both((a, a_next), (b, b_next))
            cross = both((a, b_next), (b, a_next))
            now += keep
            to_straight = (straight + keep, False), (crossed + cross, True)
            to_crossed = (crossed + keep, False), (straight + cross, True)
            (straight, from_straight), (crossed, from_crossed) = min(to_straight), min(to_crossed)
            choices.append((from_straight, from_crossed))
        best: tuple[float, bool, tuple[NodeId, NodeId]] | None = None
        for inner, exchanged in ((straight, False), (crossed, True)):
            if inner >= now:
                continue
            tails = (second[-1], first[-1]) if exchanged else (first[-1], second[-1])
            found = self._owners_for((i, j), (first[0], tails[0]), (second[0], tails[1]), both)
            if found is not None and (best is None or inner + found[0] < best[0]):
                best = (inner + found[0], exchanged, found[1])
        if best is None or not best[0] < now - _SAVES:
            return None
        state = best[1]
        states = [best[1]]
        for from_straight, from_crossed in reversed(choices):
            changed = from_crossed if state else from_straight
            state = state != changed
            states.append(state)
        return _Better(now - best[0], tuple(reversed(states)), best[2])

    def _owners_for(
        self,
        pair: tuple[int, int],
        first: tuple[NodeId, NodeId],
        second: tuple[NodeId, NodeId],
        both: Callable[[Link, Link], float],
    ) -> tuple[float, tuple[NodeId, NodeId]] | None:
        """Return the cheapest data nodes with room for a pair of paths with these ends."""
        left = {k: self._capacities[k] - load for k, load in self._loads.items()}
        for i in pair:
            left[self._owners[i]] += 1
        nearest = [
            sorted((self._ends(k, *ends), k) for k, room in left.items() if room > 0)[:2]
            for ends in (first, second)
        ]
        best: tuple[float, tuple[NodeId, NodeId]] | None = None
        for _, owner_a in nearest[0]:
            for _, owner_b in nearest[1]:
                if owner_a == owner_b and left[owner_a] < 2:
                    continue
                cost = both((owner_a, first[0]), (owner_b, second[0]))
                cost += both((first[1], owner_a), (second[1], owner_b))
                if best is None or cost < best[0]:
                    best = (cost, (owner_a, owner_b))
        return best

    def _price_of_both(self, i: int, j: int) -> Callable[[Link, Link], float]:
        """Return the cost function of two links of a pair, given the uses by other paths."""
        cost = self._costs.get
        power = self._crowding
        if power == 1:
            return lambda a, b: cost(a, math.inf) + cost(b, math.inf)
        own = Counter((*self._hops(i), *self._hops(j)))

        def both(a: Link, b: Link) -> float:
            if a == b:
                return price(a, 2)
            return price(a, 1) + price(b, 1)

        def price(link: Link, more: int) -> float:
            others = self._uses[link] - own[link]
            return cost(link, math.inf) * (float(others + more) ** power - float(others) ** power)

        return both

    def _take(self, i: int, j: int, better: _Better) -> bool:
        """Carry out an improvement, unless its data nodes have filled up since."""
        loads = dict(self._loads)
        for old, new in zip((self._owners[i], self._owners[j]), better.owners, strict=True):
            loads[old] -= 1
            loads[new] += 1
        if any(load > self._capacities[k] for k, load in loads.items()):
            return False
        if self._crowding > 1:
            self._uses.subtract((*self._hops(i), *self._hops(j)))
        self._loads = loads
        self._owners[i], self._owners[j] = better.owners
        first = self._paths[i]
        second = self._paths[j]
        for stage, crossed in enumerate(better.crossed):
            if crossed:
                first[stage], second[stage] = second[stage], first[stage]
        if self._crowding > 1:
            self._uses.update((*self._hops(i), *self._hops(j)))
        self._versions[i] += 1
        self._versions[j] += 1
        return True


def _usable(paths: Sequence[DraftPath], capacities: Mapping[NodeId, int]) -> list[DraftPath]:
    """Return the paths that can be settled: of one length, and within the total capacity."""
    known = [path for path in paths if path.source in capacities and path.relays]
    whole = [path for path in known if len(path.relays) == len(known[0].relays)]
    return whole[: sum(capacity for capacity in capacities.values() if capacity > 0)]
