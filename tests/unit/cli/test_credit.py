"""`decod credit`: the table and its JSON."""

import json
from pathlib import Path

import pytest

from decod.cli.credit_command import _lines_of
from decod.cli.main import main
from decod.exit_codes import ExitCode
from decod.journal.credit import Credit, CreditRows, EarlierRuns, RunCredit
from decod.journal.credit_file import FILE_NAME, CreditLedger

RUN_ID = "r" * 26


def work_in(folder: Path, run_id: str = RUN_ID, *, name: str = "gpt", node: str = "otter") -> Path:
    folder.mkdir(exist_ok=True)
    ledger = CreditLedger(folder)
    credit = Credit(
        num_microbatches=12_431,
        num_tokens=24_862,
        device_s=7600.0,
        sent_bytes=38 * 10**9,
        received_bytes=10**9,
    )
    row = RunCredit(run_name=name, node_name=node, first_s=1.7e9, last_s=1.75e9, credit=credit)
    ledger.add(run_id, row)
    ledger.save()
    return folder


def run(*arguments: str | Path) -> int:
    return main(["credit", *map(str, arguments)])


def test_the_table_has_a_line_for_each_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work_in(tmp_path)
    work_in(tmp_path, "s" * 26, name="another")
    assert run("--state-dir", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("RUN  ")
    assert "gpt rrrrrrrr" in lines[1] or "gpt rrrrrrrr" in lines[2]
    assert (
        lines[-1]
        == "You did 24,862 microbatches, 4.2 device hours, 76 GB up, 2.0 GB down, in 2 runs"
    )


def test_folders_are_added_up_each_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = work_in(tmp_path / "a"), work_in(tmp_path / "b")
    assert run("--json", "--state-dir", first, "--add", second, "--add", second) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["total"]["num_microbatches"] == 2 * 12_431
    assert [each["run_id"] for each in told["runs"]] == [RUN_ID]
    assert told["damaged"] == []


def test_nothing_done_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--state-dir", tmp_path) == 0
    assert "nothing is counted yet" in capsys.readouterr().out


def test_work_in_earlier_runs_alone_is_counted() -> None:
    earlier = EarlierRuns(num_runs=1, first_s=1.7e9, credit=Credit(num_microbatches=12))
    lines = [*_lines_of(CreditRows(earlier=earlier))]
    assert lines[1].startswith("1 earlier run  ")
    assert lines[-1].startswith("You did 12 microbatches")


def test_a_damaged_ledger_is_an_error_and_one_set_aside_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    assert run("--state-dir", tmp_path) == ExitCode.DATA
    assert "E-DAT-050" in capsys.readouterr().err
    assert (tmp_path / FILE_NAME).read_text() == "{"
    CreditLedger(tmp_path).save()
    assert run("--state-dir", tmp_path) == 0
    assert f"{FILE_NAME}.damaged-1" in capsys.readouterr().err
