"""Clipped runs in virtual time: every step is taken with the norm over all stages, or refused.

The simulated devices know which norm a batch must have, and refuse a step with another; and what
they would hold is a hash of it too.
"""

from dataclasses import replace

import pytest

from decod.ids import Iteration, NodeId
from decod.protocol.averaging.vote import Clipping
from decod.protocol.core import messages as m
from decod.protocol.core.effects import Effect
from decod.run.training_config import OptimizerConfig
from decod.sim.elections import election_storm
from decod.sim.invariants import InvariantViolation
from decod.sim.scenario import FaultKind, HostFault
from decod.sim.simulation import Simulation
from decod.sim.storm import storm_scenario, weather
from tests.sim.mortal import simulation_with_mortal
from tests.sim.test_elections import TOGETHER as UNCLIPPED
from tests.support.quick import first_of

CLIPPING = OptimizerConfig(clip_norm=1.0)
TOGETHER = replace(UNCLIPPED, optimizer=CLIPPING)


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.FREEZE])
@pytest.mark.parametrize(
    "message", ["ReducedPart", "GradientSquares", "GradientNorm", "Ready", "Average"]
)
def test_a_relay_that_is_lost_around_the_norm_costs_no_iteration(
    message: str, kind: FaultKind
) -> None:
    """Whoever says it: only the first of a stage says squares, and passes the norm on."""
    for relay in range(0, 6, 2):
        fault = HostFault(kind, f"relay{relay}", before_message=(message, 3), duration_s=8.0)
        scenario = replace(TOGETHER, seed=relay, faults=(fault,))
        assert Simulation(scenario).run().num_iterations == 5


@pytest.mark.parametrize("num_sent", [0, 1, 2])
def test_a_leader_that_is_lost_as_the_norm_goes_down_is_replaced(num_sent: int) -> None:
    """Some have taken the step and some have not: it is repeated, with the norm found anew."""

    def counts(message: m.Message) -> bool:
        return isinstance(message, m.GradientNorm) and message.averaging.iteration == Iteration(
            3, 1
        )

    simulation = simulation_with_mortal(TOGETHER, counts, num_sent)
    result = simulation.run()
    assert result.num_iterations == 5
    assert result.record.counts["leader.elected"] == 1
    assert any("iteration 3.1 is repeated: lost the leader" in line for line in result.trace)


def test_a_newcomer_steps_with_the_norms_of_those_it_follows() -> None:
    """A device of its own checks each of them; it enters level, and fetches nothing again."""
    fault = HostFault(FaultKind.RESTART, "relay1", at_s=5.0, duration_s=1.0)
    scenario = replace(TOGETHER, num_iterations=12, faults=(fault,), calm_s=30.0)
    simulation = Simulation(scenario)
    result = simulation.run()
    assert result.num_iterations == 12
    back = simulation.hosts["relay1"]
    assert back.compute.iteration == 12
    assert not result.record.of("replay.failed")


@pytest.mark.parametrize("first", first_of([0, 10, 20]))
def test_clipped_runs_survive_storms(first: int) -> None:
    seeds = range(first, first + 10)
    failures, tally = weather(seeds, lambda seed: replace(storm_scenario(seed), optimizer=CLIPPING))
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > 5, tally


@pytest.mark.parametrize("first", first_of([0, 10]))
def test_clipped_runs_survive_what_strikes_their_leaders(first: int) -> None:
    seeds = range(first, first + 10)
    failures, tally = weather(seeds, lambda seed: replace(election_storm(seed), optimizer=CLIPPING))
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > 5, tally


def test_some_storms_clip() -> None:
    drawn = [storm_scenario(seed).optimizer.clip_norm > 0 for seed in range(20)]
    assert drawn == [election_storm(seed).optimizer.clip_norm > 0 for seed in range(20)]
    assert sum(drawn) == 4


def test_the_command_of_a_clipped_run_says_so() -> None:
    assert "--clip-norm 1.0" in TOGETHER.command()
    assert "--clip-norm" not in UNCLIPPED.command()


def test_a_core_that_leaves_a_stage_out_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the checks above would check nothing."""

    add_stages = Clipping.add_stages

    def forgetful(self: Clipping, sender: NodeId, message: m.GradientSquares) -> list[Effect]:
        return add_stages(self, sender, replace(message, square_sums=()))

    monkeypatch.setattr(Clipping, "add_stages", forgetful)
    with pytest.raises(InvariantViolation, match="the norm over all stages is"):
        Simulation(TOGETHER).run()


def test_clipping_costs_each_node_a_few_messages_an_iteration() -> None:
    """The first of a stage sends its sum; the norm goes down the tree: as many as the votes."""
    plain, clipped = (
        Simulation(scenario).run().num_control_mean for scenario in (UNCLIPPED, TOGETHER)
    )
    print(f"{plain:.1f} control messages a node and iteration, {clipped:.1f} with clipping")
    assert clipped < plain + 3
