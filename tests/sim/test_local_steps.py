"""Runs whose nodes step by themselves, in virtual time: averages hold what nodes have learnt.

The simulated devices know what each node has trained on. The checker compares that with the batches
and with the averages.
"""

from dataclasses import replace

import pytest

from decod.ids import MicrobatchId
from decod.protocol.averaging.averager import Weight
from decod.protocol.strategy.step_policy import LocalSteps, weight_of
from decod.sim.elections import election_storm
from decod.sim.invariants import InvariantViolation
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.simulation import Simulation
from decod.sim.storm import local_storm, weather

EVERY = 4
RUN = Scenario(seed=1, num_relays=6, num_iterations=14, sync_every=EVERY)


def test_members_share_what_they_hold_after_each_average() -> None:
    simulation = Simulation(RUN)
    simulation.run()
    for host in simulation.hosts.values():
        assert (host.compute.iteration, host.compute.anchor) == (14, 14)
        assert not any(host.compute.learnt)


def test_a_newcomer_enters_between_two_averages() -> None:
    """It starts from the anchor, which stands still: nobody waits for it."""
    fault = HostFault(FaultKind.RESTART, "relay1", at_s=5.0, duration_s=1.0)
    simulation = Simulation(replace(RUN, num_iterations=30, faults=(fault,), calm_s=30.0))
    result = simulation.run()
    assert result.num_iterations == 30
    assert simulation.hosts["relay1"].compute.iteration == 30
    assert not result.record.of("replay.failed")


def test_an_average_that_travels_counts_one_outer_step_later() -> None:
    """It holds what was learnt before the last outer step, and the last step misses nothing."""
    simulation = Simulation(replace(RUN, overlap=1))
    result = simulation.run()
    assert result.num_iterations == 14
    assert not result.record.of("average.dropped")


@pytest.mark.parametrize("overlap", [0, 1])
def test_what_is_lost_with_a_member_is_counted(overlap: int) -> None:
    fault = HostFault(FaultKind.KILL, "relay1", at_s=7.0)
    disturbed = replace(RUN, overlap=overlap, num_iterations=18, faults=(fault,), calm_s=30.0)
    lost = Simulation(disturbed).run().record.of("learning.lost")
    assert lost
    assert all("what stage 2 learnt from" in line for line in lost)
    undisturbed = Simulation(replace(disturbed, faults=(), calm_s=None)).run()
    assert not undisturbed.record.of("learning.lost")


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_they_survive_storms(first: int) -> None:
    failures, tally = weather(range(first, first + 10), local_storm)
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > 5, tally


@pytest.mark.parametrize("first", [0, 10])
def test_they_survive_what_strikes_their_leaders(first: int) -> None:
    failures, tally = weather(
        range(first, first + 10), lambda seed: replace(election_storm(seed), sync_every=EVERY)
    )
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > 5, tally


def test_a_core_that_forgets_what_a_node_has_learnt_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the checks above would check nothing."""

    def forgetful(self: LocalSteps, folded: tuple[MicrobatchId, ...]) -> Weight:
        return weight_of(folded)

    monkeypatch.setattr(LocalSteps, "weigh", forgetful)
    with pytest.raises(InvariantViolation):
        Simulation(RUN).run()
