"""A member that sends slowly neither holds the others up nor loses what it has learnt."""

from dataclasses import replace

import pytest

from decod.daemon.status import COMPUTING, SENDING, SlowMember, slow_members
from decod.run.stages_config import StagesConfig
from decod.sim.network import Links, LinkSpec
from decod.sim.scenario import FaultKind, HostFault, Scenario, sync_of
from decod.sim.simulation import Result, Simulation
from tests.support.quick import first_of

RUN = Scenario(seed=1, num_relays=6, num_iterations=25, sync=sync_of(5, overlap=True))
SMALL = replace(RUN.profile, activation_bytes=1000)
"""Averages load the links, and activations don't."""


def run(slower: float, *, num_phases: int, quorum: float = 1.0) -> tuple[Result, Simulation]:
    """Run with one relay of three that sends to everybody more slowly."""
    usual = RUN.links.default
    slow = LinkSpec(usual.latency_s, usual.bandwidth_bytes_per_s / slower)
    others = [name for name in RUN.host_names if name != "relay0"]
    links = Links(usual, {("relay0", other): slow for other in others})
    sync = sync_of(5, overlap=True, num_phases=num_phases, quorum=quorum)
    scenario = replace(RUN, profile=SMALL, links=links, sync=sync)
    simulation = Simulation(scenario)
    result = simulation.run()
    assert result.num_iterations == RUN.num_iterations
    return result, simulation


@pytest.mark.parametrize("num_phases", first_of([2, 1]))
def test_a_member_ten_times_as_slow_reduces_less_and_holds_nobody_up(num_phases: int) -> None:
    undisturbed, _ = run(1, num_phases=num_phases)
    result, simulation = run(10, num_phases=num_phases)
    leader = simulation.leader.machine.leader
    assert leader is not None
    ((slow, share),) = leader.sync.slow
    assert (slow, share) == (simulation.hosts["relay0"].node_id, 3)
    assert not leader.sync.learning.num_late
    # The first average comes before anybody knows, and all wait for the last.
    assert result.duration_s < 1.15 * undisturbed.duration_s


@pytest.mark.parametrize("num_phases", first_of([2, 1]))
def test_what_comes_too_late_for_a_quorum_is_counted_and_not_lost(num_phases: int) -> None:
    waiting, _ = run(200, num_phases=num_phases)
    result, simulation = run(200, num_phases=num_phases, quorum=0.6)
    leader = simulation.leader.machine.leader
    assert leader is not None
    assert leader.sync.learning.num_late > 0
    assert not leader.sync.learning.num_lost
    assert result.duration_s < 0.9 * waiting.duration_s


@pytest.mark.parametrize("at_s", [11.9, 12.5])
def test_who_was_sending_to_a_lost_member_still_contributes(at_s: float) -> None:
    """What is on its way to the lost member never arrives. That does not mean a busy link."""
    usual = RUN.links.default
    slow = Links(LinkSpec(usual.latency_s, usual.bandwidth_bytes_per_s / 20))
    lost = HostFault(FaultKind.KILL, "relay0", at_s=at_s)
    scenario = replace(
        RUN, profile=SMALL, links=slow, sync=replace(RUN.sync, quorum=0.5), faults=(lost,)
    )
    simulation = Simulation(scenario)
    simulation.run()
    leader = simulation.leader.machine.leader
    assert leader is not None
    # Its own share of the iterations 1 to 5, of which each has 8 microbatches.
    assert leader.sync.learning.num_lost == {2: 16}


PLAIN = Scenario(
    seed=3,
    num_relays=3,
    stages=StagesConfig(num_relay_stages=3),
    num_iterations=8,
    speed_spread_ratio=0.0,
)
"""Each stage has one relay, so all microbatches pass through each."""


def named(scenario: Scenario) -> dict[str, SlowMember]:
    """Return whom the leader names as slow at the end of a run."""
    simulation = Simulation(scenario)
    assert simulation.run().num_iterations == scenario.num_iterations
    leader = simulation.leader.machine.leader
    assert leader is not None
    assert len(leader.seats.loads) == 1 + PLAIN.num_relays
    return {
        each.member.name: each for each in slow_members(leader.view.members, leader.seats.loads)
    }


def test_the_leader_hears_who_computes_slowly() -> None:
    slow = HostFault(FaultKind.SLOW, "relay1", at_s=3.0, duration_s=1000.0)
    found = named(replace(PLAIN, faults=(slow,)))
    assert list(found) == ["relay1"]
    assert found["relay1"].by == COMPUTING
    assert found["relay1"].share > 0.85
    assert found["relay1"].usual_share < 0.3


def test_the_leader_hears_who_sends_slowly() -> None:
    usual = PLAIN.links.default
    slow = LinkSpec(usual.latency_s, usual.bandwidth_bytes_per_s / 20)
    others = [name for name in PLAIN.host_names if name != "relay1"]
    links = Links(usual, {("relay1", other): slow for other in others})
    found = named(replace(PLAIN, links=links))
    assert list(found) == ["relay1"]
    assert found["relay1"].by == SENDING
    assert found["relay1"].share > 0.7


def test_nobody_is_named_if_all_are_alike() -> None:
    assert named(PLAIN) == {}
