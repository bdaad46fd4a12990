"""Runs of described hosts: their flows may be laid out beforehand, and their time is measured."""

from dataclasses import replace

import pytest

from decod.errors import ConfigError
from decod.ids import NodeId
from decod.lab.sim.layouts import LAYOUTS, ROUTING_NAMES, with_routing
from decod.lab.sim.paper_churn import TABLES, churn_scenario
from decod.planner.graph import broken_rules
from decod.protocol.flows.building import DataFlows
from decod.protocol.node_machine import NodeMachine
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.core import InstalledFlows, Machine
from decod.sim.meter import mean_figures
from decod.sim.network import Links, LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import FaultKind, HostFault, HostSpec, Scenario
from decod.sim.simulation import PlannedRoutes, Simulation, true_graph

PROFILE = ComputeProfile(jitter_ratio=0.0, activation_bytes=1_000_000, parameter_bytes=1000)
SLOW, FAST = LinkSpec(0.05, 2e6), LinkSpec(0.01, 1e8)


def scenario(routing: str = "flow", *faults: HostFault) -> Scenario:
    """Two stages of two relays; one way through them is fast, the rest slow."""
    stages = {"d": 0, "a1": 1, "b1": 1, "a2": 2, "b2": 2}
    pairs = [("d", "a1"), ("a1", "b2"), ("b2", "d")]
    fast = dict.fromkeys([*pairs, *((end, begin) for begin, end in pairs)], FAST)
    scenario = Scenario(
        batch=BatchConfig(num_data_nodes=1, num_microbatches=4),
        num_relays=4,
        stages=StagesConfig(num_relay_stages=2),
        num_iterations=3,
        join_spread_s=0.0,
        profile=PROFILE,
        links=Links(SLOW, fast),
        faults=faults,
        protocol=ProtocolConfig(min_nodes_per_stage=2),
        hosts=tuple(
            HostSpec(name=name, stage_index=stage, capacity=4 if stage == 0 else 3, profile=PROFILE)
            for name, stage in stages.items()
        ),
    )
    return with_routing(scenario, routing)


def core(machine: Machine) -> NodeMachine:
    machine = getattr(machine, "wrapped", machine)
    assert isinstance(machine, NodeMachine)
    return machine


@pytest.mark.parametrize("routing", ROUTING_NAMES)
def test_every_routing_commits_every_microbatch(routing: str) -> None:
    simulation = Simulation(scenario(routing))
    assert simulation.run().num_iterations == 3
    figures = simulation.meter.figures
    assert [f.iteration for f in figures] == [1, 2, 3]
    assert {f.num_microbatches for f in figures} == {4}
    assert {f.wasted_s for f in figures} == {0.0}
    assert all(f.time_per_microbatch_s == f.duration_s / 4 for f in figures)


def test_installed_flows_are_those_of_the_plan() -> None:
    simulation = Simulation(scenario("optimal"))
    names = {host.node_id: name for name, host in simulation.hosts.items()}
    simulation.run()
    machine = simulation.leader.machine
    assert isinstance(machine, InstalledFlows)
    flows = core(machine).strategy.flows
    assert isinstance(flows, DataFlows)
    firsts = sorted(names[granted.peer] for granted in flows.complete.values())
    assert firsts == ["a1", "a1", "a1", "b1"], "three fit on the fast way"
    kinds = {kind.__name__ for h in simulation.hosts.values() for kind in h.control_by_kind}
    assert not kinds & {"FlowCost", "RequestFlow", "FlowAnswer", "Withdraw"}


@pytest.mark.parametrize("routing", ROUTING_NAMES)
def test_flows_are_laid_out_anew_without_a_lost_relay(routing: str) -> None:
    """b1 dies in the first iteration: its work is wasted, and a1, with room for 3, goes on
    alone.
    """
    simulation = Simulation(scenario(routing, HostFault(FaultKind.KILL, "b1", at_s=2.5)))
    simulation.run()
    first, *later = simulation.meter.figures
    assert first.wasted_s > 0
    assert first.duration_s > max(f.duration_s for f in later)
    assert {f.wasted_s for f in later} == {0.0}


