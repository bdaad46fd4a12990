"""PipeDream's and DAPPLE's planners against all pipelines of small problems."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.lab.planner.dapple import latency_s, plan_dapple
from decod.lab.planner.pipedream import bottleneck_s, plan_pipedream
from decod.lab.planner.pipelines import (
    Pipeline,
    PipelineProblem,
    PlannedStage,
    all_reduce_s,
    pieces,
    ring_of,
)
from tests.support.pipelines import make_problem, ordered_pipelines, placed_pipelines

SPEEDS = st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=1, max_size=4)


@st.composite
def problems(draw: st.DrawFn) -> PipelineProblem:
    layer_s = draw(SPEEDS)
    rates = st.sampled_from([0.2, 1.0, 10.0])
    num = len(layer_s)
    pairs = [(a, b) for a in range(num) for b in range(a + 1, num)]
    return make_problem(
        layer_s,
        num_layers=draw(st.integers(1, 5)),
        num_microbatches=draw(st.integers(1, 8)),
        num_layers_max=draw(st.integers(2, 5)),
        latency_s=draw(st.sampled_from([0.0, 0.1])),
        bandwidth={pair: draw(rates) for pair in pairs},
        layer_bytes=draw(st.sampled_from([0.0, 1.0])),
    )


def fits(problem: PipelineProblem, pipeline: Pipeline) -> bool:
    return all(
        stage.num_layers <= problem.num_layers_max[device]
        for stage in pipeline
        for device in stage.devices
    )


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_pipedream_finds_the_fastest_cut(problem: PipelineProblem) -> None:
    best_s = min(bottleneck_s(problem, pipeline) for pipeline in ordered_pipelines(problem))
    found = plan_pipedream(problem)
    if math.isinf(best_s):
        assert found is None
        return
    assert found is not None
    assert fits(problem, found)
    assert sum(stage.num_layers for stage in found) == problem.num_layers
    assert bottleneck_s(problem, found) == pytest.approx(best_s)


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_dapple_is_never_better_than_the_best_and_seldom_far_from_it(
    problem: PipelineProblem,
) -> None:
    """Its three policies don't reach all placements, and it goes on with one pipeline a state."""
    possible = [p for p in placed_pipelines(problem) if fits(problem, p)]
    found = plan_dapple(problem)
    if found is None:
        # With all devices in use, no cut by the policies fits.
        assert all(len(p) > 1 for p in possible)
        return
    assert fits(problem, found)
    assert sum(stage.num_layers for stage in found) == problem.num_layers
    best_s = min(latency_s(problem, pipeline) for pipeline in possible)
    assert latency_s(problem, found) >= best_s * (1 - 1e-9)


@pytest.mark.parametrize("rate", [0.3, 3.0, 1e9])
@pytest.mark.parametrize("layer_bytes", [0.0, 5.0])
def test_dapple_finds_the_best_pipeline_on_equal_devices(rate: float, layer_bytes: float) -> None:
    problem = make_problem(
        [1.0] * 4, num_layers=6, bandwidth=rate, layer_bytes=layer_bytes, num_microbatches=8
    )
    found = plan_dapple(problem)
    assert found is not None
    best_s = min(latency_s(problem, pipeline) for pipeline in placed_pipelines(problem))
    assert latency_s(problem, found) == pytest.approx(best_s)


def test_dapple_gives_slow_devices_fewer_layers() -> None:
    problem = make_problem([1.0, 3.0], num_layers=8, num_microbatches=64, layer_bytes=1e12)
    found = plan_dapple(problem)
    assert found is not None
    assert {stage.devices: stage.num_layers for stage in found} == {(0,): 6, (1,): 2}


def test_dapple_keeps_a_stage_on_one_machine() -> None:
    """Averages between machines would take for ever, activations don't."""
    slow = {(a, b): 1.0 for a in (0, 1) for b in (2, 3)}
    problem = make_problem(
        [1.0] * 4,
        num_layers=4,
        num_layers_max=2,
        num_microbatches=64,
        bandwidth=slow,
        layer_bytes=1e6,
        activation_bytes=0.01,
        machines=((0, 1), (2, 3)),
    )
    found = plan_dapple(problem)
    assert found is not None
    assert {stage.devices for stage in found} == {(0, 1), (2, 3)}


def test_a_model_that_does_not_fit_has_no_plan() -> None:
    problem = make_problem([1.0, 1.0], num_layers=5, num_layers_max=2)
    assert plan_pipedream(problem) is None
    assert plan_dapple(problem) is None


def test_dapple_s_estimate_of_two_equal_stages() -> None:
    """Forward passes 1 s, backward passes 2 s, no transfers, 4 microbatches, an average of 5 s.

    The last stage is the pivot: 2 s until its first backward pass, 3 times 3 s, then 2 s. The first
    stage computes 2 s longer and then averages.
    """
    problem = make_problem([3.0, 3.0, 3.0], num_layers=2, bandwidth=1e12)
    pipeline = (PlannedStage(1, (0,)), PlannedStage(1, (1,)))
    assert latency_s(problem, pipeline) == pytest.approx(2 + 3 * 3 + 4)
    averaged = make_problem([3.0] * 3, num_layers=2, bandwidth=1e9, layer_bytes=3e9)
    pipeline = (PlannedStage(1, (0,)), PlannedStage(1, (1, 2)))
    # The first stage is twice as slow, so it is the pivot. The other averages before it ends.
    expected_s = 1 + 3 * 3 + max(2.0, 2 - 2 + 3.0)
    assert latency_s(averaged, pipeline) == pytest.approx(expected_s)


def test_a_ring_goes_on_to_the_closest_and_is_as_slow_as_its_slowest_link() -> None:
    rates = {(0, 1): 1.0, (0, 2): 10.0, (1, 2): 5.0}
    problem = make_problem([1.0] * 3, bandwidth=rates, latency_s=0.5)
    assert ring_of(problem, (0, 1, 2), 6.0) == [0, 2, 1]
    # 4 steps with 2 bytes each, over the link from 1 back to 0.
    assert all_reduce_s(problem, (0, 1, 2), 6.0) == pytest.approx(4 * (0.5 + 2.0))
    assert all_reduce_s(problem, (1,), 6.0) == 0.0


@given(num_senders=st.integers(1, 6), num_receivers=st.integers(1, 6))
def test_pieces_make_up_a_microbatch(num_senders: int, num_receivers: int) -> None:
    found = pieces(num_senders, num_receivers)
    for index in range(num_senders):
        assert sum(share for a, _, share in found if a == index) == pytest.approx(1 / num_senders)
    for index in range(num_receivers):
        assert sum(share for _, b, share in found if b == index) == pytest.approx(1 / num_receivers)
