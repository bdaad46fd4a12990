"""What nodes believe of their links comes to what is true, and follows when that changes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from decod.planner.cost import Link, link_cost_s
from decod.protocol.node_machine import NodeMachine
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.network import Links, LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Scenario
from decod.sim.simulated_host import SimHost
from decod.sim.simulation import Simulation

PROFILE = replace(ComputeProfile(), activation_bytes=500_000, parameter_bytes=10_000)

SCENARIO = Scenario(
    batch=BatchConfig(num_data_nodes=2, num_microbatches=4),
    num_relays=8,
    stages=StagesConfig(num_relay_stages=2),
    num_iterations=25,
    profile=PROFILE,
    links=Links(LinkSpec(latency_s=0.08, bandwidth_bytes_per_s=4e6), spread_ratio=0.8),
    protocol=ProtocolConfig(min_nodes_per_stage=4, min_data_nodes=2),
)
"""Each direction of each link has its own latency and bandwidth, up to nine times each other's."""


def core(host: SimHost) -> NodeMachine:
    assert isinstance(host.machine, NodeMachine)
    return host.machine


def true_compute_s(host: SimHost) -> float:
    if host.name.startswith("data"):
        # Embedding forward and backward, which is twice as long, and the head both ways.
        return (3 * PROFILE.embed_s + PROFILE.head_s) / 2 / host.speed
    return (PROFILE.forward_s + 2 * PROFILE.forward_s) / 2 / host.speed


def true_cost_s(simulation: Simulation, here: SimHost, there: SimHost) -> float:
    forth = simulation.world.network.spec(here, there)
    back = simulation.world.network.spec(there, here)
    return link_cost_s(
        compute_here_s=true_compute_s(here),
        compute_there_s=true_compute_s(there),
        forth=Link(forth.latency_s, forth.bandwidth_bytes_per_s),
        back=Link(back.latency_s, back.bandwidth_bytes_per_s),
        size_bytes=PROFILE.activation_bytes,
    )


def neighbours(simulation: Simulation) -> Iterator[tuple[SimHost, SimHost]]:
    hosts = simulation.world.hosts
    for host in hosts.values():
        for peer in core(host).context.neighbours.next:
            yield host, hosts[peer]


def believed_s(here: SimHost, there: SimHost) -> float:
    return core(here).context.links.cost_s(there.node_id)


@pytest.mark.parametrize("seed", range(3))
def test_measured_costs_come_to_the_true_ones_at_both_ends(seed: int) -> None:
    """Including links that no flow ever used: those have been probed."""
    simulation = Simulation(replace(SCENARIO, seed=seed))
    simulation.run()
    pairs = list(neighbours(simulation))
    assert len(pairs) == 2 * 4 + 4 * 4 + 4 * 2
    for here, there in pairs:
        true_s = true_cost_s(simulation, here, there)
        assert believed_s(here, there) == pytest.approx(true_s, rel=0.1), (here.name, there.name)
        assert believed_s(there, here) == pytest.approx(believed_s(here, there), rel=0.1)


def test_probes_are_few() -> None:
    simulation = Simulation(SCENARIO)
    simulation.run()
    hosts = simulation.hosts.values()
    assert sum(host.num_probes for host in hosts) > 0
    for host in hosts:
        neighbours = core(host).context.neighbours
        num_neighbours = len({*neighbours.previous, *neighbours.next})
        # Links that look slow are probed once more, lest it was somebody else's traffic.
        assert host.num_probes <= 1.5 * num_neighbours


def test_reports_cease_when_nothing_changes() -> None:
    """One for each neighbour, and one more where what was guessed first has been measured."""
    simulation = Simulation(replace(SCENARIO, num_iterations=50))
    result = simulation.run()
    num = dict(result.control_by_kind)["LinkReport"] * len(simulation.hosts) * 50
    assert num < 4 * 2 * len(list(neighbours(simulation)))


def test_a_link_and_a_host_that_become_ten_times_slower_are_seen_by_their_neighbours() -> None:
    """Within few iterations after the change, at the other end too. Flows stay where they are."""
    stay = replace(SCENARIO.protocol, routing="greedy")
    simulation = Simulation(replace(SCENARIO, num_iterations=40, protocol=stay))
    relays = [host for name, host in simulation.hosts.items() if not name.startswith("data")]
    seen: dict[str, float] = {}

    def used() -> tuple[SimHost, SimHost]:
        """A link between relays that carries a flow, so that transfers measure it."""
        for host in relays:
            for entry in getattr(core(host).strategy.flows, "entries", {}).values():
                there = simulation.world.hosts[entry.downstream]
                if there in relays:
                    return host, there
        raise AssertionError("no flow between relays")

    def change() -> None:
        here, there = used()
        spec = simulation.world.network.spec(here, there)
        slow = replace(spec, bandwidth_bytes_per_s=spec.bandwidth_bytes_per_s / 10)
        simulation.world.network.change(here, there, slow)
        there.speed /= 10
        simulation.kernel.after(0.5, look, here, there, simulation.checker.num_iterations)

    def look(here: SimHost, there: SimHost, iteration: int) -> None:
        true_s = true_cost_s(simulation, here, there)
        for host, peer in ((here, there), (there, here)):
            if abs(believed_s(host, peer) / true_s - 1) < 0.1:
                seen.setdefault(host.name, simulation.checker.num_iterations - iteration)
        if len(seen) < 2:
            simulation.kernel.after(0.5, look, here, there, iteration)

    simulation.kernel.at(15.0, change)
    simulation.run()
    assert len(seen) == 2
    assert max(seen.values()) <= 3
