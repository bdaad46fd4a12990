"""The figures of the measurement of all-reduces, and its choice of subjects."""

import math
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from bench.averaging import ERROR_MAX, NUM_ELEMENTS  # noqa: E402
from bench.averaging_node import STAGE, node_id, run_of  # noqa: E402
from bench.averaging_report import HEADER, Sample, as_line, line_s, median_s  # noqa: E402
from bench.hosts import LOOPBACK  # noqa: E402
from bench_allreduce import SUBJECTS, chosen, measure  # noqa: E402

from decod.compression.plan import Method  # noqa: E402
from decod.model.shape import stage_shapes  # noqa: E402

SAMPLES = [
    Sample("decod", 4, seconds, cpu_s=1.5, error=error)
    for seconds, error in ((15.0, 0.0), (14.0, 1e-8), (20.0, 0.0))
]


def test_two_members_send_the_tensor_once_and_four_one_and_a_half_times() -> None:
    assert line_s(2, 100.0) == pytest.approx(8.0)
    assert line_s(4, 100.0) == pytest.approx(12.0)


def test_a_line_says_the_median_and_its_share_of_line_rate_and_gloo() -> None:
    assert median_s(SAMPLES) == 15.0
    words = as_line(SAMPLES, 100.0, 12.0).split()
    assert words == ["4", "decod", "15.000", "14.000", "10.0", "80.0%", "0.80", "1.50", "1.0e-08"]


def test_without_a_rate_or_gloo_a_line_has_gaps() -> None:
    assert as_line(SAMPLES, None, None).split()[5:7] == ["-", "-"]


def test_columns_are_as_wide_as_their_titles() -> None:
    assert len(as_line(SAMPLES, 100.0, 12.0)) == len(HEADER)


def test_gloo_comes_first_since_the_others_are_compared_with_it() -> None:
    subjects = chosen(["decod", "gloo"], None)
    assert [subject.name for subject in subjects] == ["gloo", "decod"]


def test_hivemind_runs_in_its_own_environment(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = chosen(["hivemind"], "/opt/hivemind/bin/python")
    assert found.python == "/opt/hivemind/bin/python"
    assert found.module == SUBJECTS["hivemind"].module
    assert chosen(["hivemind"], None) == []
    assert "hivemind is not measured" in capsys.readouterr().out


def test_members_have_ids_of_their_own() -> None:
    assert len({node_id(member) for member in range(4)}) == 4


def test_the_stage_that_decod_averages_has_as_many_parameters_as_the_others_tensor() -> None:
    run = run_of(Method.NONE)
    shapes = stage_shapes(run.model, run.stages, STAGE)
    assert sum(math.prod(shape) for shape in shapes.values()) == NUM_ELEMENTS


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("plaintext", [False, True])
def test_members_reduce_for_real(tmp_path: Path, *, plaintext: bool) -> None:
    """With TLS, and as `bench_tls.py` takes it off."""
    subject = SUBJECTS["decod"]
    if plaintext:
        subject = replace(subject, options=("--plaintext",))
    options = Namespace(threads=1, warmup=0, repeats=1)
    (sample,) = measure(subject, [LOOPBACK] * 2, tmp_path / "run", options)
    assert sample.error <= ERROR_MAX[subject.precision]
