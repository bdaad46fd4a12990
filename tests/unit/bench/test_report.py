"""The throughput measurement's figures follow from its samples."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from bench.report import account, as_json, as_text, best_results, loss_difference, ratios  # noqa: E402
from bench.subject import Sample, find_timing  # noqa: E402


def sample(
    subject: str,
    num_threads: int,
    rate: float,
    round_index: int = 0,
    *,
    loss: float = 8.0,
    foreign_cores: float = 0.0,
) -> Sample:
    return Sample(
        subject=subject,
        num_threads=num_threads,
        tokens_per_s=rate,
        iteration_s=8192 / rate,
        losses={1: loss, 2: loss - 0.25},
        cpu_s={"process": 4.0, "process compute": 2.0},
        timing={"data": {"compute_s": 1.0, "wait_s": 0.5}} if subject == "decod" else {},
        foreign_cores=foreign_cores,
        round_index=round_index,
    )


SAMPLES = [
    sample("decod", 1, 900.0, 0),
    sample("decod", 2, 1000.0, 0),
    sample("one process", 2, 2000.0, 1),
    sample("decod", 1, 1100.0, 1),
    sample("decod", 2, 1000.0, 1),
    sample("decod", 1, 1200.0, 2),
]


def test_each_subject_counts_at_the_setting_with_the_best_median() -> None:
    best = best_results(SAMPLES)
    assert best["decod"].num_threads == 1
    assert best["decod"].tokens_per_s == 1100.0
    assert ratios(best) == {"one process": pytest.approx(0.55)}


def test_launches_are_compared_within_their_round() -> None:
    """The machine was twice as fast in the second round, and disturbed in the third."""
    samples = [
        sample(name, 1, rate, round_index)
        for round_index, speed in enumerate((1.0, 2.0, 0.5))
        for name, rate in (("decod", 900.0 * speed), ("one process", 1000.0 * speed))
    ]
    samples[-1] = sample("one process", 1, 600.0, 2)
    samples.append(sample("decod", 1, 5000.0, 3))
    assert ratios(best_results(samples)) == {"one process": pytest.approx(0.9)}


def test_a_loss_that_differs_is_called_another_job() -> None:
    other = sample("one process", 1, 2000.0, loss=8.001)
    assert loss_difference([*SAMPLES, other]) == (pytest.approx(0.001), 2)
    assert "NOT THE SAME JOB" in as_text([*SAMPLES, other])
    assert "NOT" not in as_text(SAMPLES)


def test_the_report_says_so_when_a_target_is_missed_or_the_machine_was_busy() -> None:
    busy = sample("torch pipeline", 1, 1000.0, 1, foreign_cores=0.8)
    text = as_text([*SAMPLES, busy])
    assert "DOUBTFUL" in text
    assert [line.split()[-1] for line in text.splitlines() if "target" in line] == ["MISSED", "met"]


def test_json_holds_every_sample_and_the_ratios() -> None:
    found = as_json(SAMPLES, {"num_cores": 2})
    assert len(found["samples"]) == len(SAMPLES)
    assert found["ratios"] == {"decod / one process": pytest.approx(0.55)}


def test_the_account_adds_up_to_the_time_of_all_cores() -> None:
    timing = {"copy_s": 0.25, "node_copy_s": 0.5, "node_serialize_s": 0.125, "wait_s": 1.0}
    found = account(replace(SAMPLES[0], iteration_s=4.0, timing={"data": timing}), num_cores=2)
    assert found == {
        "compute": 1.75,
        "copy": 0.75,
        "serialization": 0.125,
        "sockets": 3.375,
        "wait": 2.0,
    }
    assert sum(found.values()) == 2 * 4.0


def test_a_status_without_timing_gives_an_empty_account() -> None:
    assert find_timing({}) == {}
    assert find_timing({"node": {"timing": {"compute_s": 2, "other": "x"}}}) == {"compute_s": 2.0}
