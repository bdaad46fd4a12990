"""The systems that the paper on reliable and unreliable parameter servers compares.

A system is a function from an instance to the minutes that a batch takes, as the mean over
`NUM_BATCHES` batches. Losses of the batch with number b, from 0, are `instance.losses(b)`. Their
instants are shares of the time that a batch without losses takes the system.

`servers` and `pipeline` are decod's own organisations. Both run the protocol of real nodes.

The paper gives SWARM the stages that its own scheme chooses. Those are the stages of
`servers_allocation`.
"""

import statistics
from collections.abc import Callable
from functools import partial

from decod.lab.sim.retraining import dedloc_s, swarm_s
from decod.lab.sim.rigid import RIGID, interrupted_s
from decod.lab.sim.server_instances import Allocation, Instance
from decod.lab.sim.server_pipeline import pipeline_s
from decod.lab.sim.server_planning import allocation_of, planned_layout
from decod.lab.sim.server_training import servers_s

NUM_BATCHES = 5
"""Batches over which a system's time is the mean, if hosts disconnect."""

System = Callable[[Instance], float]


def simulate_servers(instance: Instance) -> float:
    """Return the minutes of a batch in decod's `servers` organisation."""
    allocation = servers_allocation(instance)
    return servers_s(instance, allocation, num_batches=NUM_BATCHES) / 60


def simulate_pipeline(instance: Instance) -> float:
    """Return the minutes of a batch in decod's `pipeline` organisation.

    If hosts disconnect, that is the mean over 2 batches only.
    """
    return pipeline_s(instance, servers_allocation(instance), num_batches=2) / 60


def servers_allocation(instance: Instance) -> Allocation:
    """Return the stages of `servers`, which SWARM has, too: those that decod's planner chooses.

    An instance may prescribe others.
    """
    return instance.allocation or allocation_of(planned_layout(instance))


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
