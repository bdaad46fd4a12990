"""A node that hears of an opening later than its peers misses nothing that they have said since."""

import re

import pytest

from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.network import LinkFaults, Links, LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.simulation import Simulation
from tests.support.quick import first_of


def test_flows_are_found_at_once_in_the_iteration_after_a_loss() -> None:
    """That iteration has the view of the one before: offers that come before it opens are of it."""
    scenario = Scenario(
        seed=3,
        num_relays=6,
        stages=StagesConfig(num_relay_stages=3),
        num_iterations=7,
        batch=BatchConfig(num_microbatches=6),
        duration_max_s=600.0,
        protocol=ProtocolConfig(min_nodes_per_stage=2),
        faults=(HostFault(FaultKind.KILL, "relay1", at_s=19.0),),
    )
    simulation = Simulation(scenario)
    leader, late = simulation.leader, simulation.hosts["relay4"]
    network = simulation.world.network
    simulation.kernel.at(10.0, lambda: network.change(leader, late, LinkSpec(latency_s=0.6)))
    trace = "\n".join(simulation.run().trace)
    assert "iteration 5.1 goes on" in trace
    found = re.findall(r"iteration (\d+)\.1 is committed.* duration_s=([\d.]+)", trace)
    durations_s = {int(iteration): float(text) for iteration, text in found}
    waited_s = durations_s[6] - durations_s[7]
    assert waited_s < scenario.protocol.answer_timeout_s / 2, durations_s


def test_who_has_its_state_again_after_a_loss_does_not_wait_for_flows_that_nobody_builds() -> None:
    """A data node fetches its state, and a relay is lost meanwhile: no more flows in that
    iteration.
    """
    scenario = Scenario(
        seed=1631,
        batch=BatchConfig(num_data_nodes=2, num_microbatches=1),
        num_relays=3,
        stages=StagesConfig(num_relay_stages=1),
        num_iterations=8,
        calm_s=25.0,
        profile=ComputeProfile(optimizer_s=0.05, activation_bytes=100_000),
        links=Links(spread_ratio=0.5),
        protocol=ProtocolConfig(min_nodes_per_stage=2, min_data_nodes=2),
        faults=(
            HostFault(FaultKind.ROT, "data1", at_s=6.5),
            HostFault(FaultKind.KILL, "relay1", at_s=7.6),
        ),
    )
    trace = "\n".join(Simulation(scenario).run().trace)
    begin, _, end = trace.partition("data1    state of iteration 4 loaded")
    assert "iteration 5.2 goes on: lost relay1" in begin
    assert "no flow of this data node" not in trace
    loaded_s = float(begin.splitlines()[-1].split()[0])
    committed_s = re.search(r"([\d.]+) data0 +iteration 5\.3 is committed", end)
    assert committed_s is not None, trace
    assert float(committed_s[1]) - loaded_s < 3.0


@pytest.mark.parametrize("seed", first_of([0, 1, 8, 10, 13, 14, 19, 22, 24, 26, 31], 4))
def test_the_word_that_the_run_is_over_does_not_overtake_the_last_commit(seed: int) -> None:
    """Most messages are late by up to two seconds, or come before earlier ones."""
    late = LinkFaults(
        reorder_ratio=(0.4, 0.5)[seed % 2], delay_ratio=0.3, delay_max_s=(1.0, 2.0)[seed // 2 % 2]
    )
    scenario = Scenario(
        seed=seed,
        batch=BatchConfig(num_data_nodes=1 + seed % 2, num_microbatches=2),
        num_relays=4,
        stages=StagesConfig(num_relay_stages=1 + seed % 2),
        num_iterations=6,
        link_faults=late,
    )
    assert Simulation(scenario).run().num_iterations == 6
