"""The file with loss and rates of every iteration: whole lines, one for each iteration."""

import csv
import errno
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from decod.journal import iteration_file
from decod.journal.iteration_file import COLUMNS, IterationFile

HEADER = ",".join(COLUMNS)


def row(iteration: int, **fields: object) -> dict[str, object]:
    return {"iteration": iteration, "loss": 1.5, "run_id": "a", **fields}


def add(path: Path, *iterations: int, **options: Any) -> None:
    """Open the file anew, as a process that starts does, and add rows."""
    file = IterationFile(path, **options)
    file.add([row(number) for number in iterations])
    file.close()


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def iterations(path: Path) -> list[int]:
    return [int(line["iteration"]) for line in read(path)]


def test_rows_are_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a" / "iterations.csv"
    file = IterationFile(path)
    file.add([row(1, time="2026-11-26T15:38:10.397Z", gradient_norm=None)])
    file.add([row(2), row(3)])
    file.close()
    add(path, 4)
    assert iterations(path) == [1, 2, 3, 4]
    first = read(path)[0]
    assert tuple(first) == COLUMNS
    assert datetime.fromisoformat(first["time"]).utcoffset() is not None
    assert (first["loss"], first["gradient_norm"]) == ("1.5", "")


def test_a_line_that_a_crash_has_torn_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was torn, the header among it."""
    monkeypatch.setattr(iteration_file.os, "fsync", lambda _: None)  # It takes time.
    whole = tmp_path / "whole.csv"
    add(whole, 1, 2)
    content = whole.read_bytes()
    for length in range(len(content)):
        path = tmp_path / "torn.csv"
        path.write_bytes(content[:length])
        add(path, 2)
        assert iterations(path) == ([1, 2] if content[:length].count(b"\n") > 1 else [2])
        assert path.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("rest", [b"\0" * 4096, b"3,1\n", b"\xff\xfe,\n\n", b"x" * 100])
def test_what_a_power_loss_leaves_at_the_end_is_cut_off(rest: bytes, tmp_path: Path) -> None:
    path = tmp_path / "iterations.csv"
    add(path, 1, 2)
    path.write_bytes(path.read_bytes() + rest)
    add(path, 3)
    assert iterations(path) == [1, 2, 3]


def test_a_run_that_goes_back_has_one_line_for_each_iteration(tmp_path: Path) -> None:
    path = tmp_path / "iterations.csv"
    add(path, 1, 2, 3, 4, 5)
    file = IterationFile(path)
    file.add([row(3, loss=7.0)])
    file.add([row(4, loss=8.0)])
    file.close()
    assert [line["loss"] for line in read(path)] == ["1.5", "1.5", "7.0", "8.0"]
    add(path, 1)
    assert iterations(path) == [1]


def test_a_leader_that_did_not_lead_for_a_while_leaves_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "iterations.csv"
    add(path, 1, 2)
    add(path, 9)
    assert iterations(path) == [1, 2, 9]
    add(path, 5)
    assert iterations(path) == [1, 2, 5]


def test_a_resumed_run_begins_with_the_lines_before_its_checkpoint(tmp_path: Path) -> None:
    earlier, path = tmp_path / "a" / "iterations.csv", tmp_path / "b" / "iterations.csv"
    add(earlier, 1, 2, 3, 4, 5)
    with earlier.open("ab") as file:
        file.write(b"6,torn")
    before = earlier.read_bytes()
    add(path, 4, earlier=earlier, start_iteration=3)
    assert iterations(path) == [1, 2, 3, 4]
    add(path, 5, earlier=earlier, start_iteration=3)
    assert iterations(path) == [1, 2, 3, 4, 5]
    assert earlier.read_bytes() == before


@pytest.mark.parametrize("content", [None, b"", b"iteration,other\n1,2\n"])
def test_an_earlier_file_that_can_not_be_used_is_left_out(
    content: bytes | None, tmp_path: Path
) -> None:
    earlier, path = tmp_path / "earlier.csv", tmp_path / "b" / "iterations.csv"
    if content is not None:
        earlier.write_bytes(content)
    add(path, 4, earlier=earlier, start_iteration=3)
    assert iterations(path) == [4]


def test_a_file_of_another_release_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "iterations.csv"
    path.write_text("iteration,loss\n1,2.0\n")
    add(path, 2)
    assert iterations(path) == [2]
    assert (tmp_path / "iterations.old.csv").read_text() == "iteration,loss\n1,2.0\n"


def test_rows_that_are_taken_back_before_they_are_written_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "iterations.csv"
    add(path, 1, 2)
    add(path, 3, 4, 2, 3)
    assert iterations(path) == [1, 2, 3]


def test_a_full_disk_leaves_whole_lines_and_rows_can_be_added_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "iterations.csv"
    file = IterationFile(path)
    file.add([row(1)])
    written = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 5:
            return written(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(iteration_file.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.add([row(2)])
    assert iterations(path) == [1]
    monkeypatch.undo()
    file.add([row(2), row(3)])
    file.close()
    assert iterations(path) == [1, 2, 3]


def test_rows_whose_fate_is_unknown_are_added_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have them, although it says that it has failed."""
    path = tmp_path / "iterations.csv"
    file = IterationFile(path)
    file.add([row(1)])

    def fail(*_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(iteration_file.os, "fsync", fail)
    monkeypatch.setattr(iteration_file.os, "ftruncate", fail)
    with pytest.raises(OSError, match="Input/output"):
        file.add([row(2)])
    monkeypatch.undo()
    file.add([row(2)])
    file.close()
    assert iterations(path) == [1, 2]


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_a_path_that_is_no_ordinary_file_is_an_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "iterations.csv"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"."):
        add(path, 1)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_of_a_release_with_fewer_columns_goes_on(tmp_path: Path) -> None:
    """So does a run that goes on from such a file. A torn line is dropped."""
    header, line = HEADER.rpartition(",")[0], "1" + "," * (len(COLUMNS) - 2)
    path, later = tmp_path / "iterations.csv", tmp_path / "b" / "iterations.csv"
    path.write_text(f"{header}\n{line}\n2,torn")
    add(later, 2, earlier=path, start_iteration=1)
    add(path, 2)
    for each in (path, later):
        assert iterations(each) == [1, 2]
        assert tuple(read(each)[0]) == COLUMNS
    assert not (tmp_path / "iterations.old.csv").exists()
