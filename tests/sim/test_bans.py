"""Nodes are banned in the middle of a run: it goes on, and all learn of it. All rules hold."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from decod.protocol.core.effects import StopReason
from decod.run.protocol_config import ProtocolConfig
from decod.sim.core import view_of
from decod.sim.elections import election_storm
from decod.sim.kernel import seeded
from decod.sim.scenario import Cut, FaultKind, HostFault, Scenario
from decod.sim.simulation import Simulation
from decod.sim.storm import local_storm, storm_scenario, weather

LEARNT_WITHIN_S = 30.0

CALM = Scenario(
    seed=6, num_relays=8, num_iterations=12, protocol=ProtocolConfig(min_nodes_per_stage=4)
)


def ban(host: str, at_s: float, duration_s: float = 1000.0) -> HostFault:
    return HostFault(FaultKind.BAN, host, at_s=at_s, duration_s=duration_s)


def learnt_s(simulation: Simulation) -> dict[str, float]:
    """Returns when each host first had a list of bans."""
    first: dict[str, float] = {}
    for line in simulation.trace.lines:
        time, host, *_ = line.split()
        if " nodes are banned from the run" in line:
            first.setdefault(host, float(time))
    return first


def test_a_relay_is_banned_in_mid_run() -> None:
    simulation = Simulation(replace(CALM, faults=(ban("relay3", 12.0),)))
    result = simulation.run()
    assert result.num_iterations == 12
    relay = simulation.hosts["relay3"]
    assert relay.stop is not None
    assert relay.stop.reason is StopReason.BANNED
    assert "it lies" in relay.stop.detail
    assert result.record.counts["iteration.mended"] == 1
    assert result.record.counts["iteration.aborted"] == 0
    learnt = learnt_s(simulation)
    assert learnt.keys() == simulation.hosts.keys()
    assert max(learnt.values()) < 12.5
    view = view_of(simulation.hosts["data0"].machine)
    assert view is not None
    assert relay.node_id not in view


def test_a_ban_ends_and_the_relay_is_a_member_again() -> None:
    simulation = Simulation(replace(CALM, num_iterations=20, faults=(ban("relay3", 12.0, 10.0),)))
    simulation.run()
    relay = simulation.hosts["relay3"]
    assert relay.stop is not None
    assert relay.stop.reason is StopReason.FINISHED
    assert not relay.disk.bans.banned


def test_members_that_were_cut_off_learn_of_a_ban_from_their_neighbours() -> None:
    """Two members reach none but each other for a while, so no list gets to them from others."""
    others = tuple(name for name in CALM.host_names if name not in ("relay1", "relay5"))
    cuts = (Cut(("relay1", "relay5"), others, at_s=11.9, duration_s=4.0),)
    simulation = Simulation(replace(CALM, faults=(ban("relay3", 12.0),), cuts=cuts))
    assert simulation.run().num_iterations == 12
    late = {name: s for name, s in learnt_s(simulation).items() if s > 12.5}
    assert late.keys() == {"relay1", "relay5"}
    assert max(late.values()) < 12.0 + LEARNT_WITHIN_S


def test_a_data_node_is_banned_and_the_iteration_is_repeated_without_it() -> None:
    scenario = replace(
        CALM, batch=replace(CALM.batch, num_data_nodes=2), faults=(ban("data1", 12.0),)
    )
    simulation = Simulation(scenario)
    assert simulation.run().num_iterations == 12
    stop = simulation.hosts["data1"].stop
    assert stop is not None
    assert stop.reason is StopReason.BANNED


def test_a_leader_that_is_cut_off_can_not_ban_those_who_lead_by_now() -> None:
    """It bans both other data nodes while nobody hears it, and one of them is elected."""
    failures, tally = weather([308], with_bans(election_storm))
    assert not failures, failures
    assert tally["leaders elected"]


def with_bans(drawn: Callable[[int], Scenario]) -> Callable[[int], Scenario]:
    """Returns runs with other faults, and with bans that begin and end among these."""

    def drawn_with_bans(seed: int) -> Scenario:
        scenario, rng = drawn(seed), seeded(seed, "bans")
        assert scenario.calm_s is not None
        faults = [
            ban(
                rng.choice(scenario.host_names),
                round(rng.uniform(2.5, scenario.calm_s), 3),
                round(rng.uniform(0.01, 15.0), 3),
            )
            for _ in range(rng.randint(1, 4))
        ]
        # A stage whose only member trickles, since the others are banned, can't go on.
        cuts = tuple(cut for cut in scenario.cuts if not cut.rate_bytes_per_s)
        return replace(scenario, faults=(*scenario.faults, *faults), cuts=cuts)

    return drawn_with_bans


@pytest.mark.parametrize("drawn", [storm_scenario, election_storm, local_storm])
def test_bans_in_a_storm_break_no_rule(drawn: Callable[[int], Scenario]) -> None:
    failures, tally = weather(range(6), with_bans(drawn))
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > 3
