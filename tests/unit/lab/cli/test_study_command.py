"""`decod lab study hivemind-thesis`: which grid it runs, and what it prints. No host is started."""

import json
from collections.abc import Callable, Sequence

import pytest
from click.testing import CliRunner

from decod.lab.cli.study_command import study
from decod.lab.study import study_runs as running
from decod.lab.study.grid import Point, full_grid, quick_grid
from decod.lab.study.results import PointResult


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """The points that were to be run."""
    points = list[Point]()

    def run_grid(grid: Sequence[Point], tell: Callable[[str], None]) -> list[PointResult]:
        points.extend(grid)
        tell("one line on each point")
        return [
            PointResult(point=each, runtime_s=1.0, accuracy=0.5, loss=1.0, optimizer_s=0.1)
            for each in grid
        ]

    monkeypatch.setattr(running, "run_grid", run_grid)
    return points


def test_the_quick_grid_as_text(ran: list[Point]) -> None:
    result = CliRunner().invoke(study, ["hivemind-thesis", "--quick"])
    assert result.exit_code == 0, result.output
    assert ran == quick_grid()
    assert result.stderr == "one line on each point\n"
    assert "Questions that it leaves open:" in result.stdout


def test_the_full_grid_as_json(ran: list[Point]) -> None:
    result = CliRunner().invoke(study, ["hivemind-thesis", "--json"])
    assert result.exit_code == 0, result.output
    assert ran == full_grid()
    assert set(json.loads(result.stdout)) == {"thesis", "results", "findings", "questions"}
