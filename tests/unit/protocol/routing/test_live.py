"""When a training node acts in the search, and when its result is used: in a simulated run."""

from dataclasses import replace

import pytest

from decod.protocol.node_machine import NodeMachine
from decod.protocol.strategy.pipeline import Pipeline
from decod.run.model_config import StagesConfig
from decod.run.protocol_config import ProtocolConfig
from decod.run.training_config import BatchConfig
from decod.sim.core import pipeline_of
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Scenario
from decod.sim.simulation import Simulation

SCENARIO = Scenario(
    batch=BatchConfig(num_data_nodes=2, num_microbatches=4),
    num_relays=6,
    stages=StagesConfig(num_relay_stages=2),
    num_iterations=10,
    protocol=ProtocolConfig(min_nodes_per_stage=3, min_data_nodes=2, negotiation_interval_s=0.1),
)


def works(simulation: Simulation) -> dict[str, Pipeline]:
    cores = {name: host.machine for name, host in simulation.hosts.items()}
    return {
        name: pipeline_of(core) for name, core in cores.items() if isinstance(core, NodeMachine)
    }


@pytest.mark.parametrize(("forward_s", "num_iterations"), [(0.1, 10), (5.0, 3)])
def test_settlements_are_used_however_long_an_iteration_takes(
    forward_s: float, num_iterations: int
) -> None:
    """With long ones, many rounds of the search pass between two openings."""
    profile = replace(ComputeProfile(), forward_s=forward_s)
    scenario = replace(SCENARIO, profile=profile, num_iterations=num_iterations)
    simulation = Simulation(replace(scenario, duration_max_s=1e5))
    epochs: set[int] = set()

    def look() -> None:
        epochs.add(min(pipeline.routing.epoch for pipeline in works(simulation).values()))
        simulation.kernel.after(1.0, look)

    simulation.kernel.at(5.0, look)
    result = simulation.run()
    assert result.num_iterations == num_iterations
    assert max(epochs) >= 1
