"""The best layout of a few hosts, by trying all and pruning.

Stages are chosen one after another, from the embedding to the head. A partial layout is given up
when its bound reaches the best time known. The bound is what its stages take already, or what the
layers that are left take at all hosts that are left, whichever is longer.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from decod.lab.planner.hosts import HostKind, TrainingProblem
from decod.lab.planner.servers.objective import LayoutClock, PartTime
from decod.lab.planner.servers.servers_layout import (
    Draft,
    DraftStage,
    ServersLayout,
    to_draft,
    to_layout,
)
from decod.lab.planner.servers.servers_search import plan_layout, without_unused

NUM_RELIABLE_MAX = 5
NUM_UNRELIABLE_MAX = 4
NUM_LAYERS_MAX = 16
"""With more of any of them, the search takes minutes or hours."""

_FIRST_EVALUATIONS = 500
"""Length of the search for a first layout. A better one prunes more, and takes longer to find."""
_SAME = 1 - 1e-9
"""Ratio from which on a time counts as shorter."""


def is_small(problem: TrainingProblem) -> bool:
    """Return whether a problem is small enough for `exact_layout`."""
    return (
        len(problem.indexes(HostKind.RELIABLE)) <= NUM_RELIABLE_MAX
        and len(problem.indexes(HostKind.UNRELIABLE)) <= NUM_UNRELIABLE_MAX
        and problem.work.num_layers <= NUM_LAYERS_MAX
    )


def exact_layout(
    problem: TrainingProblem, *, num_stages: int | None = None
) -> ServersLayout | None:
    """Return a layout with the shortest iteration. None if no layout is possible.

    Args:
        problem: Hosts, links and work. See `is_small`.
        num_stages: Look at layouts with so many stages only.
    """
    assert is_small(problem), "the search would not end"
    rng = random.Random(0)  # noqa: S311 - only how fast the answer is found depends on it.
    first = plan_layout(problem, rng, num_stages=num_stages, evaluations=_FIRST_EVALUATIONS)
    search = _Search(problem, num_stages, None if first is None else to_draft(problem, first))
    best = search.run()
    return None if best is None else to_layout(problem, best)


class _Search:
    def __init__(
        self, problem: TrainingProblem, num_stages: int | None, first: Draft | None
    ) -> None:
        self._problem = problem
        self._num_stages = num_stages
        self._clock = LayoutClock(problem)
        self._best = first
        self._least_s = math.inf if first is None else self._clock.time_s(first)
        self._speed = [host.speed_layers_per_s for host in problem.hosts]
        self._servers: dict[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}

    def run(self) -> Draft | None:
        reliable = tuple(self._problem.indexes(HostKind.RELIABLE))
        unreliable = tuple(self._problem.indexes(HostKind.UNRELIABLE))
        self._extend((), self._clock.start, reliable, unreliable)
        return None if self._best is None else without_unused(self._clock, self._best)

    def _extend(
        self,
        chosen: Draft,
        part: PartTime,
        reliable: tuple[int, ...],
        unreliable: tuple[int, ...],
    ) -> None:
        """Try all ways to go on from the stages chosen so far, the most promising first."""
        left = self._problem.work.num_layers - sum(stage.num_layers for stage in chosen)
        if left == 0:
            self._finish(chosen)
            return
        if self._num_stages is not None and len(chosen) == self._num_stages:
            return
        options = []
        begins = chosen[-1].backward if chosen else self._clock.data_nodes
        for stage in self._options(left, len(chosen), reliable, unreliable):
            longer = self._clock.add(part, begins, stage)
            bound = self._bound(longer, left - stage.num_layers, stage, reliable + unreliable)
            if bound < self._least_s * _SAME:
                options.append((bound, stage.num_layers, stage, longer))
        options.sort(key=lambda option: option[:2])
        for bound, _, stage, longer in options:
            if bound >= self._least_s * _SAME:
                return
            used = {*stage.servers, *stage.clients}
            self._extend(
                (*chosen, stage),
                longer,
                tuple(host for host in reliable if host not in used),
                tuple(host for host in unreliable if host not in used),
            )

    def _finish(self, chosen: Draft) -> None:
        if self._num_stages not in {None, len(chosen)}:
            return
        time_s = self._clock.time_s(chosen)
        if time_s < self._least_s * _SAME:
            self._best, self._least_s = chosen, time_s

    def _options(
        self, left: int, num_chosen: int, reliable: Sequence[int], unreliable: Sequence[int]
    ) -> Iterator[DraftStage]:
        """Yield all possible next stages."""
        last = self._num_stages is not None and num_chosen + 1 == self._num_stages
        counts = (left,) if last else range(1, left + 1)
        able = [client for client in unreliable if self._speed[client] > 0]
        for size in range(1, len(reliable) + 1):
            for servers in itertools.combinations(reliable, size):
                for frontal, backward in self._duties(servers):
                    for clients in _subsets(able):
                        for count in counts:
                            yield DraftStage(count, frontal, backward, clients)

    def _duties(self, servers: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return all ways to share the two duties, in every order."""
        if len(servers) == 1:
            return [(servers, servers)]
        found = self._servers.get(servers)
        if found is None:
            found = self._servers[servers] = [
                (order[:cut], order[cut:])
                for order in itertools.permutations(servers)
                for cut in range(1, len(servers))
            ]
        return found

    def _bound(self, part: PartTime, left: int, stage: DraftStage, hosts: tuple[int, ...]) -> float:
        """Return a time that no layout with these first stages is shorter than."""
        if left:
            used = {*stage.servers, *stage.clients}
            power = sum(self._speed[host] for host in hosts if host not in used)
            if not power:
                return math.inf
            late_s = part.way_s + self._problem.work.num_microbatches * left / power
            part = part._replace(late_s=max(part.late_s, late_s))
        return self._clock.total_s(part)


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(len(items) + 1):
        yield from itertools.combinations(items, size)
