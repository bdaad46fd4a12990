"""`decod audit`: what it prints of good and bad logs."""

import json
import re
from pathlib import Path

import pytest

from decod.cli.main import main
from decod.clocks import wall_clock
from decod.daemon.node_folder import StateFolder
from decod.membership.audit_log import FOLDER, AuditEvent, AuditLog, log_files
from decod.membership.identity import keep_identity
from decod.membership.papers import Membership, membership_folder
from tests.support.members import data_node, host_key

NODE = data_node("writer")
PEER = data_node("peer").node_id


def write(state_dir: Path, run: str = "chess", *, member: Membership = NODE) -> Path:
    """Write a log of four lines, and return its file."""
    log = AuditLog(member, membership_folder(state_dir, member.root) / FOLDER, run)
    for age_s, event, details in (
        (7200.0, "token.created", {"token": "abcd2345", "uses": 3}),
        (60.0, "member.admitted", {"token": "abcd2345", "remark": "\x1b]0;bad\x07 \u202etxt"}),
    ):
        node = PEER if event == "member.admitted" else ""
        log.append(
            [
                AuditEvent(
                    time_s=wall_clock() - age_s,
                    event=event,
                    actor="operator" if not node else member.node_id,
                    node=node,
                    address="10.0.0.7" if node else "",
                    details=details,
                )
            ]
        )
    log.close()
    return log_files(membership_folder(state_dir, member.root) / FOLDER)[-1]


def audit(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["audit", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, exit_code: int = 9) -> str:
    assert main(["audit", *map(str, arguments)]) == exit_code
    captured = capsys.readouterr().err
    assert "Traceback" not in captured
    assert captured.count("error: ") == 1 or exit_code == 2
    return captured


def test_a_good_log_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    keep_identity(tmp_path, NODE.host)
    shown = audit(capsys, "verify", "--state-dir", tmp_path)
    assert re.fullmatch(
        r"audit log of run chess, by [a-z]+-[a-z]+ \([a-z2-7]{8}\)\n"
        r"  4 lines in 1 file, from \S+ \S+ to \S+ \S+ UTC\n"
        r"  no line was altered; head 4:[0-9a-f]{64}\n",
        shown,
    )


def test_what_is_not_as_it_should_be_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    assert "not closed: the node was killed" in audit(capsys, "verify", "--state-dir", tmp_path)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:50])
    assert "the last line is not whole" in audit(capsys, "verify", "--state-dir", tmp_path)
    write(tmp_path)
    shown = audit(capsys, "verify", "--state-dir", tmp_path)
    assert "opened without having been closed before: 1" in shown


def test_a_log_may_be_verified_while_its_daemon_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    folder = StateFolder(tmp_path)
    folder.lock()
    try:
        shown = audit(capsys, "verify", "--state-dir", tmp_path)
    finally:
        folder.unlock()
    assert "a daemon uses this folder" in shown
    assert "not closed" not in shown


def test_the_first_line_that_was_altered_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"uses":3', b'"uses":9'))
    told = refused(capsys, "verify", "--state-dir", tmp_path)
    assert f"E-DAT-033 the audit log is broken at line 2 of {path}: its signature" in told


def test_a_log_of_another_node_is_not_this_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    keep_identity(tmp_path, host_key("another"))
    assert "not the node whose log this is" in refused(capsys, "verify", "--state-dir", tmp_path)


def test_a_head_that_was_noted_shows_a_missing_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    head = audit(capsys, "verify", "--state-dir", tmp_path).split()[-1]
    audit(capsys, "verify", "--state-dir", tmp_path, "--head", head)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    told = refused(capsys, "verify", "--state-dir", tmp_path, "--head", head)
    assert "the log ends with line 3, and had line 4" in told
    told = refused(capsys, "verify", "--state-dir", tmp_path, "--head", "4:abc", exit_code=2)
    assert "is not what `decod audit verify` prints" in told


def test_lines_are_shown_so_that_people_can_read_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    shown = audit(capsys, "show", "--state-dir", tmp_path)
    opened, created, admitted, closed = shown.splitlines()
    assert "token.created  by operator token=abcd2345 uses=3" in created
    assert re.search(
        rf"  3  member.admitted  by \S+ \(\S+\) \S+ \({PEER[:8]}\) at 10.0.0.7", admitted
    )
    assert "audit_log.opened" in opened
    assert "audit_log.closed" in closed
    assert all(text.isprintable() for text in shown.splitlines()), "a peer writes to no terminal"
    shown = audit(
        capsys, "show", "--since", "1h", "--event", "member.admitted", "--state-dir", tmp_path
    )
    assert shown.splitlines() == [admitted]


def test_lines_are_shown_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    shown = audit(capsys, "show", "--json", "--state-dir", tmp_path).splitlines()
    assert [json.loads(line) for line in shown] == [
        json.loads(line) for line in path.read_bytes().splitlines()
    ]


def test_terminal_codes_that_somebody_writes_into_the_file_are_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    content = json.loads(lines[1]) | {
        "actor": "\x1b[2J",
        "event": "\u202eevil",
        "details": {"\x07": ["\x1b"]},
    }
    path.write_bytes(lines[0] + json.dumps(content).encode() + b"\n")
    for as_json in ([], ["--json"]):
        shown = audit(capsys, "show", *as_json, "--state-dir", tmp_path)
        assert all(text.isprintable() for text in shown.splitlines())


def test_lines_that_are_none_are_passed_over_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\x1b[31m\xff\n", b"x" * (1 << 20), b"\n", *lines[2:]]))
    told = refused(capsys, "show", "--state-dir", tmp_path)
    assert f"E-DAT-034 line 3 of {path} is none of an audit log, nor are 1 others" in told
    assert "\x1b" not in told
    told = refused(capsys, "verify", "--state-dir", tmp_path)
    assert f"line 3 of {path}: it is not JSON" in told


def test_one_of_several_runs_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    other = data_node("writer", host_key("another root"))
    write(tmp_path, "go", member=other)
    shown = audit(capsys, "verify", "--state-dir", tmp_path)
    assert sorted(re.findall(r"audit log of run (\w+)", shown)) == ["chess", "go"]
    told = refused(capsys, "show", "--state-dir", tmp_path)
    assert "E-DAT-031" in told
    assert "chess (" in told
    assert audit(capsys, "show", "--run", "go", "--state-dir", tmp_path)
    root = membership_folder(tmp_path, other.root).name
    assert "run go" in audit(capsys, "verify", "--run", root, "--state-dir", tmp_path)
    told = refused(capsys, "show", "--run", "shogi", "--state-dir", tmp_path)
    assert "E-DAT-030" in told
    assert "chess, go" in told or "go, chess" in told


@pytest.mark.parametrize("command", ["show", "verify"])
@pytest.mark.parametrize("make", ["nothing", "file", "empty", "odd"])
def test_where_there_is_no_log_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, make: str
) -> None:
    place = tmp_path / "state"
    if make == "file":
        (place / "memberships").parent.mkdir()
        (place / "memberships").write_text("")
    elif make != "nothing":
        folder = membership_folder(place, NODE.root) / FOLDER
        folder.mkdir(parents=True)
        if make == "odd":
            (folder / "readme.txt").write_text("hello")
            (place / "memberships" / "odd").write_text("hello")
    told = refused(capsys, command, "--state-dir", place)
    assert "E-DAT-030" in told or ("E-DAT-032" in told and make == "file")
