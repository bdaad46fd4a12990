"""Which stage each host serves in the pipeline, and how many layers it has: short iterations.

A search begins with stages of equal power, of all hosts or of those with the fastest access, and
with stages of hosts that are near to each other.
Small changes follow: a host moves to another stage, two hosts swap stages, a host becomes idle, or
an idle host works. If the cut is not given, the layers are dealt out anew each time, so that the
slowest stage is done first. Links and the way of a microbatch count, too, so layers also move from
one stage to another. A change stays if the prediction is hardly worse, and in the end only if it is
no worse. Every number of stages is tried for a short time, and the best two for longer.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decod.lab.planner.hosts import HostKind
from decod.lab.planner.organisations.pipeline_time import PipelineClock, StageHosts, TimeOfPasses

SCORES_DEFAULT = 4000
"""Number of arrangements that a search looks at."""
_NUM_STAGES_MAX = 12
"""Numbers of stages that are tried. If there are more, they are spread out."""
_ROUNDS = (0.5, 0.25, 0.25)
"""Parts of the search. After each, the better half of the numbers of stages is left."""
_RECUT_RATIO = 0.2
_REORDER_RATIO = 0.1
_WORSE_RATIO = 0.4

Score = Callable[[PipelineClock, TimeOfPasses], float]
"""What is minimised, with a weight of averages that fits how often they are."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The relays of each stage, and the time of the passes."""

    stages: StageHosts
    time: TimeOfPasses
    score: float


