"""When a training node acts in the search, and when its result is used: in a simulated run."""

from dataclasses import replace

import pytest

from decod.protocol.flows.building import RelayFlows
from decod.protocol.node_machine import NodeMachine
from decod.protocol.strategy.pipeline import Pipeline
from decod.run.model_config import StagesConfig
from decod.run.protocol_config import ProtocolConfig
from decod.run.training_config import BatchConfig
from decod.sim.core import pipeline_of
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import FaultKind, HostFault, Scenario
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


def test_an_iteration_of_two_dozen_iterations_ends_with_a_new_settlement() -> None:
    """What the search finds, such as a way round a link that has become slow, is soon used."""
    simulation = Simulation(replace(SCENARIO, num_iterations=1000))
    simulation.kernel.run(until_s=15.0, done=lambda: False)
    epoch, iteration = leader_epoch(simulation), simulation.checker.num_iterations
    assert epoch > 0
    simulation.kernel.run(until_s=40.0, done=lambda: False)
    num_iterations = simulation.checker.num_iterations - iteration
    assert 20 < 25.0 / num_iterations / SCENARIO.protocol.negotiation_interval_s < 30
    assert leader_epoch(simulation) - epoch >= num_iterations - 1


def test_settlements_pass_by_a_relay_that_is_paused_and_use_it_again() -> None:
    pause = HostFault(FaultKind.PAUSE, "relay1", at_s=4.0, duration_s=8.0)
    simulation = Simulation(replace(SCENARIO, num_iterations=1000, faults=(pause,)))
    pipeline: list[tuple[float | None, int, int]] = []
    for until_s in (11.5, 22.0):
        simulation.kernel.run(until_s=until_s, done=lambda: False)
        paused = works(simulation)["relay1"]
        pipeline.append((paused.routing.deadline_s, paused.num_flows, leader_epoch(simulation)))
    (tick_s, num_flows, epoch), (tick_after_s, num_flows_after, epoch_after) = pipeline
    assert (tick_s, num_flows) == (None, 0)
    assert epoch >= 1
    assert tick_after_s is not None
    assert num_flows_after > 0
    assert epoch_after >= 1


def leader_epoch(simulation: Simulation) -> int:
    return works(simulation)[simulation.leader.name].routing.epoch


def test_a_relay_that_a_settlement_passes_by_carries_nothing_of_the_last() -> None:
    simulation = Simulation(SCENARIO)
    done: list[str] = []

    def pass_by() -> None:
        name, pipeline = next(
            (name, pipeline)
            for name, pipeline in works(simulation).items()
            if isinstance(pipeline.flows, RelayFlows) and pipeline.flows.num_complete
        )
        flows = pipeline.flows
        assert isinstance(flows, RelayFlows)
        before = dict(flows.entries), dict(flows.outflows.paired)
        assert pipeline.routing.adopt(pipeline.routing.epoch + 1000, flows)
        assert not flows.entries
        assert not flows.outflows.paired
        flows.entries.update(before[0])
        flows.outflows.paired.update(before[1])
        done.append(name)

    simulation.kernel.at(8.0, pass_by)
    simulation.kernel.run(until_s=8.0, done=lambda: bool(done))
    assert done
