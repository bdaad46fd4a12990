"""Checks for a GPU: each of them runs here on the CPU, with tiny sizes."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from tests.support.devices import cuda_absence
from tests.support.quick import first_of

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402 - found through the line above.
from gpu.result import Measure, Outcome, as_json, as_table  # noqa: E402

TENSORS = ("agreement", "stage-1b", "ranks", "stage-8b", "copies", "memory", "compression", "tests")
PROCESSES = ("free", "daemons")


def tiny_options(folder: Path) -> argparse.Namespace:
    return gpu_check.parse_options(["--device", "cpu", "--tiny", "--json", str(folder / "all")])


def check(name: str, folder: Path) -> dict[str, Measure]:
    """Run one check by itself, and return its numbers by name."""
    outcome = gpu_check.run_apart(tiny_options(folder), name, 300.0, folder)
    assert not outcome.failure, outcome.failure
    missed = [measure for measure in outcome.measures if measure.at_most == 0 and measure.value]
    assert not missed
    return {measure.name: measure for measure in outcome.measures}


@pytest.mark.timeout(320)
@pytest.mark.parametrize("name", first_of(TENSORS, 3))
def test_a_check_of_tensors_runs(name: str, tmp_path: Path) -> None:
    found = check(name, tmp_path)
    assert found
    if name == "memory":
        assert found["state, difference"].reached
    elif name == "ranks":
        assert found["gradients, difference"].reached


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(320)
@pytest.mark.parametrize("name", PROCESSES)
def test_a_check_of_daemons_runs(name: str, tmp_path: Path) -> None:
    found = check(name, tmp_path)
    if name == "daemons":
        losses = [measure.value for what, measure in found.items() if "loss of" in what]
        assert losses == pytest.approx([losses[0]] * 2, rel=1e-4)
    else:
        assert found["held before the pause"].value > 0


def test_every_check_is_tried() -> None:
    assert {*TENSORS, *PROCESSES} == {*gpu_check.CHECKS}


@pytest.mark.skipif(cuda_absence() is None, reason="there is a CUDA device")
def test_without_a_device_it_ends_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    assert gpu_check.main(["--json", str(result)]) == gpu_check.EXIT_NO_DEVICE
    assert "nothing was checked" in capsys.readouterr().out
    assert not result.exists()


def test_a_check_that_fails_or_hangs_is_told_and_ends(tmp_path: Path) -> None:
    options = gpu_check.parse_options(
        ["--device", "cpu", "--tiny", "--json", str(tmp_path / "all")]
    )
    hung = gpu_check.run_apart(options, "stage-1b", 0.01, tmp_path)
    assert "not done after" in hung.failure
    options.device = "no-such-device"
    broken = gpu_check.run_apart(options, "compression", 300.0, tmp_path)
    assert "exit code 1" in broken.failure


def test_results_are_a_table_and_json() -> None:
    outcomes = [
        Outcome("fast", 2.0, [Measure("rate", 3.0, "GB/s"), Measure("ratio", 0.5, "", 0.9)]),
        Outcome("slow", 9.0, [Measure("time", 0.5, "s", at_most=1.0)]),
        Outcome("gone", 1.0, failure="exit code 1: why"),
    ]
    table = as_table(outcomes)
    assert "MISSED" in table
    assert ">=0.9" in table
    assert "<=1  ok" in table
    assert "gone         FAILED after 1 s: exit code 1: why" in table
    found = json.loads(json.dumps(as_json(outcomes, {"device": "a GPU"})))
    assert [m["reached"] for m in found["checks"][0]["measures"]] == [None, False]
    assert found["checks"][2]["failure"]
