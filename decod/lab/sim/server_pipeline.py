"""decod's `pipeline` organisation on the instances of the paper on parameter servers.

The protocol of real nodes trains in virtual time, with a data node that has the data and the loss.
Its stages are those of `servers`. Every host holds its stage's whole state there. A host that comes
back first fetches that state, which is three times as large as the stage's parameters.

The choices here:

- The data node's links and work cost nothing, as for SWARM.
- Timeouts fit batches of an hour. Nodes keep all activations, so that a batch is never repeated.
- The first batch, in which no link has been measured, is left out.

A batch takes 20 s to some minutes to simulate.
"""

import statistics
from dataclasses import replace

from decod.lab.sim.retraining import server_scenario
from decod.lab.sim.server_instances import Allocation, Instance
from decod.sim.scenario import patient_protocol
from decod.sim.simulation import Simulation


def pipeline_s(instance: Instance, allocation: Allocation, *, num_batches: int) -> float:
    """Return how long decod's pipeline takes for a batch, as the mean over batches.

    Args:
        instance: The setting.
        allocation: The hosts and layers of each stage.
        num_batches: Batches over which the mean is taken. Without churn, one is enough.
    """
    num = num_batches if instance.churns else 1
    scenario = server_scenario(instance, allocation, num)
    simulation = Simulation(
        replace(
            scenario,
            join_spread_s=0.0,
            protocol=replace(
                patient_protocol(min(map(len, allocation.stages))),
                max_peers_per_stage=max(map(len, allocation.stages)),
                heartbeat_interval_s=5.0,
                negotiation_interval_s=4.0,
            ),
        )
    )
    simulation.run()
    return statistics.mean(figures.duration_s for figures in simulation.meter.figures[1:])
