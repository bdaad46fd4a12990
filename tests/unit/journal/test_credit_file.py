"""The credit ledger: sums that survive restarts, crashes, full disks and damage."""

import errno
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from decod.journal import credit_file
from decod.journal.credit import (
    Credit,
    CreditRows,
    RunCredit,
    bytes_text,
    credit_of,
    day_text,
    describe_credit,
    hours_text,
)
from decod.journal.credit_file import (
    FILE_NAME,
    CreditLedger,
    DamagedLedgerError,
    damaged_ledgers,
    read_credit,
)

SOME = Credit(
    num_microbatches=12, num_tokens=1200, device_s=3.5, sent_bytes=4000, received_bytes=500
)


def row(credit: Credit = SOME, *, at_s: float = 100.0, name: str = "first") -> RunCredit:
    return RunCredit(run_name=name, node_name="otter", first_s=at_s, last_s=at_s, credit=credit)


def test_sums_go_on_after_a_restart(tmp_path: Path) -> None:
    for at_s in (100.0, 200.0):
        ledger = CreditLedger(tmp_path)
        ledger.add("run-a", row(at_s=at_s))
        assert ledger.save() is None
    CreditLedger(tmp_path).save()
    found = read_credit(tmp_path)
    assert found.runs["run-a"].credit == SOME + SOME
    assert (found.runs["run-a"].first_s, found.runs["run-a"].last_s) == (100.0, 200.0)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_what_is_added_before_the_first_save_counts_once(tmp_path: Path) -> None:
    before = CreditLedger(tmp_path)
    before.add("run-a", row())
    before.save()
    ledger = CreditLedger(tmp_path)
    ledger.add("run-b", row())
    assert ledger.rows.total == SOME
    ledger.save()
    ledger.save()
    assert ledger.rows.total == read_credit(tmp_path).total == SOME + SOME


def test_nothing_is_written_while_nothing_changes(tmp_path: Path) -> None:
    CreditLedger(tmp_path).save()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = CreditLedger(tmp_path)
    ledger.add("run-a", row())
    ledger.save()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ledger.add("run-a", row())
    with monkeypatch.context() as patched:
        patched.setattr(credit_file, "replace_durably", full)
        with pytest.raises(OSError, match="No space left"):
            ledger.save()
        assert read_credit(tmp_path).total == SOME
    ledger.save()
    assert read_credit(tmp_path).total == SOME + SOME


def test_a_ledger_that_can_not_be_read_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = CreditLedger(tmp_path)
    before.add("run-a", row())
    before.save()

    def unreadable(*_: object) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    ledger = CreditLedger(tmp_path)
    ledger.add("run-a", row())
    with monkeypatch.context() as patched:
        patched.setattr(credit_file, "read_beginning", unreadable)
        with pytest.raises(PermissionError):
            ledger.save()
    assert read_credit(tmp_path).total == SOME
    ledger.save()
    assert read_credit(tmp_path).total == SOME + SOME


def _with(**changes: object) -> str:
    content = asdict(CreditRows(runs={"run-a": row()}))
    content["runs"]["run-a"]["credit"] |= changes
    return json.dumps(content)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"version": 2}',
        '{"runs": {"a": 1}}',
        _with(device_s=-1.0),
        _with(device_s=float("nan")),
        _with(sent_bytes=1 << 80),
        _with(num_microbatches="12"),
        " " * (credit_file.FILE_MAX_BYTES + 1),
        "\x00" * 512,
    ],
)
def test_a_damaged_ledger_is_set_aside_whole(tmp_path: Path, text: str) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(text)
    with pytest.raises(DamagedLedgerError):
        read_credit(tmp_path)
    ledger = CreditLedger(tmp_path)
    ledger.add("run-a", row())
    aside = ledger.save()
    assert aside is not None
    assert aside[0] == tmp_path / f"{FILE_NAME}.damaged-1"
    assert aside[0].read_text() == text
    assert damaged_ledgers(tmp_path) == [aside[0]]
    assert read_credit(tmp_path).total == SOME


def test_a_second_damaged_ledger_replaces_no_other(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / FILE_NAME).write_text(f"damaged {number}")
        CreditLedger(tmp_path).save()
    assert [path.read_text() for path in damaged_ledgers(tmp_path)] == [
        "damaged 0",
        "damaged 1",
        "damaged 2",
    ]


def test_very_many_runs_stay_small_and_keep_their_sum(tmp_path: Path) -> None:
    ledger = CreditLedger(tmp_path)
    every = CreditRows(
        runs={f"{number:026}": row(at_s=float(number), name="n" * 64) for number in range(1500)}
    )
    for run_id, each in every.runs.items():
        ledger.add(run_id, each)
    ledger.save()
    found = read_credit(tmp_path)
    assert (len(found.runs), found.earlier.num_runs, found.num_runs) == (1000, 500, 1500)
    assert found.total == every.total
    assert f"{499:026}" not in found.runs
    assert found.first_s == 0.0
    assert (tmp_path / FILE_NAME).stat().st_size < credit_file.FILE_MAX_BYTES / 2


def test_a_crash_while_it_is_written_leaves_the_ledger_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = CreditLedger(tmp_path)
    ledger.add("run-a", row())
    ledger.save()

    def crash(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(Path, "replace", crash)
    ledger.add("run-a", row())
    with pytest.raises(SystemExit):
        ledger.save()
    monkeypatch.undo()
    assert read_credit(tmp_path).total == SOME
    later = CreditLedger(tmp_path)
    later.add("run-a", row())
    later.save()
    assert read_credit(tmp_path).total == SOME + SOME


def test_texts_are_for_people() -> None:
    done = Credit(num_microbatches=12_431, device_s=7_600, sent_bytes=38 * 10**9)
    assert str(done) == "12,431 microbatches, 2.1 device hours, 38 GB up"
    assert str(Credit(num_microbatches=1, device_s=9)) == (
        "1 microbatch, 0.0025 device hours, 0 bytes up"
    )
    assert hours_text(0) == "0.0"
    assert bytes_text(1_500) == "1.5 kB"
    assert day_text(0) == "1970-01-01"
    assert day_text(1e300) == "?"
    assert credit_of(describe_credit(CreditRows(runs={"a": row()}))) == SOME
    assert credit_of({"device_s": "much"}) == Credit()
