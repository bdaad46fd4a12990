"""What would make an iteration of a layout shorter: its bottleneck, twice as good."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from decod.ids import NodeId
from decod.lab.planner.bottleneck import Bottleneck, ResourceKind
from decod.lab.planner.hosts import TrainingProblem
from decod.lab.planner.servers.objective import iteration_time_s
from decod.lab.planner.servers.servers_layout import ServersLayout


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, and the iteration with it. The layout stays the same."""

    change: str
    total_s: float


def advise(problem: TrainingProblem, layout: ServersLayout) -> Advice:
    """Return what doubling the bottleneck would do."""
    bottleneck = iteration_time_s(problem, layout).bottleneck
    change, better = _doubled(problem, layout, bottleneck)
    return Advice(change, iteration_time_s(better, layout).total_s)


def _doubled(
    problem: TrainingProblem, layout: ServersLayout, bottleneck: Bottleneck
) -> tuple[str, TrainingProblem]:
    stage_index = bottleneck.stage_index
    stage = layout.stages[stage_index] if stage_index is not None else None
    name = "" if stage_index is None else f"stage {stage_index + 1}"
    hosts = {bottleneck.host_id}
    match bottleneck.kind:
        case ResourceKind.UPLINK:
            return f"twice the uplink of {bottleneck.host_id}", _with(problem, hosts, up=2.0)
        case ResourceKind.DOWNLINK:
            return f"twice the downlink of {bottleneck.host_id}", _with(problem, hosts, down=2.0)
        case ResourceKind.LINK:
            pair = f"{bottleneck.host_id} to {bottleneck.peer_id}"
            return f"twice the bandwidth from {pair}", _with_link(problem, bottleneck)
        case ResourceKind.HEAD:
            work = replace(problem.work, head_s=problem.work.head_s / 2)
            return "data nodes twice as fast", replace(problem, work=work)
        case ResourceKind.WAY:
            halved = [[latency / 2 for latency in row] for row in problem.latencies_s]
            return "half the latency of all links", replace(problem, latencies_s=halved)
        case _:
            assert stage is not None, bottleneck
            members = {*stage.servers, *stage.clients}
    if bottleneck.kind == ResourceKind.STEP:
        work = replace(problem.work, step_s=problem.work.step_s / 2)
        better = _with(replace(problem, work=work), {*stage.servers}, up=2.0)
        return f"uplinks and processors of the servers of {name} twice as fast", better
    if bottleneck.kind == ResourceKind.MEMORY:
        return f"twice the capacity of all workers of {name}", _with(problem, members, room=2)
    better = _with(problem, members, speed=2.0, up=2.0, down=2.0)
    return f"devices and links of all workers of {name} twice as fast", better


def _with(
    problem: TrainingProblem,
    host_ids: Collection[NodeId | None],
    *,
    speed: float = 1.0,
    up: float = 1.0,
    down: float = 1.0,
    room: int = 1,
) -> TrainingProblem:
    """Return a problem in which some hosts are better by a factor."""
    hosts = [
        replace(
            host,
            speed_layers_per_s=host.speed_layers_per_s * speed,
            uplink_bytes_per_s=host.uplink_bytes_per_s * up,
            downlink_bytes_per_s=host.downlink_bytes_per_s * down,
            num_microbatches_max=(
                None if host.num_microbatches_max is None else host.num_microbatches_max * room
            ),
        )
        if host.host_id in host_ids
        else host
        for host in problem.hosts
    ]
    # Links of a better access are better too: a link is seldom slower than both its ends.
    bandwidths = [
        [
            bandwidth
            * (up if problem.hosts[i].host_id in host_ids else 1.0)
            * (down if problem.hosts[j].host_id in host_ids else 1.0)
            for j, bandwidth in enumerate(row)
        ]
        for i, row in enumerate(problem.bandwidths_bytes_per_s)
    ]
    return replace(problem, hosts=hosts, bandwidths_bytes_per_s=bandwidths)


def _with_link(problem: TrainingProblem, bottleneck: Bottleneck) -> TrainingProblem:
    places = problem.positions()
    assert bottleneck.host_id is not None, bottleneck
    assert bottleneck.peer_id is not None, bottleneck
    begin, end = places[bottleneck.host_id], places[bottleneck.peer_id]
    bandwidths = [list(row) for row in problem.bandwidths_bytes_per_s]
    bandwidths[begin][end] *= 2
    return replace(problem, bandwidths_bytes_per_s=bandwidths)
