"""The forecast of the servers organisation, by the planner of `planner.servers`.

A run cuts its layers evenly. The planner is therefore given stages of one thick layer each, and the
layout that it finds is timed with the real layers.
"""

import math
import random
from dataclasses import replace

from decod.lab.planner.hosts import HostKind, TrainingHost, TrainingProblem
from decod.lab.planner.organisations.forecast import (
    Forecast,
    OrganisationName,
    PlacedHost,
    PlacedStage,
    TimeParts,
)
from decod.lab.planner.organisations.run_work import WHOLE, RunProblem
from decod.lab.planner.servers.objective import IterationTime, iteration_time_s
from decod.lab.planner.servers.servers_layout import ServersLayout, broken_rules
from decod.lab.planner.servers.servers_search import EVALUATIONS_DEFAULT, plan_layout
from decod.planner.partition import part_sizes

_NUM_STAGES_MAX = 6
"""Numbers of stages that are tried. If there are more, they are spread out."""


def servers_forecasts(
    problem: RunProblem,
    rng: random.Random,
    *,
    num_stages: int | None = None,
    evaluations: int = EVALUATIONS_DEFAULT,
) -> list[Forecast]:
    """Return a forecast for each delay of the steps. Empty: no layout is possible.

    Args:
        problem: Hosts, links and the run. At least one host is reliable.
        rng: Source of the search's draws.
        num_stages: Look at so many stages only.
        evaluations: About the number of layouts to look at.
    """
    numbers = [num_stages] if num_stages is not None else _numbers(problem)
    delay, found = problem.run.delays[0], list[tuple[float, ServersLayout]]()
    real = _problem(problem, delay)
    for number in numbers:
        thick = _thick(real, number)
        layout = plan_layout(
            thick, rng, num_stages=number, evaluations=max(1, evaluations // len(numbers))
        )
        if layout is not None:
            layout = _with_layers(layout, problem.run.num_layers)
            if not broken_rules(real, layout):
                found.append((iteration_time_s(real, layout).total_s, layout))
    if not found:
        return []
    least_s, layout = min(found, key=lambda each: each[0])
    if least_s == math.inf:
        return []
    return [_forecast(_problem(problem, each), layout, each) for each in problem.run.delays]


def _numbers(problem: RunProblem) -> list[int]:
    """Return the numbers of stages to try: close together where there are few."""
    num = len(problem.base.indexes(HostKind.RELIABLE))
    most = min(problem.run.num_layers, num)
    if most <= _NUM_STAGES_MAX:
        return list(range(1, most + 1))
    return sorted(
        {round(most ** (index / (_NUM_STAGES_MAX - 1))) for index in range(_NUM_STAGES_MAX)}
    )


def _problem(problem: RunProblem, delay: int) -> TrainingProblem:
    """Return the problem with limits of memory as servers and clients have them."""
    work = replace(problem.base.work, delay=delay)
    return replace(
        problem.base, hosts=[_limited(problem, host) for host in problem.hosts], work=work
    )


def _limited(problem: RunProblem, host: TrainingHost) -> TrainingHost:
    if host.memory_bytes is None or host.kind == HostKind.DATA:
        return host
    layer = problem.run.layer
    each = layer.state_bytes if host.kind == HostKind.RELIABLE else layer.weights_bytes
    if host.speed_layers_per_s > 0:
        each += layer.microbatch_bytes
    limit = min(problem.run.num_layers, math.floor(host.memory_bytes / each))
    return replace(host, num_layers_max=limit)


def _thick(problem: TrainingProblem, number: int) -> TrainingProblem:
    """Return a problem whose layers are as thick as the stages of an even cut."""
    work = problem.work
    thickness = work.num_layers / number
    most = math.ceil(thickness)
    hosts = [
        replace(
            host,
            speed_layers_per_s=host.speed_layers_per_s / thickness,
            num_layers_max=None if host.num_layers_max is None else host.num_layers_max // most,
        )
        for host in problem.hosts
    ]
    thick = replace(
        work,
        num_layers=number,
        layer_bytes=work.layer_bytes * thickness,
        step_s=work.step_s * thickness,
    )
    return replace(problem, hosts=hosts, work=thick)


def _with_layers(layout: ServersLayout, num_layers: int) -> ServersLayout:
    counts = part_sizes(num_layers, len(layout.stages))
    return ServersLayout(
        tuple(
            replace(stage, num_layers=count)
            for stage, count in zip(layout.stages, counts, strict=True)
        )
    )


def _forecast(problem: TrainingProblem, layout: ServersLayout, delay: int) -> Forecast:
    time = iteration_time_s(problem, layout)
    return Forecast(
        organisation=OrganisationName.SERVERS,
        variant=f"delay {delay}",
        parts=_parts(problem, layout, time),
        bottleneck=time.bottleneck,
        stages=_placed(problem, layout, time),
        exact=not delay,
        settings={
            "organisation": "servers",
            "stages.num_relay_stages": len(layout.stages),
            "batch.num_data_nodes": len(problem.indexes(HostKind.DATA)),
            "servers.delay": delay,
            "sync.method": "gradients",
            "sync.every": 1,
            "sync.overlap": False,
            "sync.compression": WHOLE,
        },
        remarks=("steps come one iteration late",) if delay else (),
    )


def _parts(problem: TrainingProblem, layout: ServersLayout, time: IterationTime) -> TimeParts:
    most_s = 0.0
    for stage, parts in zip(layout.stages, time.stages, strict=True):
        for host, count in parts.shares:
            # The first microbatch's computation is a part of the fill.
            each_s = stage.num_layers / problem.hosts[host].speed_layers_per_s
            most_s = max(most_s, (count - 1) * each_s)
    beyond_s = max(0.0, time.pipeline_s - time.fill_s)
    compute_s = min(most_s, beyond_s)
    fill_s = min(time.fill_s, time.pipeline_s)
    return TimeParts(
        compute_s=compute_s,
        communication_s=beyond_s - compute_s,
        fill_s=fill_s,
        aggregation_s=max(0.0, time.total_s - time.pipeline_s),
    )


def _placed(
    problem: TrainingProblem, layout: ServersLayout, time: IterationTime
) -> tuple[PlacedStage, ...]:
    found = []
    for stage, parts in zip(layout.stages, time.stages, strict=True):
        counts = {problem.hosts[host].host_id: count for host, count in parts.shares}
        duties = dict.fromkeys(stage.clients, "client")
        for host_id in stage.servers:
            both = host_id in stage.frontal and host_id in stage.backward
            duties[host_id] = (
                "server" if both else "frontal" if host_id in stage.frontal else "backward"
            )
        order = (*stage.servers, *stage.clients)
        hosts = tuple(
            PlacedHost(host_id=i, duty=duties[i], num_microbatches=counts.get(i, 0)) for i in order
        )
        found.append(PlacedStage(num_layers=stage.num_layers, hosts=hosts))
    return tuple(found)