def test_flows_of_a_mended_iteration_and_those_laid_out_for_the_next_are_told_apart() -> None:
    """A mend changes the view, not the flows; the next iteration has that view and other flows."""
    mended = churn_scenario(3, TABLES[3][2], 11, num_iterations=3)
    simulation = Simulation(with_routing(mended, "greedy"))
    assert simulation.run().num_iterations == 3
    lost = sum(not host.reachable for host in simulation.hosts.values())
    assert lost > 0


def test_the_meter_counts_the_time_on_links() -> None:
    """One microbatch, one relay: four transfers, of which nothing waits for another."""
    lone = replace(
        scenario(),
        num_relays=1,
        stages=StagesConfig(num_relay_stages=1),
        batch=BatchConfig(num_microbatches=1),
        links=Links(SLOW),
        protocol=ProtocolConfig(),
        hosts=tuple(
            HostSpec(name=name, stage_index=stage, capacity=1, profile=PROFILE)
            for name, stage in (("d", 0), ("r", 1))
        ),
    )
    simulation = Simulation(lone)
    simulation.run()
    figures = simulation.meter.figures
    # Out, back, and both again for the gradient: half a second for the bytes, and the latency.
    assert figures[-1].communication_s == pytest.approx(4 * 0.55)
    compute_s = 3 * PROFILE.forward_s + 3 * PROFILE.embed_s + PROFILE.head_s
    assert figures[-1].duration_s == pytest.approx(4 * 0.55 + compute_s, abs=0.5)
    means = mean_figures(figures)
    assert means["microbatches"] == 1
    assert mean_figures([])["duration_s"] is None


def test_true_costs_follow_from_devices_and_links() -> None:
    described = scenario()
    ids = {name: NodeId(name) for name in described.host_names}
    graph = true_graph(described, ids)
    data_s, relay_s = PROFILE.pass_s(data=True), PROFILE.pass_s(data=False)
    expected_s = (data_s + relay_s) / 2 + 0.01 + 1e6 / 1e8
    assert graph.costs[ids["d"], ids["a1"]] == pytest.approx(expected_s)
    assert len(graph.costs) == 2 + 4 + 2
    plan = PlannedRoutes(with_routing(described, "greedy"), ids)
    routes = plan.layout([*ids.values()])
    assert broken_rules(graph, routes) == []
    assert len(routes) == 4
    assert plan.layout([ids["d"], ids["a1"]]) == [], "a stage without members carries nothing"


def test_drawn_hosts_find_their_own_flows() -> None:
    with pytest.raises(ConfigError, match="describe the hosts"):
        Scenario(layout=LAYOUTS["fixed"])


def test_a_data_node_keeps_its_relays_busy() -> None:
    """Two relays a stage at home lines. The data node has most to do, and is never without work.

    If all microbatches over one relay came before those over its neighbour, an iteration would take
    a third longer. So it would if the last ones began when all others are home.
    """
    home = LinkSpec(latency_s=0.04, bandwidth_bytes_per_s=2.5e6)
    sizes = ComputeProfile(jitter_ratio=0.0, activation_bytes=266_240, parameter_bytes=936_960)
    data = replace(sizes, embed_s=0.07, head_s=0.1, backward_ratio=1.7)
    relay = replace(sizes, forward_s=0.12, backward_ratio=1.2)
    num = 16
    simulation = Simulation(
        Scenario(
            batch=BatchConfig(num_data_nodes=1, num_microbatches=num),
            num_relays=4,
            stages=StagesConfig(num_relay_stages=2),
            num_iterations=4,
            join_spread_s=0.0,
            profile=sizes,
            links=Links(home, {}),
            protocol=ProtocolConfig(min_nodes_per_stage=2),
            hosts=(
                HostSpec(name="d", stage_index=0, capacity=num, profile=data),
                *(
                    HostSpec(name=f"{stage}{k}", stage_index=stage, capacity=64, profile=relay)
                    for stage in (1, 2)
                    for k in (0, 1)
                ),
            ),
        )
    )
    simulation.run()
    busy_s = num * (data.embed_s * (1 + data.backward_ratio) + data.head_s)
    assert simulation.meter.figures[-1].duration_s < 1.1 * busy_s
