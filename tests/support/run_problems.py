"""Small problems for planners of a run's organisations, with round numbers."""

from dataclasses import replace

from decod.lab.planner.organisations.run_work import PartNeeds, RunProblem, RunWork
from tests.support.server_problems import MEGABYTE, WORK, make_problem

NEEDS = PartNeeds(
    wire_bytes={"none": MEGABYTE, "int8": MEGABYTE / 4, "int4": MEGABYTE / 8},
    state_bytes=7 * MEGABYTE,
    local_state_bytes=9 * MEGABYTE,
    weights_bytes=2 * MEGABYTE,
)
RUN = RunWork(
    num_layers=4,
    num_microbatches=10,
    tokens_per_microbatch=100,
    activation_bytes=MEGABYTE,
    layer=NEEDS,
    outer=NEEDS,
    outer_layers=1.0,
)


def make_run_problem(
    hosts: dict[str, float],
    *,
    latency_s: float = 0.0,
    bandwidth: float = 1e12,
    access: float = 1e12,
    memory_bytes: float | None = None,
) -> RunProblem:
    """Return a problem with equal links. See `make_problem`.

    Args:
        hosts: Speeds by id. Ids begin with d, s or c: data node, reliable or unreliable.
        latency_s: Of every link.
        bandwidth: Of every link, in bytes per second.
        access: Uplink and downlink of every host.
        memory_bytes: Of every host.
    """
    base = make_problem(hosts, work=WORK, latency_s=latency_s, bandwidth=bandwidth, access=access)
    limited = [replace(host, memory_bytes=memory_bytes) for host in base.hosts]
    return RunProblem(replace(base, hosts=limited), RUN)
