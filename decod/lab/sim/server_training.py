"""decod's `servers` organisation on the instances of the paper on parameter servers.

The protocol of real nodes trains in virtual time. Reliable hosts are the servers of their stages,
and compute as well; unreliable hosts are clients. A data node has the data and the loss.

The choices here:

- A microbatch is one sequence. The paper's minibatch of four is cut among a stage's workers.
- The data node's links and work cost nothing, as for SWARM.
- Timeouts fit batches of an hour. Nodes keep all activations, so that a batch is never repeated.
- Steps come one iteration late, as in the paper (delayed parameter updates).
- The first batch, in which no link has been measured, is left out.
"""

import statistics
from dataclasses import replace

from decod.lab.sim.retraining import server_scenario
from decod.lab.sim.server_instances import Allocation, Instance
from decod.run.run_config import Organisation
from decod.sim.scenario import Scenario, patient_protocol
from decod.sim.simulation import Simulation

_CUT = 4
"""An instance's microbatch has four sequences. The paper cuts each among the workers of a stage."""


def servers_s(
    instance: Instance, allocation: Allocation, *, num_batches: int, delay: int = 1
) -> float:
    """Return how long decod's servers and clients take for a batch, as the mean over batches.

    Args:
        instance: The setting.
        allocation: The hosts and layers of each stage.
        num_batches: Batches over which the mean is taken. Without churn, one is enough.
        delay: Iterations by which steps are late.
    """
    num = num_batches if instance.churns else 1
    scenario = servers_scenario(instance, allocation, num, delay=delay, cut=_CUT)
    simulation = Simulation(scenario)
    simulation.run()
    return statistics.mean(figures.duration_s for figures in simulation.meter.figures[1:])


def servers_scenario(
    instance: Instance, allocation: Allocation, num_batches: int, *, delay: int, cut: int = 1
) -> Scenario:
    """Return an instance as a scenario of a data node, servers and clients.

    Args:
        instance: The setting.
        allocation: The hosts and layers of each stage.
        num_batches: After the first.
        delay: Iterations by which steps are late.
        cut: Parts into which each of the instance's microbatches is cut.
    """
    instance = _cut(instance, cut)
    scenario = server_scenario(instance, allocation, num_batches)
    reliable = {host.name for host in instance.hosts if host.reliable}
    data, *others = (
        replace(host, capacity=host.capacity * (cut if host.stage_index else 1))
        for host in scenario.hosts
    )
    servers = [host for host in others if host.name in reliable]
    clients = [host for host in others if host.name not in reliable]
    num_servers = [sum(name in reliable for name in stage) for stage in allocation.stages]
    return replace(
        scenario,
        organisation=Organisation.SERVERS,
        servers=replace(scenario.servers, delay=delay),
        num_relays=len(servers),
        num_clients=len(clients),
        join_spread_s=0.0,
        hosts=(data, *servers, *clients),
        protocol=patient_protocol(min(num_servers)),
    )


def _cut(instance: Instance, cut: int) -> Instance:
    """Return an instance whose microbatches are smaller, and more."""
    model = instance.model
    hosts = (
        replace(host, forward_s=host.forward_s / cut, backward_s=host.backward_s / cut)
        for host in instance.hosts
    )
    finer = replace(
        model,
        num_microbatches=cut * model.num_microbatches,
        activation_bytes=model.activation_bytes // cut,
    )
    return replace(instance, model=finer, hosts=tuple(hosts))
