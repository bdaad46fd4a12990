"""DAPPLE's planner: cuts a model and places the stages, so that a batch ends as early as possible.

A dynamic program over the number of layers that have a place and the devices that are taken. A
state always stands for a whole pipeline: the stages placed so far, and one last stage with all
other layers on all other devices. A state is left by placing one more stage, with any number of
layers and devices. Which devices these are is up to three policies:

- fresh first: on machines that no stage uses yet, so that a stage's devices are close;
- append first: on machines that are used already, which leaves fewer gaps;
- scatter first: evenly over all machines.

The value of a pipeline is DAPPLE's estimate of a batch: a warm-up phase, a steady phase and an
ending phase. Transfers count as stages of their own. The pivot is the stage that is busy all the
time between.

A stage splits every microbatch evenly over its devices.

Deviations:

- Devices differ: a stage is as slow as its slowest one. With equal devices that is the published
  estimate.
- Stages hold no more layers than fit into each of their devices.
- Of the states with equally many stages, only the best `beam` are continued. What cannot become
  better than the best pipeline so far is left out.

Source: DAPPLE (arXiv:2007.01045), sections III and IV; its planner HPGO (`orchestrate_sync.rs`,
`split_concat.rs`).
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from decod.lab.planner.pipelines import (
    Pipeline,
    PipelineProblem,
    PlannedStage,
    all_reduce_s,
    pieces,
)

BEAM = 200
"""States that are continued, of those with equally many stages."""

_PATIENCE = 2
"""How many more stages are tried without finding a better pipeline."""


@dataclass(slots=True)
class _Costs:
    """Times of stages and transfers that were computed before."""

    problem: PipelineProblem
    averages_s: dict[tuple[int, ...], float] = field(default_factory=dict)
    """By devices, for one layer."""
    links_s: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, float]] = field(
        default_factory=dict
    )

    def average_s(self, stage: PlannedStage) -> float:
        found = self.averages_s.get(stage.devices)
        if found is None:
            found = all_reduce_s(self.problem, stage.devices, self.problem.layer_bytes)
            self.averages_s[stage.devices] = found
        return found * stage.num_layers

    def link_s(self, one: PlannedStage, other: PlannedStage) -> tuple[float, float]:
        """Return the time of an activation, and that of a gradient."""
        key = (one.devices, other.devices)
        found = self.links_s.get(key)
        if found is None:
            found = self._measure(*key)
            self.links_s[key] = found
        return found

    def _measure(self, one: tuple[int, ...], other: tuple[int, ...]) -> tuple[float, float]:
        forward_s = backward_s = 0.0
        for sender, receiver, share in pieces(len(one), len(other)):
            num_bytes = share * self.problem.activation_bytes
            a, b = one[sender], other[receiver]
            forward_s = max(forward_s, self.problem.transfer_s(a, b, num_bytes))
            backward_s = max(backward_s, self.problem.transfer_s(b, a, num_bytes))
        return forward_s, backward_s


@dataclass(frozen=True, slots=True)
class _State:
    """Stages that have a place, and the devices that are left."""

    stages: Pipeline
    num_layers: int
    """Of these stages."""
    left: frozenset[int]


def latency_s(problem: PipelineProblem, pipeline: Pipeline) -> float:
    """Return DAPPLE's estimate of a batch's time, whether or not the stages fit into memory."""
    return _latency_s(_Costs(problem), pipeline)


def _latency_s(costs: _Costs, pipeline: Pipeline) -> float:
    problem = costs.problem
    forward_s: list[float] = []
    backward_s: list[float] = []
    averages_s: list[float] = []
    for index, stage in enumerate(pipeline):
        if index:
            there_s, back_s = costs.link_s(pipeline[index - 1], stage)
            forward_s.append(there_s)
            backward_s.append(back_s)
            averages_s.append(0.0)
        share = stage.num_layers / len(stage.devices)
        forward_s.append(share * max(problem.forward_s[device] for device in stage.devices))
        backward_s.append(share * max(problem.backward_s[device] for device in stage.devices))
        averages_s.append(costs.average_s(stage))
    both_s = [sum(pair) for pair in zip(forward_s, backward_s, strict=True)]
    pivot = _pivot(both_s, problem.num_microbatches)
    warmup_s = sum(forward_s[: pivot + 1])
    steady_s = (problem.num_microbatches - 1) * both_s[pivot]
    ending_s = -math.inf
    for index, average_s in enumerate(averages_s):
        # Earlier stages get the last gradient after the pivot, later ones had it before.
        if index <= pivot:
            last_s = sum(backward_s[index : pivot + 1])
        else:
            last_s = backward_s[pivot] - sum(backward_s[pivot:index])
        ending_s = max(ending_s, average_s + last_s)
    return warmup_s + steady_s + ending_s


def _pivot(both_s: list[float], num_microbatches: int) -> int:
    """Return the stage whose steady phase is the longest, seen from the last stage backwards.

    A later pivot gives way to an earlier stage if that one has the longer steady phase, even after
    all that a microbatch passes between the two.
    """
    pivot = len(both_s) - 1
    for index in reversed(range(pivot)):
        between_s = sum(both_s[index + 1 : pivot])
        if (num_microbatches - 1) * (both_s[index] - both_s[pivot]) > between_s:
            pivot = index
    return pivot


def plan_dapple(problem: PipelineProblem, *, beam: int = BEAM) -> Pipeline | None:
    """Return the best pipeline that was found. None: none fits into memory.

    Args:
        problem: The model and its devices.
        beam: States that are continued, of those with equally many stages. More take longer.
    """
    costs = _Costs(problem)
    best: Pipeline | None = None
    best_s, num_without = math.inf, 0
    for pipeline in _even_pipelines(problem):
        value_s = _latency_s(costs, pipeline)
        if value_s < best_s:
            best, best_s = pipeline, value_s
    states = [_State((), 0, frozenset(range(problem.num_devices)))]
    while states and num_without <= _PATIENCE:
        found: dict[tuple[int, frozenset[int]], tuple[float, _State]] = {}
        num_without += best is not None
        for state in states:
            rest = _rest(problem, state)
            value_s = _latency_s(costs, rest)
            if value_s < best_s and _fits(problem, rest[-1]):
                best, best_s, num_without = rest, value_s, 0
        for state in states:
            for after in _continue(problem, state, best_s):
                value_s = _latency_s(costs, _rest(problem, after))
                key = (after.num_layers, after.left)
                if key not in found or value_s < found[key][0]:
                    found[key] = (value_s, after)
        ranked = sorted(found.values(), key=lambda pair: pair[0])
        states = [state for _, state in ranked[:beam]]
    return best


def _rest(problem: PipelineProblem, state: _State) -> Pipeline:
    """Return the pipeline that a state stands for."""
    num_layers = problem.num_layers - state.num_layers
    return (*state.stages, PlannedStage(num_layers, tuple(sorted(state.left))))


def _fits(problem: PipelineProblem, stage: PlannedStage) -> bool:
    return all(stage.num_layers <= problem.num_layers_max[d] for d in stage.devices)


def _continue(problem: PipelineProblem, state: _State, best_s: float) -> Iterator[_State]:
    """Yield the states with one more stage that may still become better than the best."""
    num_left = problem.num_layers - state.num_layers
    steady_s = best_s / max(1, problem.num_microbatches - 1)
    tried: set[tuple[int, ...]] = set()
    for num_devices in range(1, len(state.left)):
        for policy in _POLICIES:
            devices = policy(problem, state.left, num_devices)
            if devices in tried:
                continue
            tried.add(devices)
            left = state.left.difference(devices)
            own_s = max(problem.layer_s[device] for device in devices) / num_devices
            rest_s = 1 / sum(1 / problem.layer_s[device] for device in left)
            num_max = min(num_left - 1, *(problem.num_layers_max[device] for device in devices))
            for num_layers in range(1, num_max + 1):
                if own_s * num_layers >= steady_s:
                    break
                if rest_s * (num_left - num_layers) >= steady_s:
                    continue
                stage = PlannedStage(num_layers, devices)
                yield _State((*state.stages, stage), state.num_layers + num_layers, left)


_Policy = Callable[[PipelineProblem, frozenset[int], int], tuple[int, ...]]


def _fresh_first(problem: PipelineProblem, left: frozenset[int], num: int) -> tuple[int, ...]:
    free = [[d for d in machine if d in left] for machine in problem.machines]
    used = [len(f) < len(m) for f, m in zip(free, problem.machines, strict=True)]
    order = sorted(range(len(free)), key=lambda index: (used[index], -len(free[index])))
    return _taken(free, order, num)


def _append_first(problem: PipelineProblem, left: frozenset[int], num: int) -> tuple[int, ...]:
    free = [[d for d in machine if d in left] for machine in problem.machines]
    used = [len(f) < len(m) for f, m in zip(free, problem.machines, strict=True)]
    order = sorted(range(len(free)), key=lambda index: (not used[index], len(free[index])))
    return _taken(free, order, num)


def _taken(free: list[list[int]], order: list[int], num: int) -> tuple[int, ...]:
    return tuple(sorted([device for index in order for device in free[index]][:num]))


def _scatter_first(problem: PipelineProblem, left: frozenset[int], num: int) -> tuple[int, ...]:
    free = [[d for d in machine if d in left] for machine in problem.machines]
    dealt = [
        machine[turn]
        for turn in range(max(map(len, free)))
        for machine in free
        if turn < len(machine)
    ]
    return tuple(sorted(dealt[:num]))


_POLICIES: tuple[_Policy, ...] = (_fresh_first, _append_first, _scatter_first)


def _even_pipelines(problem: PipelineProblem) -> Iterator[Pipeline]:
    """Yield simple pipelines to begin with: equal groups of devices, layers by their speed.

    They only save time: what is worse than the best of them need not be looked at.
    """
    for num_stages in range(1, min(problem.num_devices, problem.num_layers) + 1):
        bounds = [index * problem.num_devices // num_stages for index in range(num_stages + 1)]
        groups = [tuple(range(*pair)) for pair in itertools.pairwise(bounds)]
        speeds = [len(group) / max(problem.layer_s[d] for d in group) for group in groups]
        numbers = [0] * num_stages
        for _ in range(problem.num_layers):
            # Give the next layer to the stage that has it done first.
            ready = [(num + 1) / speed for num, speed in zip(numbers, speeds, strict=True)]
            numbers[ready.index(min(ready))] += 1
        pipeline = tuple(map(PlannedStage, numbers, groups))
        if all(stage.num_layers and _fits(problem, stage) for stage in pipeline):
            yield pipeline
