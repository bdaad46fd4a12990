"""All organisations side by side."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.lab.planner.hosts import HostKind
from decod.lab.planner.organisations.compare import Comparison, Effort, compare
from decod.lab.planner.organisations.data_parallel_time import DataParallelClock
from decod.lab.planner.organisations.forecast import OrganisationName
from decod.lab.planner.organisations.run_work import RunProblem
from decod.lab.sim.random_hosts import draw_small_problem
from decod.sim.kernel import seeded
from tests.support.run_problems import RUN, make_run_problem
from tests.support.server_problems import MEGABYTE

EFFORT = Effort(scores=100, evaluations=300)


def compared(problem: RunProblem, seed: int = 0) -> Comparison:
    return compare(problem, lambda name: random.Random(f"{seed} {name}"), effort=EFFORT)


def test_each_organisation_has_one_choice_and_the_fastest_is_first() -> None:
    found = compared(make_run_problem({"d": 0, "s1": 40, "s2": 20, "c1": 40}, latency_s=0.01))
    assert {each.organisation for each in found.chosen} == {*OrganisationName}
    times = [each.iteration_s for each in found.chosen]
    assert times == sorted(times)
    assert found.best_exact is not None
    assert found.best_exact.iteration_s == min(x.iteration_s for x in found.variants if x.exact)
    assert not found.absent


def test_one_host_takes_as_long_in_every_organisation() -> None:
    """There is nothing to average, and links take no time. The data node has the outer part."""
    found = compared(make_run_problem({"d": 0, "s": 40}))
    times = {each.organisation: each.iteration_s for each in found.chosen}
    for name in (OrganisationName.PIPELINE, OrganisationName.DILOCO, OrganisationName.SERVERS):
        assert times[name] == pytest.approx(10 * 4 / 40, rel=0.01)
    assert times[OrganisationName.COLLABORATIVE] == pytest.approx(10 * (4 + 1) / 40)


def test_equal_hosts_divide_a_batch() -> None:
    problem = make_run_problem({"d": 0.0} | {f"c{k}": 10.0 for k in range(5)})
    found = compared(problem)
    alone = DataParallelClock(problem).round([1])
    round_s = {each.organisation: each.iteration_s for each in found.chosen}
    assert alone.compute_s == pytest.approx(10 * 5 / 10)
    assert round_s[OrganisationName.COLLABORATIVE] == pytest.approx(alone.compute_s / 5, rel=0.01)


def test_of_equally_fast_variants_the_one_that_changes_least_is_chosen() -> None:
    found = compared(make_run_problem({"d": 0, "c1": 40, "c2": 40}))
    chosen = {each.organisation: each.variant for each in found.chosen}
    assert chosen[OrganisationName.DILOCO] == "every 1"
    assert chosen[OrganisationName.COLLABORATIVE] == ""


def test_slow_links_make_averages_seldom() -> None:
    hosts = {"d": 0.0} | {f"c{k}": 1.0 for k in range(4)}
    problem = make_run_problem(hosts, access=0.2 * MEGABYTE)
    run = replace(RUN, activation_bytes=1.0)
    found = compared(RunProblem(problem.base, run))
    times = {each.organisation: each for each in found.chosen}
    seldom = times[OrganisationName.DILOCO]
    assert seldom.iteration_s < times[OrganisationName.PIPELINE].iteration_s
    assert seldom.settings["sync.every"] != 1
    assert not seldom.exact


def test_organisations_that_are_impossible_say_why() -> None:
    unreliable = compared(make_run_problem({"d": 0, "c1": 4, "c2": 4}, memory_bytes=20 * MEGABYTE))
    assert unreliable.absent[OrganisationName.SERVERS] == "there is no reliable host"
    assert "whole model" in unreliable.absent[OrganisationName.COLLABORATIVE]
    assert OrganisationName.PIPELINE in {each.organisation for each in unreliable.chosen}
    nowhere = compared(make_run_problem({"d": 0, "s": 4}, memory_bytes=MEGABYTE))
    assert {*nowhere.absent} == {*OrganisationName}
    assert not nowhere.chosen
    assert nowhere.best_exact is None


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_random_hosts_have_sane_forecasts(seed: int) -> None:
    base = draw_small_problem(seeded(seed, "organisations"))
    run = replace(RUN, num_layers=base.work.num_layers, num_microbatches=base.work.num_microbatches)
    found = compared(RunProblem(base, run), seed)
    names = {host.host_id for host in base.hosts if host.kind != HostKind.DATA}
    for each in found.variants:
        assert 0 < each.iteration_s < math.inf
        parts = each.parts
        for part_s in (parts.compute_s, parts.communication_s, parts.fill_s, parts.aggregation_s):
            assert part_s >= 0
        ids = [host.host_id for stage in each.stages for host in stage.hosts]
        assert len({*ids}) == len(ids)
        assert {*ids} <= names
        assert sum(stage.num_layers for stage in each.stages) == run.num_layers
        for stage in each.stages:
            assert sum(host.num_microbatches for host in stage.hosts) == run.num_microbatches
