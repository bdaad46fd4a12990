"""Relays that nobody can dial: they talk by way of data nodes, and the core finds its way."""

from dataclasses import replace

import pytest

from decod.protocol.core.view import Reach
from decod.protocol.node_machine import NodeMachine
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.simulation import Simulation
from decod.sim.storm import weather

SCENARIO = Scenario(
    batch=BatchConfig(num_data_nodes=2),
    num_relays=6,
    stages=StagesConfig(num_relay_stages=2),
    num_outbound=3,
    num_iterations=6,
)


def test_half_of_the_relays_are_outbound_and_all_commit() -> None:
    simulation = Simulation(SCENARIO)
    result = simulation.run()
    assert result.num_iterations == 6
    machine = simulation.leader.machine
    assert isinstance(machine, NodeMachine)
    reach = {member.name: member.reach for member in machine.context.view.members}
    assert {name for name, how in reach.items() if how is Reach.OUTBOUND} == {
        "relay3",
        "relay4",
        "relay5",
    }
    assert {name for name, how in reach.items() if how is Reach.PASSES_ON} == {"data0", "data1"}


def test_two_outbound_hosts_part_when_no_host_in_between_is_left() -> None:
    simulation = Simulation(SCENARIO)
    network, hosts = simulation.world.network, simulation.hosts
    one, other, open_one = hosts["relay4"], hosts["relay5"], hosts["relay0"]
    for host in (*simulation.data_hosts, one, other):
        host.reachable = True
    assert network.joins(one, other)
    hosts["data0"].reachable = False
    assert network.joins(one, other), "the other data node passes on"
    hosts["data1"].reachable = False
    assert not network.joins(one, other)
    assert network.joins(one, open_one), "one of the two can be dialled"


def test_their_link_has_the_latency_of_both_halves_and_half_of_the_rate() -> None:
    simulation = Simulation(SCENARIO)
    network, hosts = simulation.world.network, simulation.hosts
    direct = network.spec(hosts["relay0"], hosts["relay5"])
    passed = network.spec(hosts["relay4"], hosts["relay5"])
    assert passed.latency_s == 2 * direct.latency_s
    assert passed.bandwidth_bytes_per_s == direct.bandwidth_bytes_per_s / 2


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.FREEZE])
def test_the_loss_of_a_host_in_between_is_survived(kind: FaultKind) -> None:
    fault = HostFault(kind, "data1", at_s=4.0, duration_s=5.0)
    scenario = replace(SCENARIO, faults=(fault,), calm_s=60.0, num_iterations=12)
    assert Simulation(scenario).run().num_iterations == 12


def test_storms_strike_runs_in_which_half_of_the_relays_are_outbound() -> None:
    failures, tally = weather([2, 6, 10, 14, 18, 22])
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > 3, tally
