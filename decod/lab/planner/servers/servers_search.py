"""decod's planner for the servers organisation: many starts, then a search on the true time.

The starts are the paper's layout for several numbers of stages, and simple layouts that share power
out evenly. Each is improved by a short annealing with the moves of `moves`. The best ones are
improved by longer annealings. The whole search is limited by a number of evaluations, so that its
answer depends on the seed and not on the machine.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from decod.lab.planner.hosts import HostKind, TrainingProblem
from decod.lab.planner.servers.layers import layers_by_power
from decod.lab.planner.servers.moves import Arrangement, Mover, arranged, with_clients, with_server
from decod.lab.planner.servers.objective import LayoutClock
from decod.lab.planner.servers.paper_planner import PaperHeuristic
from decod.lab.planner.servers.servers_layout import Draft, DraftStage, ServersLayout, to_layout

EVALUATIONS_DEFAULT = 30_000
"""Number of layouts that the planner looks at. Twice as many rarely find a better layout."""

_NUM_STARTS = (4, 24)
_HOSTS_AND_STARTS = 600
"""Starts times hosts, within the limits above. Many hosts need a longer search from each start."""
_NUM_FINALISTS = 2
_SCOUTING_RATIO = 0.4
"""Part of the evaluations that decides which starts are worth a longer search. The number of
stages stays the same meanwhile, so that every number is tried."""
_DESCENTS_PART = 4
"""One in so many evaluations goes to descents from random starts, which tell whether all starts are
in the wrong place."""
_PATIENCE_PER_HOST = 20
_WARM = 0.02
_COLD = 0.0002
"""First and last temperature of an annealing, relative to the time of an iteration."""
_DRAWS_MAX = 1000
"""Moves that may come to nothing in a row."""
_TRIES_MAX = 200
"""Random starts that may fail before the search gives up."""


@dataclass(slots=True)
class _Found:
    """The best arrangement of a search."""

    best: Arrangement
    time_s: float
    score: float = field(default=math.inf)


def plan_layout(
    problem: TrainingProblem,
    rng: random.Random,
    *,
    num_stages: int | None = None,
    evaluations: int = EVALUATIONS_DEFAULT,
) -> ServersLayout | None:
    """Return the best layout that decod's planner finds.

    Args:
        problem: Hosts, links and work.
        rng: Source of the search's draws.
        num_stages: Look at layouts with so many stages only.
        evaluations: About the number of layouts to look at.

    Returns:
        None if no layout is possible: too few hosts for the stages, or too little memory.
    """
    search = _Search(problem, rng, num_stages)
    starts = search.starts()
    if not starts:
        return None
    scouting = int(evaluations * _SCOUTING_RATIO) // len(starts)
    found = [search.anneal(start, scouting, fixed=True) for start in starts]
    found.append(search.descend_often(evaluations // _DESCENTS_PART) or found[0])
    unique = {one.best.stages: one for one in found}
    finalists = sorted(unique.values(), key=lambda one: one.score)[:_NUM_FINALISTS]
    left = evaluations - scouting * len(starts) - evaluations // _DESCENTS_PART
    left //= 2 * len(finalists)
    finalists = [search.anneal(one.best, left) for one in finalists]
    # The best one gets as much again as all finalists together, at a lower temperature.
    best = min(finalists, key=lambda one: one.score)
    for part in (0.5, 0.1):
        last = search.anneal(best.best, left * len(finalists) // 2, warm=_WARM * part)
        best = min(best, last, key=lambda one: one.score)
    return search.answer(best)


def local_layout(
    problem: TrainingProblem,
    rng: random.Random,
    *,
    num_stages: int | None = None,
    evaluations: int = EVALUATIONS_DEFAULT,
) -> ServersLayout | None:
    """Return a layout by plain local search from a random start: for comparison.

    A move that shortens the iteration is kept. When moves fail, the search begins again elsewhere.
    See `plan_layout` for the arguments.
    """
    search = _Search(problem, rng, num_stages)
    found = search.descend_often(evaluations)
    return None if found is None else search.answer(found)


def without_unused(clock: LayoutClock, draft: Draft) -> Draft:
    """Return a layout without the clients that get no microbatch. Its time is the same."""
    used = [{host for host, _ in clock.stages.time(stage).shares} for stage in draft]
    return tuple(
        with_clients(stage, drop=[client for client in stage.clients if client not in active])
        for stage, active in zip(draft, used, strict=True)
    )


class _Search:
    def __init__(
        self, problem: TrainingProblem, rng: random.Random, num_stages: int | None
    ) -> None:
        self._problem = problem
        self._rng = rng
        self._num_stages = num_stages
        self._clock = LayoutClock(problem)
        self._fixed = Mover(rng, num_stages_open=False)
        self._open = Mover(rng, num_stages_open=num_stages is None)
        self._reliable = problem.indexes(HostKind.RELIABLE)
        self._unreliable = problem.indexes(HostKind.UNRELIABLE)
        self._speed = [host.speed_layers_per_s for host in problem.hosts]
        self._limit = [
            math.inf if host.num_layers_max is None else host.num_layers_max
            for host in problem.hosts
        ]

    def answer(self, found: _Found) -> ServersLayout | None:
        """Return what was found, without clients that have nothing to do. None if impossible."""
        if found.time_s == math.inf:
            return None
        draft = without_unused(self._clock, found.best.stages)
        return to_layout(self._problem, draft)

    # --- starts -------------------------------------------------------------------------------

    def starts(self) -> list[Arrangement]:
        """Return possible layouts with different numbers of stages, none twice."""
        heuristic = PaperHeuristic(self._problem, self._rng)
        drafts: list[Draft | None] = []
        if self._num_stages is None:
            drafts.append(heuristic.draft())
        for number in self._numbers():
            drafts.append(heuristic.draft(number))
            drafts += self._simple(number)
        unique = dict.fromkeys(draft for draft in drafts if draft is not None)
        possible = [draft for draft in unique if self._clock.time_s(draft) < math.inf]
        possible.sort(key=self._clock.score)
        least, most = _NUM_STARTS
        num_starts = min(max(_HOSTS_AND_STARTS // len(self._problem.hosts), least), most)
        return [arranged(self._problem, draft) for draft in possible[:num_starts]]

    def _numbers(self) -> list[int]:
        """Return the numbers of stages to try: all small ones, and then ever fewer."""
        most = min(len(self._reliable), self._problem.work.num_layers)
        if self._num_stages is not None:
            return [self._num_stages] if self._num_stages <= most else []
        numbers, number = [], 1
        while number <= most:
            numbers.append(number)
            number += max(1, number // 6)
        return numbers

    def _simple(self, number: int) -> list[Draft | None]:
        """Return stages of about the same power, whatever the links between them.

        In the first, all reliable hosts are servers. In the others, every stage has one: a host
        that computes fast, or that sends fast.
        """
        hosts = self._problem.hosts

        def power(host: int) -> float:
            return self._speed[host]

        def access(host: int) -> float:
            return min(hosts[host].uplink_bytes_per_s, hosts[host].downlink_bytes_per_s)

        fast = sorted(self._reliable, key=power, reverse=True)
        near = sorted(self._reliable, key=access, reverse=True)
        clients = sorted(self._unreliable, key=power, reverse=True)
        return [
            self._make(servers, clients, number) for servers in (fast, near[:number], fast[:number])
        ]

    def random_start(self) -> Arrangement | None:
        """Return a random layout, or None if it is impossible."""
        most = min(len(self._reliable), self._problem.work.num_layers)
        number = self._num_stages or self._rng.randint(1, most)
        if number > most:
            return None
        servers = self._rng.sample(self._reliable, len(self._reliable))
        clients = self._rng.sample(self._unreliable, len(self._unreliable))
        draft = self._make(servers, clients, number)
        if draft is None or self._clock.time_s(draft) == math.inf:
            return None
        return arranged(self._problem, draft)

    def _make(self, servers: Sequence[int], clients: Sequence[int], number: int) -> Draft | None:
        """Deal servers to the stages in turns, and each client to the stage of the least power."""
        stages = [DraftStage(1, (host,), (host,)) for host in servers[:number]]
        for place, host in enumerate(servers[number:]):
            stage = stages[place % number]
            frontal = len(stage.frontal) <= len(stage.backward) and len(stage.servers) > 1
            stages[place % number] = with_server(stage, host, frontal=frontal)
        powers = [sum(self._speed[host] for host in stage.servers) for stage in stages]
        for client in clients:
            if self._speed[client] > 0:
                weakest = powers.index(min(powers))
                stages[weakest] = with_clients(stages[weakest], add=(client,))
                powers[weakest] += self._speed[client]
        limits = [min(self._limit[host] for host in stage.servers) for stage in stages]
        layers = layers_by_power(powers, self._problem.work.num_layers, limits)
        if layers is None:
            return None
        return tuple(
            DraftStage(count, stage.frontal, stage.backward, stage.clients)
            for count, stage in zip(layers, stages, strict=True)
        )

    # --- improvement --------------------------------------------------------------------------

    def anneal(
        self,
        start: Arrangement,
        evaluations: int,
        *,
        warm: float = _WARM,
        fixed: bool = False,
    ) -> _Found:
        """Return the best arrangement that an annealing finds.

        Args:
            start: Where it begins.
            evaluations: Number of layouts to look at.
            warm: First temperature.
            fixed: Keep the number of stages.
        """
        mover = self._fixed if fixed else self._open
        now, score = start, self._clock.score(start.stages)
        found = _Found(start, self._clock.time_s(start.stages), score)
        if evaluations <= 0:
            return found
        busy = self._busiest(now)
        factor = (_COLD / warm) ** (1 / evaluations)
        warmth = warm
        for _ in range(evaluations):
            warmth *= factor
            proposed = self._propose(mover, now, busy)
            if proposed is None:
                break
            new = self._clock.score(proposed.stages)
            worse = (new - score) / score
            if worse <= 0 or (
                worse < 10 * warmth and self._rng.random() < math.exp(-worse / warmth)
            ):
                now, score = proposed, new
                busy = self._busiest(now)
                if score < found.score:
                    found.best, found.score = now, score
        found.time_s = self._clock.time_s(found.best.stages)
        return found

    def descend_often(self, evaluations: int) -> _Found | None:
        """Return the best end of descents from random starts. None if there is no possible start.

        A descent ends when about as many moves in a row have failed as a layout has neighbours.
        """
        best: _Found | None = None
        patience = _PATIENCE_PER_HOST * len(self._problem.hosts)
        failures = 0
        while evaluations > 0 and failures < _TRIES_MAX:
            start = self.random_start()
            if start is None:
                failures += 1
                continue
            found, used = self._descend(start, evaluations, patience)
            evaluations -= used
            if best is None or found.score < best.score:
                best = found
        return best

    def _descend(self, start: Arrangement, evaluations: int, patience: int) -> tuple[_Found, int]:
        """Return the end of a descent from a start, and the number of evaluations."""
        now, score = start, self._clock.score(start.stages)
        busy = self._busiest(now)
        vain = used = 0
        while vain < patience and used < evaluations:
            used += 1
            vain += 1
            proposed = self._propose(self._open, now, busy)
            if proposed is None:
                break
            new = self._clock.score(proposed.stages)
            if new < score:
                now, score, vain = proposed, new, 0
                busy = self._busiest(now)
        return _Found(now, self._clock.time_s(now.stages), score), used

    def _propose(self, mover: Mover, now: Arrangement, busy: int) -> Arrangement | None:
        """Return a changed arrangement. None if there is hardly any."""
        for _ in range(_DRAWS_MAX):
            proposed = mover.propose(now, busy)
            if proposed is not None:
                return proposed
        return None

    def _busiest(self, arrangement: Arrangement) -> int:
        """Return the index of the stage with the most work."""
        times = [self._clock.stages.time(stage) for stage in arrangement.stages]
        return max(range(len(times)), key=lambda i: times[i].late_s + times[i].aggregation_s)
