"""PipeDream's planner: cuts a model so that the slowest stage or link is as fast as possible.

A dynamic program over the layers and the devices. The best cut of the first j layers over the first
m devices is a best cut of fewer layers over fewer devices, then one more stage on the devices
between. A stage on several devices gives each of them every m-th microbatch, so its devices divide
its time. The objective is the time between two microbatches in a pipeline that is full.

Deviations:

- Devices are taken in a given order, and differ. A stage is as slow as its slowest device. With
  equal devices and links that is the published program.
- A stage averages once for each batch and not with each microbatch, so its averaging is divided by
  the number of microbatches. It does not overlap with passes, so the two add up.
- A stage holds no more layers than fit into each of its devices.
- Devices at the end of the order may stay idle, as with the public code's `use_fewer_machines`.
- Of two cuts that are equally fast, the one with fewer stages counts as better.

Source: PipeDream (arXiv:1806.03377), section 3.2; `optimizer_graph_hierarchical.py` of its public
code.
"""

import math

from decod.lab.planner.pipelines import Pipeline, PipelineProblem, PlannedStage, all_reduce_s

_Value = tuple[float, int]
"""Time of the slowest stage or link for a microbatch, and the number of stages."""


def plan_pipedream(problem: PipelineProblem) -> Pipeline | None:
    """Return the best pipeline on the devices in their order. None: the model does not fit."""
    num_layers, num_devices = problem.num_layers, problem.num_devices
    nothing: _Value = (math.inf, 0)
    best = [[nothing] * (num_devices + 1) for _ in range(num_layers + 1)]
    best[0][0] = (0.0, 0)
    chosen: dict[tuple[int, int], tuple[int, int]] = {}
    for end in range(1, num_devices + 1):
        for begin in range(end):
            costs = _stage_costs(problem, begin, end)
            link_s = _link_s(problem, begin)
            for num_done in range(1, num_layers + 1):
                for num_own in range(1, min(num_done, len(costs) - 1) + 1):
                    before_s, num_stages = best[num_done - num_own][begin]
                    value = (max(before_s, link_s, costs[num_own]), num_stages + 1)
                    if value < best[num_done][end]:
                        best[num_done][end] = value
                        chosen[num_done, end] = (num_own, begin)
    last = min(range(1, num_devices + 1), key=lambda end: best[num_layers][end])
    if math.isinf(best[num_layers][last][0]):
        return None
    stages: list[PlannedStage] = []
    num_done = num_layers
    while num_done:
        num_own, begin = chosen[num_done, last]
        stages.insert(0, PlannedStage(num_own, tuple(range(begin, last))))
        num_done, last = num_done - num_own, begin
    return tuple(stages)


def bottleneck_s(problem: PipelineProblem, pipeline: Pipeline) -> float:
    """Return the objective: the slowest stage's or link's time for a microbatch."""
    slowest_s = 0.0
    for stage in pipeline:
        begin, end = stage.devices[0], stage.devices[-1] + 1
        costs = _stage_costs(problem, begin, end)
        if stage.num_layers >= len(costs):
            return math.inf
        slowest_s = max(slowest_s, costs[stage.num_layers], _link_s(problem, begin))
    return slowest_s


def _stage_costs(problem: PipelineProblem, begin: int, end: int) -> list[float]:
    """Return a stage's time for a microbatch, by the number of its layers from 0 on."""
    devices = range(begin, end)
    layer_s = max(problem.layer_s[device] for device in devices) / len(devices)
    average_s = all_reduce_s(problem, devices, problem.layer_bytes) / problem.num_microbatches
    num_max = min(problem.num_layers_max[device] for device in devices)
    return [num * (layer_s + average_s) for num in range(num_max + 1)]


def _link_s(problem: PipelineProblem, begin: int) -> float:
    """Return the time of an activation and its gradient before the stage that begins here.

    Both go over one link in opposite directions, so they do not wait for each other. The published
    program adds them up. Latency keeps nobody from sending the next one.
    """
    if not begin:
        return 0.0
    there = problem.bandwidth_bytes_per_s[begin - 1][begin]
    back = problem.bandwidth_bytes_per_s[begin][begin - 1]
    return problem.activation_bytes / min(there, back)
