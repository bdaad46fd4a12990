"""What data nodes vouch for is what was committed, whatever happens to relays meanwhile."""

from dataclasses import replace

import pytest

from decod.sim.scenario import Scenario
from decod.sim.simulation import Simulation
from tests.sim.test_runs import TOGETHER, enough_for_all, faulty_scenario, random_kill
from tests.support.quick import first_of


def finished(scenario: Scenario) -> Simulation:
    simulation = Simulation(scenario)
    simulation.run()
    return simulation


def vouched_for(simulation: Simulation, name: str) -> int:
    """Returns the microbatches of a relay for which the data nodes vouch."""
    relay = simulation.hosts[name].node_id
    return sum(host.work[relay] for host in simulation.data_hosts)


def require_each_stage_counted(simulation: Simulation) -> None:
    """Each committed microbatch counts for one relay of each stage."""
    for data in simulation.data_hosts:
        relays = sum(data.work.values()) - data.work[data.node_id]
        assert relays == simulation.scenario.stages.num_relay_stages * data.work[data.node_id]


@pytest.mark.parametrize("num_data_nodes", [1, 2])
def test_all_that_is_committed_is_vouched_for_once(num_data_nodes: int) -> None:
    scenario = enough_for_all(
        replace(TOGETHER, batch=replace(TOGETHER.batch, num_data_nodes=num_data_nodes))
    )
    simulation = finished(scenario)
    require_each_stage_counted(simulation)
    committed = sum(host.work[host.node_id] for host in simulation.data_hosts)
    assert committed == scenario.num_iterations * scenario.batch.num_microbatches * num_data_nodes
    for name in scenario.host_names[num_data_nodes:]:
        host = simulation.hosts[name]
        assert vouched_for(simulation, name) == host.work[host.node_id]


@pytest.mark.parametrize("seed", first_of(range(12), 4))
def test_the_relay_that_took_a_lost_ones_place_is_vouched_for(seed: int) -> None:
    """A relay that dies may not hear that its last iteration is committed, and no other."""
    scenario = faulty_scenario(seed)
    scenario = replace(scenario, faults=(*scenario.faults, random_kill(scenario)))
    simulation = finished(scenario)
    require_each_stage_counted(simulation)
    most = scenario.batch.num_microbatches * scenario.batch.num_data_nodes
    for name in scenario.host_names[scenario.batch.num_data_nodes :]:
        host = simulation.hosts[name]
        unheard = vouched_for(simulation, name) - host.work[host.node_id]
        assert 0 <= unheard <= most * host.life
