"""`decod checkpoint list` and `decod checkpoint verify`; `decod leader --resume`."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from tests.support.checkpoints import RUN_ID, write_checkpoint
from tests.support.modes import modes_matter

Output = pytest.CaptureFixture[str]


def run(capsys: Output, state_dir: Path, *arguments: str) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr."""
    code = main(["checkpoint", *arguments, "--state-dir", str(state_dir)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def rows(capsys: Output, state_dir: Path, *arguments: str) -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = json.loads(run(capsys, state_dir, *arguments, "--json")[1])
    return values


def test_checkpoints_are_listed_the_newest_first(tmp_path: Path, capsys: Output) -> None:
    write_checkpoint(tmp_path, 10)
    folder = write_checkpoint(tmp_path, 20)
    code, text, _ = run(capsys, tmp_path, "list")
    head, first, second = text.splitlines()
    assert code == 0
    assert head.split()[:2] == ["ITERATION", "WRITTEN"]
    assert first.split() == [
        "20", "2023-11-14", "22:13:40", "0.0", "MiB", "2.5000", "test", f"({RUN_ID})",
    ]  # fmt: skip
    assert second.split()[0] == "10"
    row = rows(capsys, tmp_path, "list")[0]
    assert row == {
        "iteration": 20,
        "folder": str(folder),
        "run_id": RUN_ID,
        "run_name": "test",
        "written_s": 1_700_000_020,
        "size_bytes": sum(p.stat().st_size for p in folder.glob("stage-*")),
        "loss": 2.5,
        "problem": None,
    }


def test_where_there_is_none_the_list_is_empty(tmp_path: Path, capsys: Output) -> None:
    code, text, _ = run(capsys, tmp_path, "list")
    assert (code, text) == (0, f"no checkpoints in {tmp_path}/runs\n")
    assert rows(capsys, tmp_path, "list") == []


def test_one_that_can_not_be_read_is_listed_with_the_reason(tmp_path: Path, capsys: Output) -> None:
    os.truncate(write_checkpoint(tmp_path, 10) / "manifest.json", 20)
    code, text, _ = run(capsys, tmp_path, "list")
    assert code == 0
    assert "manifest.json is refused" in text
    assert rows(capsys, tmp_path, "list")[0]["loss"] is None


def test_good_ones_are_verified(tmp_path: Path, capsys: Output) -> None:
    for iteration in (10, 20):
        write_checkpoint(tmp_path, iteration)
    for arguments, iterations in (([], [20, 10]), (["latest"], [20]), (["10"], [10])):
        code, text, error = run(capsys, tmp_path, "verify", *arguments)
        assert (code, error) == (0, "")
        assert [int(line.split()[0]) for line in text.splitlines()] == iterations
        assert all(line.endswith("  ok") for line in text.splitlines())
    assert [row["problems"] for row in rows(capsys, tmp_path, "verify")] == [[], []]


def test_a_bad_one_is_named_and_ends_with_9(tmp_path: Path, capsys: Output) -> None:
    write_checkpoint(tmp_path, 10)
    folder = write_checkpoint(tmp_path, 20)
    shutil.copy(folder / "stage-0.safetensors", folder / "stage-1.safetensors")
    (folder / "\x1b[31mevil").write_text("")
    code, text, error = run(capsys, tmp_path, "verify")
    assert code == 9
    assert "BAD" in text
    assert "stage-1.safetensors: it has " in text
    assert "\x1b" not in text
    assert error.startswith(f"error: E-CKP-010 1 of 2 checkpoints are bad, the newest in {folder}")
    assert len(error.splitlines()) == 1
    assert run(capsys, tmp_path, "verify", "20")[0] == 9
    assert run(capsys, tmp_path, "verify", "20", "--json")[0] == 9
    assert run(capsys, tmp_path, "verify", "10")[0] == 0


def test_links_are_passed_over_and_named(tmp_path: Path, capsys: Output) -> None:
    folder = write_checkpoint(tmp_path / "other", 10).parent
    linked_run, linked_folder = tmp_path / "runs" / "linked", tmp_path / "runs" / "r" / folder.name
    linked_folder.parent.mkdir(parents=True)
    linked_run.symlink_to(folder.parent)
    linked_folder.symlink_to(folder)
    for command in (("list",), ("list", "--json"), ("verify",)):
        _, text, error = run(capsys, tmp_path, *command)
        assert str(linked_run) not in text
        lines = [line for line in error.splitlines() if "passed over: it is a symlink" in line]
        assert [line.split()[0] for line in lines] == [str(linked_run), str(linked_folder)]


def test_nothing_to_verify_is_an_error(tmp_path: Path, capsys: Output) -> None:
    assert run(capsys, tmp_path, "verify")[0] == 9
    write_checkpoint(tmp_path, 10)
    code, _, error = run(capsys, tmp_path, "verify", "11")
    assert code == 9
    assert error.startswith("error: E-CKP-011 ")


@pytest.mark.parametrize("mode", [0, 0o444], ids=["closed", "can't be entered"])
@pytest.mark.parametrize("closed", ["runs", "run", "checkpoints"])
def test_a_folder_that_can_not_be_looked_into_is_named(
    tmp_path: Path, capsys: Output, closed: str, mode: int
) -> None:
    """Another run's, which can be read, is shown all the same."""
    write_checkpoint(tmp_path, 20, run_id="s" * 26)
    checkpoints = write_checkpoint(tmp_path, 10).parent
    folder = {"runs": tmp_path / "runs", "run": checkpoints.parent}.get(closed, checkpoints)
    folder.chmod(mode)
    with modes_matter():
        for command in (["list"], ["list", "--json"], ["verify"], ["verify", "latest"]):
            code, text, error = run(capsys, tmp_path, *command)
            assert code == 9
            assert "no checkpoints" not in text
            assert ("s" * 26 in text) == (closed != "runs")
            assert error.startswith("error: E-CKP-017 ")
            assert f"in {folder}" in error
            assert "Permission denied" in error
            assert len(error.splitlines()) == 1
    folder.chmod(0o700)
    assert run(capsys, tmp_path, "verify")[0] == 0


def test_one_that_may_not_be_read_is_listed_and_bad(tmp_path: Path, capsys: Output) -> None:
    write_checkpoint(tmp_path, 10)
    folder = write_checkpoint(tmp_path, 20)
    folder.chmod(0)
    with modes_matter():
        assert run(capsys, tmp_path, "list")[0] == 0
        code, text, error = run(capsys, tmp_path, "verify")
        assert code == 9
        assert "BAD" in text
        assert "manifest.json can't be read: Permission denied" in error
    folder.chmod(0o700)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "newest", "1" * 16, "٣"])
def test_an_iteration_is_a_number_from_1_or_latest(
    tmp_path: Path, capsys: Output, text: str
) -> None:
    assert run(capsys, tmp_path, "verify", "--", text)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "resume"),
    [([], None), (["--resume", "latest"], 0), (["--resume", "40"], 40)],
)
def test_the_leader_is_told_what_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], resume: int | None
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "decod.daemon.leader_daemon.run_leader", lambda options, _: seen.append(options) or 0
    )
    path = str(tmp_path / "run.toml")
    assert main(["run", "init", path]) == 0
    assert main(["leader", path, "--state-dir", str(tmp_path), *arguments]) == 0
    assert seen[0].resume == resume
    assert seen[0].run_file.checkpoint.every_iterations == 100


@pytest.mark.parametrize("other", ["--init", "--join"])
def test_a_run_has_one_beginning(tmp_path: Path, other: str) -> None:
    path = str(tmp_path / "run.toml")
    assert main(["run", "init", path]) == 0
    assert main(["leader", path, "--resume", "latest", other, "x"]) == 2
