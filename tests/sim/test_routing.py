"""Flows of a running simulation: they become cheap, stay cheap, and go round what is slow."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from decod.ids import NodeId
from decod.lab.sim.layouts import with_routing
from decod.protocol.flows.building import DataFlows, RelayFlows
from decod.protocol.node_machine import NodeMachine
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.meter import Meter
from decod.sim.network import Links, LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Scenario
from decod.sim.simulated_host import SimHost
from decod.sim.simulation import Simulation
from tests.support.quick import first_of

SCENARIO = Scenario(
    batch=BatchConfig(num_data_nodes=2, num_microbatches=4),
    num_relays=12,
    stages=StagesConfig(num_relay_stages=3),
    capacity_min=2,
    capacity_max=4,
    num_iterations=60,
    speed_spread_ratio=0.3,
    profile=replace(ComputeProfile(), activation_bytes=500_000, parameter_bytes=10_000),
    links=Links(LinkSpec(latency_s=0.05, bandwidth_bytes_per_s=4e6), spread_ratio=0.8),
    protocol=ProtocolConfig(min_nodes_per_stage=4, min_data_nodes=2),
)


def core(host: SimHost) -> NodeMachine:
    assert isinstance(host.machine, NodeMachine)
    return host.machine


def hops(simulation: Simulation) -> Counter[tuple[NodeId, NodeId]]:
    """How many flows use each link at present."""
    found: Counter[tuple[NodeId, NodeId]] = Counter()
    for host in simulation.hosts.values():
        flows = core(host).strategy.flows
        if isinstance(flows, RelayFlows):
            found.update((host.node_id, entry.downstream) for entry in flows.entries.values())
        elif isinstance(flows, DataFlows):
            found.update((host.node_id, granted.peer) for granted in flows.complete.values())
    return found


def true_cost_s(simulation: Simulation) -> float:
    """Mean over the present flows of what their links take, by what the network really does."""
    hosts, size = simulation.world.hosts, SCENARIO.profile.activation_bytes
    used = hops(simulation)
    total = 0.0
    for (here, there), num in used.items():
        forth = simulation.world.network.spec(hosts[here], hosts[there])
        back = simulation.world.network.spec(hosts[there], hosts[here])
        rate = forth.bandwidth_bytes_per_s + back.bandwidth_bytes_per_s
        total += num * ((forth.latency_s + back.latency_s) / 2 + 2 * size / rate)
    return total / (sum(used.values()) / (SCENARIO.stages.num_relay_stages + 1))


@pytest.mark.parametrize("seed", first_of(range(3)))
def test_searches_make_flows_cheaper_than_the_first_ones_and_all_is_committed(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Both begin with the flows of Request Flow, which stand after 8 s."""
    changed: Counter[tuple[str, str]] = Counter()
    noted = Meter.noted

    def count(meter: Meter, host: SimHost, event: str, fields: Any) -> None:
        changed[routing, event] += 1
        noted(meter, host, event, fields)

    monkeypatch.setattr(Meter, "noted", count)
    scenario = replace(SCENARIO, seed=seed, num_iterations=16)
    for routing in ("flow", "gwtf"):
        simulation = Simulation(with_routing(scenario, routing))
        found: list[float] = []
        for at_s in (8.0, 45.0):
            simulation.kernel.at(at_s, lambda s=simulation, f=found: f.append(true_cost_s(s)))
        result = simulation.run()
        assert result.num_iterations == scenario.num_iterations
        first, searched = found
        assert searched < 0.97 * first
    assert changed["gwtf", "flow.redirected"] > 0
    assert changed["gwtf", "flow.exchanged"] > 0


@pytest.mark.parametrize("seed", first_of(range(3)))
def test_flows_leave_a_link_that_becomes_ten_times_slower(seed: int) -> None:
    """Both ways, within five iterations; nobody is banned for it."""
    simulation = Simulation(replace(SCENARIO, seed=seed, num_iterations=30))
    left: list[int] = []

    def change() -> None:
        hosts = simulation.world.hosts
        (here, there), _ = hops(simulation).most_common(1)[0]
        for ends in ((hosts[here], hosts[there]), (hosts[there], hosts[here])):
            spec = simulation.world.network.spec(*ends)
            slow = replace(spec, bandwidth_bytes_per_s=spec.bandwidth_bytes_per_s / 10)
            simulation.world.network.change(*ends, slow)
        simulation.kernel.after(0.5, look, here, there, simulation.checker.num_iterations)

    def look(here: NodeId, there: NodeId, iteration: int) -> None:
        if hops(simulation)[here, there] == 0:
            left.append(simulation.checker.num_iterations - iteration)
        else:
            simulation.kernel.after(0.5, look, here, there, iteration)

    simulation.kernel.at(60.0, change)
    simulation.run()
    assert left
    assert left[0] <= 5
