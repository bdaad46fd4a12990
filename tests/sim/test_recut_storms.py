"""Models that are cut anew in bad weather."""

from dataclasses import replace
from typing import Any

import pytest

from decod.protocol.state.rollback import stages_with
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.sim.invariants import InvariantViolation
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.simulation import Simulation
from decod.sim.storm import recut_storm, weather
from tests.support.quick import first_of


@pytest.mark.parametrize("first", first_of(range(0, 60, 15)))
def test_they_survive_storms(first: int) -> None:
    failures, tally = weather(range(first, first + 15), recut_storm)
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > 10, tally
    assert tally["cut anew"] > 10, tally


CALM = Scenario(
    num_relays=4,
    num_iterations=8,
    stages=StagesConfig(num_relay_stages=2),
    protocol=ProtocolConfig(iteration_timeout_s=20.0),
    faults=(HostFault(FaultKind.RECUT, "data0", at_s=4.0),),
)


def test_nothing_is_computed_again_where_all_can_write_in_time() -> None:
    result = Simulation(CALM).run()
    assert result.record.counts["run.recut"] == 1
    assert result.record.counts["run.returned"] == 0
    assert result.num_iterations == 8


def test_a_full_disk_leaves_the_old_cut() -> None:
    full = HostFault(FaultKind.DISK, "relay1", at_s=1.0, duration_s=500.0)
    result = Simulation(replace(CALM, num_iterations=40, faults=(full, *CALM.faults))).run()
    assert result.record.counts["run.recut"] == 0
    (failed,) = result.record.of("recut.failed")
    assert "relay1 did not write" in failed
    assert result.num_iterations == 40


def test_a_core_that_fetches_too_little_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(*arguments: Any) -> list[int]:
        return stages_with(*arguments)[:1]

    monkeypatch.setattr("decod.protocol.state.rollback.stages_with", first)
    with pytest.raises(InvariantViolation, match=r"CORE.*Load"):
        Simulation(CALM).run()
