"""What a node sends and computes does not grow with the run."""

from dataclasses import replace

import pytest

from decod.ids import NodeId, RunId
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.elections import election_storm
from decod.sim.kernel import core_stopwatch
from decod.sim.meter import NodeCost
from decod.sim.profile import wire_bytes
from decod.sim.scenario import Scenario
from decod.sim.simulation import Simulation
from decod.wire import codec
from tests.support.messages import control_messages

NUM_STAGES = 4
RELAYS_PER_DATA_NODE = 24


@pytest.mark.parametrize("message", control_messages(), ids=lambda message: type(message).__name__)
def test_a_size_is_that_of_the_encoded_message(message: codec.m.Message) -> None:
    """A remembered size differs by the texts and numbers of the first of its kind."""
    envelope = codec.encode(RunId("a" * 26), NodeId("a" * 52), 1, 1, message)
    assert wire_bytes(message) == pytest.approx(envelope.ByteSize(), abs=80)


def costs(num_relays: int) -> tuple[float, NodeCost]:
    """Return an iteration's length, and what it costs a node that does not lead.

    The search for better flows goes by its own rounds, so it is left out.
    """
    num_data_nodes = num_relays // RELAYS_PER_DATA_NODE
    scenario = Scenario(
        seed=1,
        batch=BatchConfig(num_data_nodes=num_data_nodes, num_microbatches=8),
        num_relays=num_relays,
        stages=StagesConfig(num_relay_stages=NUM_STAGES),
        num_iterations=5,
        protocol=ProtocolConfig(
            min_nodes_per_stage=num_relays // NUM_STAGES,
            min_data_nodes=num_data_nodes,
            max_peers_per_stage=3,
            routing="greedy",
        ),
    )
    with core_stopwatch() as stopwatch:
        simulation = Simulation(scenario, stopwatch=stopwatch)
        result = simulation.run()
    found = simulation.meter.costs
    del found[simulation.leader.name]
    return result.duration_s / result.num_iterations, NodeCost.mean(list(found.values()))


def test_costs_of_a_run_are_not_measured_unless_it_has_a_stopwatch() -> None:
    scenario = Scenario(
        seed=1, num_relays=2, stages=StagesConfig(num_relay_stages=1), num_iterations=3
    )
    plain = Simulation(replace(scenario))
    with core_stopwatch() as stopwatch:
        timed = Simulation(scenario, stopwatch=stopwatch)
        assert timed.run().trace == plain.run().trace
    for simulation, measured in ((timed, True), (plain, False)):
        for cost in simulation.meter.costs.values():
            assert cost.control_bytes > cost.num_control > 0
            assert (cost.core_s > 0) is measured


def test_what_a_node_passes_on_counts_where_it_comes_from() -> None:
    """In this storm a cut link has one relay pass on, for some seconds, all that two nodes say."""
    simulation = Simulation(election_storm(179548097799471))
    simulation.run()
    shares = [host.bytes_passed_on / host.control_bytes_sent for host in simulation.hosts.values()]
    assert 0.1 < max(shares) < 1.0
    assert min(shares) < 0.1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_of_a_large_run_sends_no_more_than_one_of_a_small_run() -> None:
    """Heartbeats and questions go by time, so the costs are those of a second."""
    (small_s, small), (large_s, large) = costs(24), costs(192)
    assert large.num_control / large_s < 1.5 * small.num_control / small_s
    assert large.control_bytes / large_s < 1.5 * small.control_bytes / small_s
    # Members of a stage exchange their sums with each other, so there are more events.
    assert large.core_s / large.num_events < 1.5 * small.core_s / small.num_events
