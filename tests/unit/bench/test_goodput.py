"""The figures of the goodput measurement, and how its faults are drawn."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from bench.child import BenchError  # noqa: E402
from bench.goodput import (  # noqa: E402
    CONDITIONS,
    DURATIONS_S,
    FAILURE_INTERVAL_S,
    FAULTS_FROM_S,
    REPAIR_S,
    WAYS,
    Figures,
    away,
    draw_faults,
    goodput_of,
    scenario,
    simulate,
)
from bench.kills import Outcome, away_from, run_of, shorten  # noqa: E402

from decod.sim.kernel import seeded  # noqa: E402
from decod.sim.scenario import FaultKind, HostFault  # noqa: E402

UNDISTURBED = Figures(
    duration_s=100.0,
    tokens_per_s=1000.0,
    lost_per_s=0.0,
    down=0.0,
    joining=0.0,
    num_failures=0,
    num_mended=0,
    num_repeated=0,
    num_iterations=10,
)


def test_a_million_chips_fail_every_half_minute() -> None:
    assert pytest.approx(26.3, abs=0.1) == FAILURE_INTERVAL_S


@pytest.mark.parametrize("num_hosts", [8, 100])
def test_the_rate_of_failures_does_not_depend_on_the_number_of_hosts(num_hosts: int) -> None:
    hosts = [f"relay{index}" for index in range(num_hosts)]
    until_s = FAULTS_FROM_S + 1000 * FAILURE_INTERVAL_S
    drawn = draw_faults(seeded(1, "test"), hosts, FaultKind.RESTART, until_s)
    # While a host is down, it does not fail.
    up = 1 - REPAIR_S / (REPAIR_S + num_hosts * FAILURE_INTERVAL_S)
    assert len(drawn) == pytest.approx(1000 * up, rel=0.1)
    assert sum(fault.duration_s for fault in drawn) / len(drawn) == pytest.approx(27.0, rel=0.1)
    instants = [fault.at_s for fault in drawn]
    assert instants == sorted(instants, key=lambda at_s: at_s or 0.0)


def test_a_host_does_not_fail_while_it_is_down() -> None:
    drawn = draw_faults(seeded(2, "test"), ["relay0"], FaultKind.RESTART, 5000.0)
    for before, after in itertools.pairwise(drawn):
        assert before.at_s is not None
        assert after.at_s is not None
        assert after.at_s > before.at_s + before.duration_s


@pytest.mark.parametrize("num_members", list(DURATIONS_S))
def test_all_ways_meet_the_same_hosts_and_faults(num_members: int) -> None:
    kinds = CONDITIONS["both"]
    planned = [scenario(num_members, way, kinds, seed=3, duration_s=100.0) for way in WAYS]
    assert {one.num_relays for one in planned} == {num_members}
    assert len({one.faults for one in planned}) == len({one.host_names[-1] for one in planned}) == 1
    assert planned[0].faults


def test_members_fill_their_stages() -> None:
    with pytest.raises(BenchError, match="30 members don't fill stages of 20"):
        scenario(30, WAYS[0], (), seed=1, duration_s=100.0)


def test_time_away_is_cut_to_the_measurement() -> None:
    faults = [
        HostFault(FaultKind.RESTART, "a", at_s=90.0, duration_s=20.0),
        HostFault(FaultKind.RESTART, "b", at_s=190.0, duration_s=50.0),
        HostFault(FaultKind.SLOW, "a", at_s=150.0, duration_s=10.0),
        HostFault(FaultKind.RESTART, "a", at_s=201.0, duration_s=10.0),
    ]
    openings = {"a": [80.0, 115.0], "b": [180.0]}
    # a: 10 s of its 20 s, and 5 s more. b is not back before the end.
    assert away(faults, openings, 100.0, 200.0) == (20.0, 5.0, 1)


def test_shares_of_goodput_add_up() -> None:
    disturbed = replace(UNDISTURBED, tokens_per_s=900.0, lost_per_s=40.0, down=0.05, joining=0.01)
    found = goodput_of(disturbed, UNDISTURBED)
    assert found.goodput == pytest.approx(0.86)
    assert found.rest == pytest.approx(0.04)
    assert found.of_present == pytest.approx(0.86 / 0.95)
    whole = found.goodput + found.lost + found.down + found.joining + found.rest
    assert whole == pytest.approx(1.0)


@pytest.mark.slow
def test_a_small_run_loses_learning_only_if_members_step_by_themselves() -> None:
    found = {}
    for way in WAYS:
        planned = scenario(4, way, (), seed=1, duration_s=60.0)
        fault = HostFault(FaultKind.RESTART, "relay1", at_s=FAULTS_FROM_S + 21.0, duration_s=9.0)
        undisturbed, disturbed = simulate(planned), simulate(replace(planned, faults=(fault,)))
        found[way.name] = goodput_of(disturbed, undisturbed)
        assert disturbed.num_failures == 1
    assert found["all-reduce"].lost == 0.0
    assert found["synchronous DiLoCo"].lost > 0.0
    assert all(0.3 < each.goodput < 1.0 for each in found.values())


OUTCOME = Outcome(
    duration_s=10.0,
    num_tokens=1000,
    tokens_each=20,
    num_lost=5,
    num_late=1,
    losses=(5.0, 4.0, 3.0),
    num_kills=1,
    num_mended=0,
    num_repeated=0,
    away=0.1,
)


def test_lost_learning_is_not_kept() -> None:
    assert OUTCOME.tokens_per_s == 100.0
    assert OUTCOME.kept_per_s == 90.0


def test_losses_are_compared_after_as_many_iterations() -> None:
    longer = replace(OUTCOME, losses=(5.0, 4.0, 3.0, 2.0))
    assert shorten(OUTCOME, longer) == (4.0, 4.0)


def test_a_relay_is_away_until_its_next_iteration() -> None:
    assert away_from([1.0, 2.0, 9.0], 4.0, 100.0) == 5.0
    assert away_from([1.0, 2.0], 4.0, 10.0) == 6.0
    assert away_from([1.0, 2.0], 14.0, 10.0) == 0.0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_real_runs_keep_together_in_the_same_ways(way: object) -> None:
    run = run_of(way)  # type: ignore[arg-type]
    assert (run.sync.every, run.sync.overlap) == (way.every, way.overlap)  # type: ignore[attr-defined]
