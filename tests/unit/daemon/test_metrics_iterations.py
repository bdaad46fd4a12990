"""What a leader writes into the file of iterations, and what it does if that is not possible."""

import asyncio
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decod.daemon.metrics import IterationLog
from decod.ids import NodeId
from decod.journal.event_specs import EVENTS
from decod.journal.iteration_file import COLUMNS, IterationFile
from decod.protocol.core.effects import CountWork
from tests.support.machines import ROOT
from tests.support.noted import noted
from tests.waiting import wait_until

OWN, OTHER = NodeId("d0"), NodeId("r1a")


class Bench:
    """A log, the clock that it reads, and the events that it notes."""

    def __init__(self, path: Path) -> None:
        self.path, self.now_s = path, 100.0
        self.noted: list[tuple[str, dict[str, Any]]] = []
        self.log = IterationLog(
            IterationFile(path),
            "run",
            OWN,
            lambda event, **fields: self.noted.append((event, fields)),
        )
        self._num_passes = 0

    def commit(self, iteration: str, *, num_passes: int = 24, loss: float = 2.5) -> None:
        """The notes of one commit at the leader, two seconds after the one before."""
        number = int(iteration.rpartition(":")[2].partition(".")[0])
        self.now_s += 2.0
        self._num_passes += num_passes
        self.log.take(
            noted("iteration.opened", {"iteration": iteration, "num_members": 5}, self.now_s)
        )
        self.log.take(
            noted(
                "iteration.committed",
                {
                    "iteration": iteration,
                    "loss": loss,
                    "num_tokens": 8192,
                    "num_microbatches": 8,
                    "duration_s": 1.5,
                    "num_deferred": 1,
                },
                self.now_s,
            )
        )
        self.step(iteration, loss=loss)
        self.log.count(CountWork(number, ((OWN, 8), (OTHER, 4))))

    def step(self, iteration: str, *, loss: float = 2.5) -> None:
        """The note of a member's step."""
        self.log.take(
            noted(
                "step.committed",
                {
                    "iteration": iteration,
                    "loss": loss,
                    "num_tokens": 8192,
                    "num_passes": self._num_passes,
                    "gradient_norm": 0.5,
                },
                self.now_s,
            )
        )

    def rows(self) -> list[dict[str, str]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))


def play(path: Path, act: Callable[[Bench], Any]) -> Bench:
    """Let something happen while a log is in use."""

    async def run() -> Bench:
        bench = Bench(path)
        async with bench.log:
            if (more := act(bench)) is not None:
                await more
        return bench

    return asyncio.run(run())


def test_a_row_holds_all_that_is_known_of_a_commit(tmp_path: Path) -> None:
    def act(bench: Bench) -> None:
        bench.commit("1.1")
        bench.commit("e1:2.3", num_passes=27)

    first, second = play(tmp_path / "iterations.csv", act).rows()
    assert first["time"].endswith("Z")
    assert {name: first[name] for name in COLUMNS if name != "time"} == {
        "iteration": "1",
        "loss": "2.5",
        "num_tokens": "8192",
        "tokens_per_s": "",
        "duration_s": "1.5",
        "num_members": "5",
        "num_microbatches": "8",
        "num_deferred": "1",
        "num_reread": "0",
        "gradient_norm": "0.5",
        "num_passes": "24",
        "num_passes_wasted": "0",
        "attempt": "1",
        "era": "0",
        "run_id": "run",
        "learning_rate": "",
    }
    assert (second["attempt"], second["era"], second["tokens_per_s"]) == ("3", "1", "4096.0")
    assert (second["num_passes"], second["num_passes_wasted"]) == ("27", "3")


def test_a_node_that_does_not_lead_writes_nothing(tmp_path: Path) -> None:
    bench = play(tmp_path / "iterations.csv", lambda bench: bench.step("1.1"))
    assert not bench.path.exists()


def test_a_leader_whose_own_step_failed_still_has_the_row(tmp_path: Path) -> None:
    def act(bench: Bench) -> None:
        bench.log.take(
            noted(
                "iteration.committed",
                {"iteration": "4.1", "loss": float("inf"), "num_tokens": 1, "duration_s": 1.0},
            )
        )

    (row,) = play(tmp_path / "iterations.csv", act).rows()
    assert (row["iteration"], row["loss"], row["num_passes"]) == ("4", "inf", "")


def test_what_the_run_takes_back_is_replaced(tmp_path: Path) -> None:
    def act(bench: Bench) -> None:
        for number in (1, 2, 3):
            bench.commit(f"{number}.1")
        bench.commit("e1:2.1", loss=9.0)

    rows = play(tmp_path / "iterations.csv", act).rows()
    assert [(row["iteration"], row["era"], row["loss"]) for row in rows] == [
        ("1", "0", "2.5"),
        ("2", "1", "9.0"),
    ]


def test_a_disk_that_fails_is_told_once_and_rows_are_written_later(tmp_path: Path) -> None:
    """Training goes on meanwhile."""
    path = tmp_path / "runs" / "iterations.csv"
    (tmp_path / "runs").write_text("in the way")

    async def act(bench: Bench) -> None:
        for number in (1, 2, 3):
            bench.commit(f"{number}.1")
            bench.log.take(noted("iteration.opened", {"num_members": 5}))
            await wait_until(lambda: bench.noted)
        assert [event for event, _ in bench.noted] == ["iterations.unkept"]
        (tmp_path / "runs").unlink()
        bench.commit("4.1")

    bench = play(path, act)
    assert [row["iteration"] for row in bench.rows()] == ["1", "2", "3", "4"]
    assert bench.noted == [("iterations.unkept", {"reason": "iterations.csv: File exists"})]
    assert "iterations.unkept" in EVENTS


def test_a_disk_that_fails_until_the_end_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    bench = play(tmp_path / "runs" / "iterations.csv", lambda bench: bench.commit("1.1"))
    assert len(bench.noted) == 1


@pytest.mark.parametrize("name", COLUMNS)
def test_each_column_is_explained(name: str) -> None:
    page = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    part = page.partition("\n### `iterations.csv`\n")[2].partition("\n#")[0]
    assert f"| `{name}` | " in part
