"""How long an iteration of the pipeline takes: cases that can be computed by hand."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.lab.planner.bottleneck import ResourceKind
from decod.lab.planner.organisations.exchange_time import butterfly
from decod.lab.planner.organisations.pipeline_forecast import PipelineForecasts, gradients_s
from decod.lab.planner.organisations.pipeline_search import plan_stages
from decod.lab.planner.organisations.pipeline_time import PipelineClock
from decod.lab.planner.organisations.run_work import RunProblem
from decod.planner.partition import part_sizes
from tests.support.run_problems import make_run_problem
from tests.support.server_problems import MEGABYTE


def test_a_single_relay_computes_one_microbatch_after_the_other() -> None:
    clock = PipelineClock(make_run_problem({"d": 0, "c": 40}))
    time = clock.passes(((1,),))
    assert time.total_s == pytest.approx(10 * 4 / 40, rel=1e-3)
    assert (time.limit.kind, time.limit.host) == (ResourceKind.DEVICE, 1)
    assert time.fill_s + time.compute_s == pytest.approx(1.0, rel=1e-3)
    assert clock.average(time).time_s == 0, "there is nobody to average with"


def test_relays_share_the_work_by_their_speed() -> None:
    time = PipelineClock(make_run_problem({"d": 0, "c1": 40, "c2": 20})).passes(((1, 2),))
    assert time.shares == ({1: 7, 2: 3},)
    assert time.total_s == pytest.approx(0.7, rel=0.05)


def test_equal_stages_fill_like_a_pipeline() -> None:
    """M + K - 1 steps of the busiest stage, as in GPipe."""
    time = PipelineClock(make_run_problem({"d": 0, "c1": 40, "c2": 40})).passes(((1,), (2,)))
    assert time.total_s == pytest.approx((10 + 2 - 1) * 2 / 40, rel=0.05)


def test_a_way_alone_is_latency_and_transfer_of_each_hop_there_and_back() -> None:
    problem = make_run_problem({"d": 0, "c": 1e9}, latency_s=1.0, bandwidth=MEGABYTE)
    time = PipelineClock(problem).passes(((1,),))
    assert time.fill_s == pytest.approx(2 * 2 * (1.0 + 1.0))
    # The link carries one activation after another. Nothing else takes time.
    assert time.total_s >= 10 * 1.0 + 4.0


def test_what_a_stage_can_hold_limits_what_is_under_way() -> None:
    problem = make_run_problem({"d": 0, "c": 1e6}, latency_s=1.0)
    hosts = [replace(host, num_microbatches_max=2) for host in problem.hosts]
    held = RunProblem(replace(problem.base, hosts=hosts), problem.run)
    time = PipelineClock(held).passes(((1,),))
    assert time.total_s == pytest.approx(5 * 4.0, rel=1e-3)
    assert time.limit.kind == ResourceKind.MEMORY


def test_members_average_in_two_halves() -> None:
    """Of 2 members, each sends half of its gradient, and then half of the mean."""
    problem = make_run_problem({"d": 0, "c1": 1, "c2": 1}, latency_s=1.0, access=MEGABYTE)
    found = butterfly(problem.base, (1, 2), 4 * MEGABYTE)
    assert found.time_s == pytest.approx(2 * (1.0 + 2.0))
    assert butterfly(problem.base, (1,), 4 * MEGABYTE).time_s == 0


def test_hosts_without_memory_for_a_stage_are_no_relays_there() -> None:
    state = 7 * MEGABYTE
    small = make_run_problem({"d": 0, "c1": 1, "c2": 1}, memory_bytes=2 * state)
    clock = PipelineClock(small)
    assert clock.passes(((1, 2),)).total_s == math.inf
    assert clock.passes(((1,), (2,))).total_s < math.inf
    # Members that step by themselves keep more.
    assert PipelineClock(small, local=True).passes(((1,), (2,))).total_s == math.inf
    plan = plan_stages(clock, random.Random(0), gradients_s, scores=100)
    assert plan is not None
    assert [len(stage) for stage in plan.stages] == [1, 1]
    assert plan_stages(clock, random.Random(0), gradients_s, num_stages=1, scores=100) is None


def test_a_host_that_holds_up_averages_stays_idle() -> None:
    problem = make_run_problem({"d": 0, "c1": 40, "c2": 40})
    slow = replace(problem.hosts[2], uplink_bytes_per_s=1e4)
    held = RunProblem(replace(problem.base, hosts=[*problem.hosts[:2], slow]), problem.run)
    plan = plan_stages(PipelineClock(held), random.Random(0), gradients_s, scores=200)
    assert plan is not None
    assert plan.stages == ((1,),)


def with_cards(*memory_bytes: float, num_layers: int, cut: tuple[int, ...] = ()) -> RunProblem:
    """Returns relays of one speed with so much memory each, and one data node."""
    problem = make_run_problem({"d": 0} | {f"c{k}": 40 for k in range(len(memory_bytes))})
    data, *relays = problem.hosts
    relays = [
        replace(host, memory_bytes=size)
        for host, size in zip(relays, memory_bytes, strict=True)
    ]  # fmt: skip
    run = replace(problem.run, num_layers=num_layers, cut=cut)
    return RunProblem(replace(problem.base, hosts=[data, *relays]), run)


def test_unequal_cards_hold_a_model_that_no_even_cut_fits_onto() -> None:
    """Of 8, 12 and 24 GB, each holds one layer of 2 GB after the other."""
    cards = [size * 3.5 * MEGABYTE for size in (8, 12, 24)]

    def holds(num_layers: int, *, even: bool) -> bool:
        cut = tuple(part_sizes(num_layers, 3)) if even else ()
        problem = with_cards(*cards, num_layers=num_layers, cut=cut)
        score, rng = gradients_s, random.Random(0)
        found = plan_stages(PipelineClock(problem), rng, score, num_stages=3, scores=200)
        return found is not None

    most_even = max(num for num in range(3, 30) if holds(num, even=True))
    most = max(num for num in range(3, 30) if holds(num, even=False))
    assert (most_even, most) == (14, 22)


def test_a_fast_host_gets_more_layers() -> None:
    problem = make_run_problem({"d": 0, "c1": 10, "c2": 30})
    plan = plan_stages(
        PipelineClock(problem), random.Random(0), gradients_s, num_stages=2, scores=200
    )
    assert plan is not None
    assert dict(zip(plan.stages, plan.time.layers, strict=True)) == {(1,): 1, (2,): 3}
    given = RunProblem(problem.base, replace(problem.run, cut=(2, 2)))
    plan = plan_stages(PipelineClock(given), random.Random(0), gradients_s, scores=200)
    assert plan is not None
    assert plan.time.layers == (2, 2)


@settings(max_examples=50, deadline=None)
@given(
    speeds=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    cards=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    num_layers=st.integers(4, 9),
)
def test_no_cut_lets_the_slowest_stage_end_sooner(
    speeds: list[int], cards: list[int], num_layers: int
) -> None:
    problem = with_cards(
        *(7 * MEGABYTE * size for size in cards[: len(speeds)]), num_layers=num_layers
    )
    data, *relays = problem.hosts
    relays = [replace(h, speed_layers_per_s=v) for h, v in zip(relays, speeds, strict=True)]
    clock = PipelineClock(replace(problem, base=replace(problem.base, hosts=[data, *relays])))
    num = len(speeds)
    fits = [
        cut
        for cut in itertools.product(range(1, num_layers + 1), repeat=num)
        if sum(cut) == num_layers and all(n <= size for n, size in zip(cut, cards, strict=False))
    ]
    found = clock.fitted_layers(tuple((k + 1,) for k in range(num)))
    assert bool(found) == bool(fits)
    if found:
        slowest = [max(n / v for n, v in zip(cut, speeds, strict=True)) for cut in [found, *fits]]
        assert slowest[0] == min(slowest)


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_cut_is_even(num_layers: int, num_stages: int) -> None:
    parts = part_sizes(num_layers, min(num_stages, num_layers))
    assert sum(parts) == num_layers
    assert max(parts) - min(parts) <= 1


@settings(max_examples=50, deadline=None)
@given(
    num=st.integers(1, 4),
    latency_s=st.floats(0, 1),
    rate=st.floats(1e5, 1e9),
    faster=st.floats(1, 100),
)
def test_faster_links_never_lengthen_an_iteration(
    num: int, latency_s: float, rate: float, faster: float
) -> None:
    """Equal hosts and links, with given stages."""
    hosts = {"d": 0.0} | {f"c{k}": 10.0 for k in range(2 * num)}
    stages = tuple(range(1, num + 1)), tuple(range(num + 1, 2 * num + 1))
    times = []
    for factor in (1.0, faster):
        clock = PipelineClock(
            make_run_problem(
                hosts,
                latency_s=latency_s / factor,
                bandwidth=rate * factor,
                access=rate * factor,
            )
        )
        times.append(gradients_s(clock, clock.passes(stages)))
    assert times[1] <= times[0] * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), access=st.floats(1e4, 1e8))
def test_fewer_averages_never_lengthen_an_iteration(seed: int, access: float) -> None:
    hosts = {"d": 0.0, "c1": 40.0, "c2": 20.0, "c3": 10.0, "s": 30.0}
    problem = make_run_problem(hosts, latency_s=0.05, access=access)
    every = (1, 2, 10, 100)
    made = PipelineForecasts(problem, random.Random(seed), scores=60).diloco(every)
    by_format: dict[str, list[float]] = {}
    for forecast in made:
        settings_of = {**forecast.settings, "sync.every": 0}
        by_format.setdefault(str(settings_of), []).append(forecast.iteration_s)
    assert len(by_format) == 6
    for times in by_format.values():
        assert times == sorted(times, reverse=True)
