"""The systems that the paper on reliable and unreliable parameter servers compares.

A system is a function from an instance to the minutes that a batch takes, as the mean over
`NUM_BATCHES` batches. Losses of the batch with number b, from 0, are `instance.losses(b)`. Their
instants are shares of the time that a batch without losses takes the system.

`servers` and `pipeline` are decod's own organisations. `servers` raises `NotImplementedError` until
the simulator can run it, and experiments leave it out. `pipeline` runs the protocol of real nodes,
which takes minutes for an instance, so no experiment shows it by default.

The paper gives SWARM the stages that its own scheme chooses. Those are the stages of
`servers_allocation`.
"""

import itertools
import statistics
from collections.abc import Callable
from functools import partial

from decod.sim.retraining import dedloc_s, swarm_s
from decod.sim.rigid import RIGID, interrupted_s
from decod.sim.server_instances import Allocation, Instance, allocate
from decod.sim.server_pipeline import pipeline_s

NUM_BATCHES = 5
"""Batches over which a system's time is the mean, if hosts disconnect."""

_NUM_STAGES = 4
"""Stages of `servers_allocation`, if there are hosts for them and layers fit."""

System = Callable[[Instance], float]


def simulate_servers(instance: Instance) -> float:
    """Return the minutes of a batch in decod's `servers` organisation."""
    raise NotImplementedError(f"{instance.name}: the simulator has no servers yet")


def simulate_pipeline(instance: Instance) -> float:
    """Return the minutes of a batch in decod's `pipeline` organisation.

    If hosts disconnect, that is the mean over 2 batches only.
    """
    return pipeline_s(instance, servers_allocation(instance), num_batches=2) / 60


def servers_allocation(instance: Instance) -> Allocation:
    """Return the stages of `servers`, which SWARM has, too.

    Unless the instance prescribes them, they follow a simple rule: four stages, or as many as
    memory and pairs of reliable hosts allow. Reliable hosts are cut in their order, so that those
    of an HPC stay together. Unreliable hosts are dealt out in turn, each to the stage of the
    smallest number of hosts and among these to the one with the best links.

    Deviation: the paper clusters reliable hosts by their links and sends each unreliable host to
    the closest stage (section 3.3.3).
    """
    if instance.allocation is not None:
        return instance.allocation
    reliable = [host for host in instance.hosts if host.reliable]
    num_layers_max = min(map(instance.num_layers_max, instance.hosts))
    needed = -(-instance.model.num_layers // num_layers_max)
    num = max(needed, min(_NUM_STAGES, len(reliable) // 2))
    assert num <= len(reliable), f"{instance.name}: {num} stages, {len(reliable)} reliable hosts"
    bounds = [index * len(reliable) // num for index in range(num + 1)]
    servers = [
        [host.name for host in reliable[begin:end]] for begin, end in itertools.pairwise(bounds)
    ]
    stages = [[*names] for names in servers]
    for host in instance.hosts:
        if host.reliable:
            continue

        def order(index: int, name: str = host.name) -> tuple[int, float]:
            return len(stages[index]), _distance_s(instance, name, servers[index])

        stages[min(range(num), key=order)].append(host.name)
    return allocate(instance, [tuple(names) for names in stages])


def _distance_s(instance: Instance, name: str, others: list[str]) -> float:
    """Return the mean time of an activation to a stage's servers and back."""
    num_bytes = instance.model.activation_bytes
    pairs = [pair for other in others for pair in ((name, other), (other, name))]
    specs = [instance.links[pair] for pair in pairs]
    return statistics.mean(s.latency_s + num_bytes / s.bandwidth_bytes_per_s for s in specs)


def _rigid(name: str, instance: Instance, *, each: bool) -> float:
    undisturbed_s = RIGID[name](instance)
    batches = range(NUM_BATCHES if instance.churns else 1)
    times_s = [interrupted_s(undisturbed_s, instance.losses(b), each=each) for b in batches]
    return statistics.mean(times_s) / 60


def _swarm(instance: Instance) -> float:
    return swarm_s(instance, servers_allocation(instance), num_batches=NUM_BATCHES) / 60


def _dedloc(instance: Instance) -> float:
    return dedloc_s(instance, num_batches=NUM_BATCHES) / 60


SYSTEMS: dict[str, System] = {
    "servers": simulate_servers,
    "pipeline": simulate_pipeline,
    "pipedream": partial(_rigid, "pipedream", each=True),
    "pipedream once": partial(_rigid, "pipedream", each=False),
    "dapple": partial(_rigid, "dapple", each=True),
    "dapple once": partial(_rigid, "dapple", each=False),
    "swarm": _swarm,
    "dedloc": _dedloc,
}
"""All systems by name. `once`: only the first loss of a batch interrupts it."""


def minutes(name: str, instance: Instance) -> float | None:
    """Return a system's minutes for a batch. None: it cannot be simulated yet."""
    try:
        return SYSTEMS[name](instance)
    except NotImplementedError:
        return None
