"""PipeDream's and DAPPLE's schedules against timelines worked out by hand."""

import pytest

from decod.lab.planner.pipelines import PlannedStage
from decod.lab.sim import server_instances
from decod.lab.sim.rigid import (
    Timeline,
    dapple_s,
    interrupted_s,
    one_forward_one_backward,
    pipedream_s,
    pipedream_warmups,
)
from decod.lab.sim.server_instances import ALBERT, LLAMA, MODELS, TrainedModel
from tests.support.pipelines import make_problem

TWO = (PlannedStage(1, (0,)), PlannedStage(1, (1,)))


def test_a_device_alternates_after_its_warm_up() -> None:
    order = one_forward_one_backward([0, 1, 2, 3], 2)
    text = " ".join("FB"[backward] + str(microbatch) for backward, microbatch in order)
    assert text == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert one_forward_one_backward([7], 3) == [(False, 7), (True, 7)]


def test_two_stages_without_transfers() -> None:
    """Forward 1 s, backward 2 s.

    Stage 0: F0 0-1, F1 1-2, B0 4-6, F2 6-7, B1 7-9, B2 10-12
    Stage 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7, F2 7-8, B2 8-10
    """
    problem = make_problem([3.0, 3.0], num_layers=2, num_microbatches=3)
    ends_s = Timeline(problem, TWO, split=False, warmups=[2, 1]).ends_s
    assert ends_s == pytest.approx({0: 12.0, 1: 10.0})


def test_two_stages_with_slow_links() -> None:
    """A tensor takes 1 s on the link and 1 s more to arrive, while devices compute.

    Stage 0: F0 0-1, F1 1-2, B0 8-10, B1 11-13. B1's gradient arrives at 10.
    Stage 1: F0 3-4, B0 4-6, F1 6-7, B1 7-9. F1's activation arrives at 4.
    """
    problem = make_problem(
        [3.0, 3.0], num_layers=2, num_microbatches=2, bandwidth=1.0, latency_s=1.0
    )
    ends_s = Timeline(problem, TWO, split=False, warmups=[2, 1]).ends_s
    assert ends_s == pytest.approx({0: 13.0, 1: 9.0})


def test_tensors_take_turns_on_a_link() -> None:
    """Stage 0 is fast: its activations, ready at 0.01, 0.02 and 0.03 s, need 10 s each."""
    problem = make_problem([0.03, 3.0], num_layers=2, num_microbatches=3, bandwidth=0.1)
    timeline = Timeline(problem, TWO, split=False, warmups=[3, 3])
    # F2 arrives at 30.01 and takes 1 s. Then B0, B1 and B2 take 2 s each.
    assert timeline.ends_s[1] == pytest.approx(30.01 + 1 + 6)
    # Their gradients need 10 s each, too, and the first leaves at 33.01.
    assert timeline.ends_s[0] == pytest.approx(33.01 + 30 + 0.02)


def test_whole_microbatches_in_turn_or_parts_of_each() -> None:
    """One stage of two devices, the second half as fast."""
    problem = make_problem([3.0, 6.0], num_layers=1, num_microbatches=4)
    stage = (PlannedStage(1, (0, 1)),)
    for split in (False, True):
        ends_s = Timeline(problem, stage, split=split, warmups=[1]).ends_s
        assert ends_s == pytest.approx({0: 6.0, 1: 12.0})


def test_a_split_microbatch_travels_in_pieces_at_once() -> None:
    """Each of two senders has half of it for the one receiver, on links of their own."""
    problem = make_problem([6.0, 6.0, 3.0], num_layers=2, num_microbatches=1, bandwidth=0.1)
    pipeline = (PlannedStage(1, (0, 1)), PlannedStage(1, (2,)))
    ends_s = Timeline(problem, pipeline, split=True, warmups=[2, 1]).ends_s
    # Half of a forward pass 1 s, half of a tensor 5 s, both passes 3 s, 5 s, half of a pass 2 s.
    assert ends_s == pytest.approx({0: 16.0, 1: 16.0, 2: 9.0})


def test_pipedream_fills_the_pipeline_behind_a_stage() -> None:
    """As in its public code: the number of devices behind, over that of the stage, rounded down."""
    stages = tuple(PlannedStage(1, tuple(range(num))) for num in (2, 3, 1))
    assert pipedream_warmups(stages) == [3, 1, 1]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.name))
def test_equal_devices_in_one_place_are_used_nearly_all_the_time(model: TrainedModel) -> None:
    instance = server_instances.table2(model, 1, seed=0)
    work_s = model.num_microbatches * model.num_layers * model.layer_s * 3
    for found_s in (pipedream_s(instance), dapple_s(instance)):
        assert work_s / 16 < found_s < 1.1 * work_s / 16


@pytest.mark.parametrize(("model", "paper_min"), [(ALBERT, 43.5), (LLAMA, 168.9)])
def test_the_speed_of_a_v100_is_fitted_to_the_fastest_baseline(
    model: TrainedModel, paper_min: float
) -> None:
    instance = server_instances.table2(model, 1, seed=0)
    fastest_s = min(pipedream_s(instance), dapple_s(instance))
    assert fastest_s / 60 == pytest.approx(paper_min, rel=0.001)


def test_an_interrupted_batch_begins_again() -> None:
    losses = {"a": 0.25, "b": 0.75}
    assert interrupted_s(100.0, {}, each=True) == 100.0
    assert interrupted_s(100.0, losses, each=False) == 125.0
    assert interrupted_s(100.0, losses, each=True) == 175.0
