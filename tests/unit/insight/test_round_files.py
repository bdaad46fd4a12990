"""Metrics files come from other people: bad lines are named and left out."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from decod.errors import DataError
from decod.insight import round_files as reading
from decod.insight.analysis_report import select
from decod.insight.round_files import files_of, read_records
from decod.journal.records import line_of
from tests.support.timed_rounds import SimulatedOptimizer, SimulatedPeer

ROWS = SimulatedOptimizer(peers=(SimulatedPeer(name="ant"), SimulatedPeer(name="bee"))).rows(4)
LINES = [line_of(row) for row in ROWS]


def changed(**columns: object) -> bytes:
    return json.dumps({**json.loads(LINES[0]), **columns}).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"no json\n", "JSON"),
        (b"[]\n", "object"),
        (changed(kind="cake"), "cake"),
        (changed(kind="\x1b[2J"), "?[2J"),
        (changed(version=2), "version"),
        (changed(round_s=-1.0), "round_s"),
        (changed(round_s="1"), "round_s"),
        (changed(round_s=None), "round_s"),
        (LINES[0].replace(b'"loss":null', b'"loss":NaN'), ""),
        (changed(round_s=1e300), "round_s"),
        (changed(samples=2**80), "samples"),
        (changed(name="x" * 300), "name"),
        (changed(mode="pipe"), "mode"),
        (b"[" * 10_000 + b"\n", ""),
        (changed(extra="x" * 20_000), "bytes"),
        (b"\xff\xfe\n", ""),
    ],
)
def test_a_bad_line_is_named_and_left_out(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LINES[0] + line + LINES[1])
    records = read_records([path])
    assert len(records.rounds) == 2
    assert records.num_problems == 1
    assert f"{path}, line 2: " in records.problems[0]
    assert why in records.problems[0]


def test_columns_of_a_later_release_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(changed(weather="fine"))
    (row,) = read_records([path]).rounds
    assert line_of(row) == LINES[0]


def test_a_folder_may_hold_anything_else(tmp_path: Path) -> None:
    """State folders hold audit logs, which are JSON lines too, and pipes."""
    (tmp_path / "state/metrics").mkdir(parents=True)
    (tmp_path / "state/metrics/metrics.jsonl").write_bytes(LINES[0])
    (tmp_path / "bee.jsonl").write_bytes(LINES[1])
    (tmp_path / "state/000000000001.jsonl").write_text('{"seq":1}\n')
    (tmp_path / "state/empty.jsonl").touch()
    os.mkfifo(tmp_path / "state/pipe.jsonl")
    assert len(files_of([tmp_path])) == 2
    assert len(read_records([tmp_path]).rounds) == 2


def test_what_was_collected_twice_counts_once(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b"".join(LINES))
    assert len(read_records([tmp_path]).rounds) == len(ROWS)


def test_a_missing_file_is_an_error_that_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="E-DAT-040") as caught:
        read_records([tmp_path / "nowhere.jsonl"])
    assert "state folder" in caught.value.fix


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="E-DAT-040"):
        read_records([tmp_path / "pipe"])


@pytest.mark.parametrize("content", [b"", b"broken\n"])
def test_without_any_round_there_is_nothing_to_analyse(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match="E-DAT-041"):
        read_records([tmp_path / "x.jsonl"])


def test_a_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FILE_SIZE_MAX_BYTES", 10)
    (tmp_path / "x.jsonl").write_bytes(LINES[0])
    with pytest.raises(DataError, match="E-DAT-040"):
        read_records([tmp_path])


def test_the_newest_run_is_chosen_unless_another_is_named(tmp_path: Path) -> None:
    older = [replace(row, run="older", time_s=row.time_s / 1e6) for row in ROWS]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"".join(map(line_of, [*ROWS, *older])))
    records = read_records([path])
    assert select(records).run == "testrun"
    assert select(records).other_runs == ["older"]
    assert select(records, run="old").run == "older"
    for wrong in ("none", ""):
        with pytest.raises(DataError, match="E-DAT-042"):
            select(records, run=wrong)


def test_a_name_from_a_file_can_not_move_the_readers_cursor(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(changed(name="a\x1b[2Jb", run="\x1b[31mrun"))
    selection = select(read_records([path]))
    assert "\x1b" not in selection.names[0]
