"""The study's grid, and how findings and questions are judged by given results."""

import json
from dataclasses import replace

import pytest
import torch

from decod.lab.study.findings import FINDINGS, NOT_RUN
from decod.lab.study.grid import LARGE_TARGET, PLAIN, Point, full_grid, quick_grid, smallest_grid
from decod.lab.study.pictures import NUM_KINDS, make_model, pictures
from decod.lab.study.results import PointResult, Results
from decod.lab.study.study_questions import QUESTIONS
from decod.lab.study.study_report import to_json, to_text

BY_NAME = {finding.name: finding for finding in FINDINGS}


def result(point: Point, **fields: float) -> PointResult:
    """A result that is like all others but for some fields."""
    usual = {"runtime_s": 10.0, "accuracy": 0.5, "loss": 1.0, "optimizer_s": 1.0, "rounds": 32}
    return PointResult(point=point, **{**usual, **fields})  # type: ignore[arg-type]


def judge(name: str, *results: PointResult) -> bool | None:
    return BY_NAME[name].judge(Results(results)).holds


@pytest.mark.parametrize("grid", [quick_grid, full_grid, smallest_grid])
def test_points_of_a_grid_have_names_of_their_own_and_a_baseline(grid: object) -> None:
    assert callable(grid)
    points = grid()
    assert len({point.name for point in points}) == len(points)
    for point in points:
        assert point.num_samples % (point.batch_size * max(1, point.peers)) == 0
    plain = {point for point in points if not point.peers}
    assert {point.baseline for point in points} - plain <= {Point().baseline}


def test_the_quick_grid_is_part_of_the_full_one_and_judges_nearly_all() -> None:
    quick = quick_grid()
    assert set(quick) < set(full_grid())
    assert len(quick) <= 20
    some = Results(result(point) for point in quick)
    open_ = [each.name for each in FINDINGS if each.judge(some).holds is None]
    assert open_ == ["network", "rates"]  # These results have no traffic.


def test_without_results_nothing_is_judged() -> None:
    for finding in FINDINGS:
        assert finding.judge(Results([])) == NOT_RUN
    for question in QUESTIONS:
        assert "not run" in question.answer(Results([]))


def test_two_hosts_are_faster_only_beyond_the_noise() -> None:
    plain = result(PLAIN)
    assert judge("faster", plain, result(Point(), runtime_s=7.0)) is True
    assert judge("faster", plain, result(Point(), runtime_s=9.8)) is False
    assert judge("faster", plain) is None


def test_the_gain_of_more_hosts_falls() -> None:
    plain, two = result(PLAIN), result(Point(), runtime_s=6.0)
    assert judge("not-linear", plain, two, result(Point(peers=4), runtime_s=5.0)) is True
    assert judge("not-linear", plain, two, result(Point(peers=4), runtime_s=2.0)) is False


def test_accuracies_are_compared_with_the_plain_optimizer() -> None:
    plain = result(PLAIN, accuracy=0.6)
    worse = [result(Point(target=target), accuracy=0.4) for target in (64, 128, 256)]
    assert judge("accuracy", plain, *worse) is True
    assert judge("accuracy", plain, *[replace(each, accuracy=0.6) for each in worse]) is False


@pytest.mark.parametrize(
    ("name", "before", "after", "accuracy"),
    [
        ("targets", Point(), Point(target=LARGE_TARGET), 0.3),
        ("local", Point(target=LARGE_TARGET), Point(target=LARGE_TARGET, local=True), 0.7),
        ("local-hosts", Point(local=True), Point(local=True, peers=4), 0.3),
        ("accumulation", Point(), Point(accumulation=2), 0.6),
        ("local-accumulation", Point(local=True), Point(local=True, accumulation=2), 0.4),
    ],
)
def test_accuracy_moves_as_a_finding_says(
    name: str, before: Point, after: Point, accuracy: float
) -> None:
    assert judge(name, result(before), result(after, accuracy=accuracy)) is True
    assert judge(name, result(before), result(after, accuracy=0.5)) is False
    assert judge(name, result(before), result(after, accuracy=1 - accuracy)) is False


@pytest.mark.parametrize(
    ("name", "before", "after", "seconds"),
    [
        ("accumulation-time", Point(local=True), Point(local=True, accumulation=2), 0.5),
        ("target-time", Point(), Point(target=LARGE_TARGET), 2.0),
        ("host-time", Point(), Point(peers=4), 0.5),
    ],
)
def test_the_optimizers_time_moves_as_a_finding_says(
    name: str, before: Point, after: Point, seconds: float
) -> None:
    assert judge(name, result(before), result(after, optimizer_s=seconds)) is True
    assert judge(name, result(before), result(after, optimizer_s=1 / seconds)) is False


def test_network_is_judged_by_the_busiest_host() -> None:
    quiet, busy = (
        result(Point(peers=peers), sent_bytes=size) for peers, size in ((2, 100), (4, 200))
    )
    assert judge("network", quiet, busy) is True
    assert judge("host-network", quiet, busy) is True
    assert judge("network", quiet, replace(busy, sent_bytes=10**10)) is False


def test_rates_are_judged_where_there_are_several() -> None:
    points = [(0.005, 1, 0.5), (0.005, 2, 0.7), (0.5, 1, 0.5), (0.5, 2, 0.5)]
    results = [
        result(Point(rate=rate, accumulation=number), accuracy=accuracy)
        for rate, number, accuracy in points
    ]
    assert judge("rates", *results) is True
    assert judge("rates", *results[:2]) is None


def test_text_and_json_show_all() -> None:
    results = [result(point, sent_bytes=1000) for point in quick_grid()]
    text, found = to_text(results), json.loads(json.dumps(to_json(results)))
    for point in quick_grid():
        assert point.name in text
    assert [each["name"] for each in found["findings"]] == list(BY_NAME)
    assert len(found["results"]) == len(results)
    assert found["results"][0]["point"]["peers"] == 0
    for question in QUESTIONS:
        assert question.text in text


def test_pictures_are_the_same_each_time_and_can_be_learnt() -> None:
    inputs, kinds = pictures(512, 3)
    again, _ = pictures(512, 3)
    assert torch.equal(inputs, again)
    assert len(set(kinds.tolist())) == NUM_KINDS
    model = make_model()
    assert model(inputs[:4]).shape == (4, NUM_KINDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for begin in [*range(0, 512, 32)] * 2:
        loss = torch.nn.functional.cross_entropy(
            model(inputs[begin : begin + 32]), kinds[begin : begin + 32]
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