def plan_stages(
    clock: PipelineClock,
    rng: random.Random,
    score: Score,
    *,
    num_stages: int | None = None,
    scores: int = SCORES_DEFAULT,
) -> StagePlan | None:
    """Return the best stages of hosts that the search finds.

    Args:
        clock: Times of stages.
        rng: Source of the draws.
        score: Seconds of an iteration; lower is better.
        num_stages: Look at so many stages only.
        scores: Number of arrangements to look at.

    Returns:
        None if the hosts cannot hold the model.
    """
    search = _Search(clock, rng, score)
    cut = clock.problem.run.cut
    num_stages = len(cut) if cut else num_stages
    numbers = [num_stages] if num_stages is not None else _numbers(clock)
    plans = [plan for number in numbers if (plan := search.start(number)) is not None]
    for share in _ROUNDS:
        budget = int(scores * share) // max(1, len(plans))
        climbed = [search.climb(plan, budget) for plan in plans]
        climbed.sort(key=lambda plan: plan.score)
        plans = climbed[: -(-len(climbed) // 2)]
    return plans[0] if plans else None


class _Search:
    """Looks for better plans.

    Args:
        clock: Times of stages.
        rng: Source of the draws.
        score: See `plan_stages`.
    """

    def __init__(self, clock: PipelineClock, rng: random.Random, score: Score) -> None:
        self._clock, self._rng, self._score = clock, rng, score
        self._cut = clock.problem.run.cut
        self._relays = _relays(clock)

    def start(self, number: int) -> StagePlan | None:
        """Return the best plan to begin with; None if none is possible."""
        arranged = _starts(self._clock, self._relays, number)
        plans = [plan for stages in arranged for plan in self._planned(stages)]
        best = min(plans, key=lambda plan: plan.score, default=None)
        return best if best is not None and best.score < math.inf else None

    def climb(self, plan: StagePlan, budget: int) -> StagePlan:
        """Return the best plan that changes of a given one have led to, without unused hosts."""
        best = plan
        for done in range(budget):
            # At first, a step may be a little worse: it can lead to a better plan.
            worst = plan.score * (1 + _WORSE_RATIO * (1 - done / budget))
            other = min(self._changed(plan), key=lambda each: each.score, default=plan)
            if other.score <= worst:
                plan = other
            if plan.score < best.score:
                best = plan
            if done == budget // 2:
                plan = best
        used = tuple(tuple(sorted(share)) for share in best.time.shares)
        return StagePlan(used, best.time, best.score)

    def _changed(self, plan: StagePlan) -> list[StagePlan]:
        """Return plans that differ a little from a given one."""
        kind = self._rng.random()
        if not self._cut and kind < _RECUT_RATIO:
            layers = _recut(self._rng, plan.time.layers)
            return [] if layers is None else [self._scored(plan.stages, layers)]
        if not self._cut and kind < _RECUT_RATIO + _REORDER_RATIO and len(plan.stages) > 1:
            order = _reordered(self._rng, len(plan.stages))
            reordered = tuple(plan.stages[k] for k in order)
            return [self._scored(reordered, tuple(plan.time.layers[k] for k in order))]
        stages = _changed(self._rng, plan.stages, self._relays)
        return [] if stages is None else self._planned(stages, plan.time.layers)

    def _planned(self, stages: StageHosts, before: tuple[int, ...] = ()) -> list[StagePlan]:
        """Return plans with the given hosts: with the given cut, or with the likely ones.

        Args:
            stages: The hosts.
            before: The cut of a plan that differs a little. None: there is none.
        """
        if self._cut:
            return [self._scored(stages, self._cut)]
        cuts = {self._clock.layers(len(stages)), self._clock.fitted_layers(stages), before}
        return [self._scored(stages, layers) for layers in sorted(cuts) if layers]

    def _scored(self, stages: StageHosts, layers: tuple[int, ...]) -> StagePlan:
        time = self._clock.passes(stages, layers)
        value = self._score(self._clock, time) if time.total_s < math.inf else math.inf
        return StagePlan(stages, time, value)


def _recut(rng: random.Random, layers: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return a cut in which a layer has moved to another stage; None if there is none."""
    givers = [k for k, num in enumerate(layers) if num > 1]
    if not givers or len(layers) == 1:
        return None
    giver = rng.choice(givers)
    taker = rng.choice([k for k in range(len(layers)) if k != giver])
    moved = list(layers)
    moved[giver] -= 1
    moved[taker] += 1
    return tuple(moved)


def _reordered(rng: random.Random, num: int) -> list[int]:
    """Return numbers from 0 in another order: all backwards, or two exchanged."""
    order = [*range(num)]
    if rng.random() < 0.5:
        return order[::-1]
    k, m = rng.sample(order, 2)
    order[k], order[m] = order[m], order[k]
    return order


def _numbers(clock: PipelineClock) -> list[int]:
    """Return the numbers of stages to try."""
    problem = clock.problem
    able = sum(host.speed_layers_per_s > 0 for host in problem.hosts)
    most = min(problem.run.num_layers, able)
    possible = [
        number
        for number in range(1, most + 1)
        if any(clock.room(host, 1) >= 1 for host in range(len(problem.hosts)))
    ]
    if len(possible) <= _NUM_STAGES_MAX:
        return possible
    # Close together where there are few, where one more makes the most difference.
    least, ratio = possible[0], possible[-1] / possible[0]
    wanted = {
        round(least * ratio ** (index / (_NUM_STAGES_MAX - 1))) for index in range(_NUM_STAGES_MAX)
    }
    return sorted(wanted & {*possible})


def _relays(clock: PipelineClock) -> list[int]:
    hosts = clock.problem.hosts
    able = [
        index
        for index, host in enumerate(hosts)
        if host.kind != HostKind.DATA and host.speed_layers_per_s > 0
    ]
    return sorted(able, key=lambda index: (-hosts[index].speed_layers_per_s, index))


def _starts(clock: PipelineClock, relays: Sequence[int], number: int) -> list[StageHosts]:
    """Return arrangements to begin with: equal power, and near hosts together."""
    layers = clock.layers(number)
    if len(relays) < number:
        return []
    hosts = clock.problem.hosts

    def fill(order: Sequence[int]) -> StageHosts:
        """Give each host to the stage with the least power for its layers."""
        stages: list[list[int]] = [[] for _ in layers]
        power = [0.0] * number
        for host in order:
            fit = [k for k in range(number) if clock.room(host, layers[k]) >= 1]
            if fit:
                stage = min(fit, key=lambda k: (power[k] / layers[k], k))
                stages[stage].append(host)
                power[stage] += hosts[host].speed_layers_per_s
        return tuple(map(tuple, stages))

    by_room = sorted(relays, key=lambda host: clock.room(host, layers[0]) >= 1)
    found = [fill(relays), fill(by_room), _near(clock, relays, number)]
    # Where layers are dealt out by the hosts, any of these can hold some.
    found.append(tuple(tuple(relays[k::number]) for k in range(number)))

    def access(index: int) -> float:
        return min(hosts[index].uplink_bytes_per_s, hosts[index].downlink_bytes_per_s)

    # Few hosts with fast links average faster than many.
    able = [host for host in relays if clock.room(host, layers[-1]) >= 1]
    by_access = sorted(able, key=lambda host: (-access(host), host))
    size = number
    while size < len(by_access):
        found.append(fill(sorted(by_access[:size], key=relays.index)))
        size *= 2
    return found


def _near(clock: PipelineClock, relays: Sequence[int], number: int) -> StageHosts:
    """Return stages of hosts that follow each other on a short way through all hosts."""
    latencies = clock.problem.base.latencies_s
    left, now, order = list(relays), clock.data_nodes[0], list[int]()
    while left:
        now = min(left, key=lambda host: (latencies[now][host], host))
        left.remove(now)
        order.append(now)
    hosts = clock.problem.hosts
    total = sum(hosts[host].speed_layers_per_s for host in order)
    stages: list[list[int]] = [[] for _ in range(number)]
    done = 0.0
    for position, host in enumerate(order):
        index = min(number - 1, int(done / total * number))
        # No stage may stay empty.
        index = max(index, number - (len(order) - position))
        stages[index].append(host)
        done += hosts[host].speed_layers_per_s
    return tuple(map(tuple, stages))


def _changed(rng: random.Random, stages: StageHosts, relays: Sequence[int]) -> StageHosts | None:
    """Return the stages after a random change; None if it isn't possible."""
    parts = [list(stage) for stage in stages]
    used = {host for stage in stages for host in stage}
    idle = [host for host in relays if host not in used]
    places = [(k, i) for k, stage in enumerate(parts) for i in range(len(stage))]
    kind = rng.random()
    if kind < 0.15 and idle:
        parts[rng.randrange(len(parts))].append(rng.choice(idle))
    elif kind < 0.3 and idle:
        k, i = rng.choice(places)
        parts[k][i] = rng.choice(idle)
    elif kind < 0.6 and len(parts) > 1:
        (k, i), (m, j) = rng.choice(places), rng.choice(places)
        if k == m:
            return None
        parts[k][i], parts[m][j] = parts[m][j], parts[k][i]
    elif kind < 0.8 and len(parts) > 1:
        k, i = rng.choice(places)
        if len(parts[k]) == 1:
            return None
        target = rng.randrange(len(parts))
        parts[target].append(parts[k].pop(i))
    elif kind < 0.85 and len(parts) > 2:
        k, m = rng.randrange(len(parts)), rng.randrange(len(parts))
        parts[k], parts[m] = parts[m], parts[k]
    else:
        k, i = rng.choice(places)
        if len(parts[k]) == 1:
            return None
        parts[k].pop(i)
    return tuple(map(tuple, parts))
