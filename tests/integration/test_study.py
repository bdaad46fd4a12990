"""`decod lab study` trains with real hosts."""

from pathlib import Path

import pytest

from decod.errors import NotRunningError
from decod.lab.study.grid import Point, smallest_grid
from decod.lab.study.study_report import to_text
from decod.lab.study.study_runs import run_grid, run_point, workers

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.slow
def test_the_smallest_grid() -> None:
    told = list[str]()
    plain, gradients, local = run_grid(smallest_grid(), told.append)
    assert len(told) == 3
    assert plain.rounds == 0
    for each in (gradients, local):
        assert 6 <= each.rounds <= 8  # A round may hold more samples than its target.
        assert each.whole_rounds > 0.5
        assert each.sent_bytes > 0
        assert 0 < each.optimizer_s < each.runtime_s
        assert each.dropped == 0
        assert each.accuracy > 0.05
    assert "2 hosts, target 64, local" in to_text([plain, gradients, local])


def test_a_host_that_fails_is_named(tmp_path: Path) -> None:
    failed = pytest.raises(NotRunningError, match="host 0 of the study has failed")
    with workers(1) as hosts, failed as caught:
        run_point(Point(target=0), hosts, tmp_path)
    assert "target_batch_size is 0" in str(caught.value)
