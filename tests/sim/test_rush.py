"""Many volunteers come at once: the run takes all of them, and loses nothing by it."""

import pytest

from decod.sim.scenario import rush_scenario
from decod.sim.simulation import Simulation

WITHIN_S = 180.0
"""All are members then; the last of them comes after a minute."""


def admitted_s(num_volunteers: int, *, num_relay_stages: int, num_iterations: int) -> float:
    """Return when all volunteers were members of a run that has lost no iteration."""
    planned = rush_scenario(
        num_volunteers, num_relay_stages=num_relay_stages, num_iterations=num_iterations
    )
    simulation = Simulation(planned)
    result = simulation.run()
    assert result.num_iterations == num_iterations
    for event in ("iteration.aborted", "iteration.mended", "member.lost", "candidate.lost"):
        assert not result.record.counts[event], event
    return next(now_s for now_s, num in simulation.meter.members if num == num_volunteers + 1)


def test_a_rush_of_volunteers_enters_without_loss() -> None:
    assert admitted_s(30, num_relay_stages=3, num_iterations=25) < WITHIN_S


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_volunteers_of_one_minute_are_members_within_three() -> None:
    assert admitted_s(1000, num_relay_stages=10, num_iterations=10) < WITHIN_S
