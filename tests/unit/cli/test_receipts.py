"""`decod receipts`: shown from disk, exported, and verified by anybody who has the key."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from decod.cli.main import main
from decod.exit_codes import ExitCode
from decod.ids import RunId
from decod.membership.identity import HostKey
from decod.membership.papers import Membership, membership_folder
from decod.membership.receipts import Receipts, Work, check_receipt, keep_receipts, new_receipt
from decod.texts import base32
from tests.support.members import ROOT, data_node, host_key, volunteer

RUN = RunId("r" * 26)
KEY = base32(ROOT.public)
OTHER = host_key("another root")
RELAY = volunteer("relay")


def give(folder: Path, num: int, issuer: Membership, root: HostKey = ROOT) -> None:
    """Give the relay whose state folder this is a receipt for so many microbatches."""
    work = Work(
        since_ms=num,
        first_iteration=1,
        last_iteration=num,
        num_microbatches=num,
        num_tokens=16 * num,
    )
    statement = new_receipt(issuer, RUN, RELAY.node_id, work, int(issuer.papers.issued_s))
    path = membership_folder(folder, root.public)
    keep_receipts(path, Receipts([check_receipt(statement, root.public)]).text())


@pytest.fixture
def relay(tmp_path: Path) -> Path:
    """Returns the state folder of a relay with one receipt."""
    give(tmp_path, 1204, data_node("alice"))
    return tmp_path


def run(*arguments: str | Path) -> int:
    return main(["receipts", *map(str, arguments)])


def exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert run("export", "--state-dir", folder) == 0
    return capsys.readouterr().out


def test_receipts_are_shown_without_a_daemon(
    relay: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--state-dir", relay) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run key {KEY}"
    assert lines[1].split()[:4] == ["RUN", "NODE", "MICROBATCHES", "TOKENS"]
    row = lines[2].split()
    assert row[:5] == ["rrrrrrrr", RELAY.node_id[:8], "1,204", "19,264", "1-1204"]
    assert lines[2].endswith(f"data node {data_node('alice').node_id[:8]}")
    assert run("--json", "--state-dir", relay) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["run_key"] == KEY
    assert found["receipts"][0]["num_microbatches"] == 1204


def test_a_host_without_receipts_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--state-dir", tmp_path) == 0
    assert capsys.readouterr().out.startswith("no receipts in ")
    assert run("export", "--state-dir", tmp_path) == ExitCode.DATA
    assert "E-DAT-030" in capsys.readouterr().err


def test_anybody_with_the_key_can_verify_what_was_exported(
    relay: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.receipts"
    file.write_text(exported(relay, capsys) * 2)
    assert run("verify", file, "--run-key", KEY) == 0
    assert "1,204" in capsys.readouterr().out
    assert run("verify", file, "--run-key", KEY, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["num_microbatches"] for row in answer["receipts"]] == [1204], "copies count once"
    assert answer["problems"] == []


def test_standard_input_is_verified_too(
    relay: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = exported(relay, capsys).encode()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    assert run("verify", "-", "--run-key", KEY) == 0
    assert "1,204" in capsys.readouterr().out


def test_altered_and_foreign_receipts_are_named(
    relay: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = exported(relay, capsys)
    middle = len(good) // 3
    altered = good[:middle] + ("A" if good[middle] != "A" else "B") + good[middle + 1 :]
    file = tmp_path / "all.receipts"
    file.write_text(good + altered)
    assert run("verify", file, "--run-key", KEY) == ExitCode.DATA
    told = capsys.readouterr()
    assert "1,204" in told.out, "the good one counts all the same"
    assert "line 2: " in told.err
    assert "E-DAT-031" in told.err
    file.write_text(good)
    assert run("verify", file, "--run-key", base32(OTHER.public)) == ExitCode.DATA
    assert "line 1: " in capsys.readouterr().err


def test_bad_arguments_get_clear_errors(
    relay: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    assert run("verify", missing, "--run-key", KEY) == ExitCode.DATA
    assert "E-DAT-032" in capsys.readouterr().err
    assert run("verify", tmp_path, "--run-key", KEY) == ExitCode.DATA
    (tmp_path / "empty").touch()
    assert run("verify", tmp_path / "empty", "--run-key", KEY) == ExitCode.DATA
    for key in ("", "x", KEY[:-1], KEY.upper(), "8" * 52):
        assert run("verify", missing, "--run-key", key) == ExitCode.USAGE
    assert run("--state-dir", relay, "export") == ExitCode.USAGE
    assert "--state-dir belongs after export" in capsys.readouterr().err


def test_of_several_runs_one_must_be_named_for_an_export(
    relay: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give(relay, 5, data_node("alice", OTHER), OTHER)
    assert run("export", "--state-dir", relay) == ExitCode.USAGE
    assert KEY in capsys.readouterr().err
    assert run("export", "--state-dir", relay, "--run-key", base32(OTHER.public)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_spoilt_file_on_disk_is_named_and_does_not_hide_the_rest(
    relay: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = relay.glob("memberships/*/receipts")
    path.write_text(path.read_text() + "nonsense\n")
    assert run("--state-dir", relay) == 0
    told = capsys.readouterr()
    assert "1,204" in told.out
    assert "line 2: " in told.err
