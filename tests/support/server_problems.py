"""Small problems for planners of the servers organisation, with round numbers."""

import random
from dataclasses import replace

from hypothesis import strategies as st

from decod.ids import NodeId
from decod.lab.planner.hosts import HostKind, TrainingHost, TrainingProblem, TrainingWork
from decod.lab.planner.servers.servers_layout import ServedStage, ServersLayout
from decod.lab.sim.random_hosts import draw_problem

MEGABYTE = 1e6

WORK = TrainingWork(
    num_layers=4,
    num_microbatches=10,
    activation_bytes=MEGABYTE,
    layer_bytes=MEGABYTE,
    delay=0,
)


def make_problem(
    hosts: dict[str, float],
    *,
    work: TrainingWork = WORK,
    latency_s: float = 0.0,
    bandwidth: float = 1e12,
    access: float = 1e12,
) -> TrainingProblem:
    """Return a problem with equal links.

    Args:
        hosts: Speeds by id. Ids begin with d, s or c: data node, server, client.
        work: The work of an iteration.
        latency_s: Of every link.
        bandwidth: Of every link, in bytes per second.
        access: Uplink and downlink of every host, in bytes per second.
    """
    kinds = {"d": HostKind.DATA, "s": HostKind.RELIABLE, "c": HostKind.UNRELIABLE}
    made = [
        TrainingHost(
            host_id=NodeId(name),
            kind=kinds[name[0]],
            speed_layers_per_s=speed,
            uplink_bytes_per_s=access,
            downlink_bytes_per_s=access,
        )
        for name, speed in hosts.items()
    ]
    latencies = [[latency_s * (i != j) for j in range(len(made))] for i in range(len(made))]
    bandwidths = [[bandwidth * (i != j) for j in range(len(made))] for i in range(len(made))]
    return TrainingProblem(made, latencies, bandwidths, work)


def change_host(problem: TrainingProblem, host_id: str, **values: object) -> TrainingProblem:
    """Return a problem in which a host has other values."""
    hosts = [
        replace(host, **values) if host.host_id == host_id else host  # type: ignore[arg-type]
        for host in problem.hosts
    ]
    return replace(problem, hosts=hosts)


def make_layout(*stages: tuple[int, str, str, str]) -> ServersLayout:
    """Return a layout of (layers, frontal servers, backward servers, clients), by their ids."""

    def named(text: str) -> tuple[NodeId, ...]:
        return tuple(NodeId(name) for name in text.split())

    return ServersLayout(
        tuple(
            ServedStage(
                num_layers=layers,
                frontal=named(frontal),
                backward=named(backward),
                clients=named(clients),
            )
            for layers, frontal, backward, clients in stages
        )
    )


@st.composite
def training_problems(draw: st.DrawFn, *, max_hosts: int = 6) -> TrainingProblem:
    """Draw problems of all sizes, with one or two data nodes."""
    return draw_problem(
        random.Random(draw(st.integers(0, 2**32))),
        num_reliable=draw(st.integers(1, max_hosts)),
        num_unreliable=draw(st.integers(0, max_hosts)),
        num_layers=draw(st.integers(1, 12)),
        num_data=draw(st.integers(1, 2)),
    )
