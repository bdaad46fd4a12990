"""What a bug report holds, what it never holds, and what happens when it can't be written."""

import errno
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from decod.cli import insight_command as command
from decod.cli.main import main
from decod.errors import NotRunningError
from decod.exit_codes import ExitCode
from decod.insight import bugreport as contents
from decod.insight import bugreport as facts
from decod.insight.bugreport import LOG_MAX_BYTES, Contents, contents_of
from decod.insight.redaction import Redactor
from decod.membership.identity import load_or_create_identity
from tests.support.disk import small_disk
from tests.support.node_records import RUN_ID, status_of, write_iterations, write_log, write_rounds
from tests.unit.insight.test_redaction import JOIN, SECRET

HOME_FILE = "/home/alice/secret-project/run.toml"
HOSTS = ("gpu.secret-lab.example", "leader-box", "alices-box", "203.0.113.7", "2001:db8::7")
MARKERS = ("SHARD-MARKER", "WEIGHT-MARKER")
NEEDLES = (*HOSTS, *MARKERS, SECRET, "alice", "carol", "decod1-", "secret-lab", "bob-home")
TEXT = (
    f"{JOIN} token {SECRET} at gpu.secret-lab.example:7700 gpu.secret-lab.example leader-box:7700"
    f" 203.0.113.7 [2001:db8::7]:7700 {HOME_FILE} /home/bob-home/x alice@alices-box /data/carol"
)


def plant(folder: Path) -> list[str]:
    """Fills a state folder with secrets, and returns those that are made here."""
    key = load_or_create_identity(folder)
    pem = key.to_pem().decode()
    root = folder / "roots" / "test"
    root.mkdir(parents=True)
    load_or_create_identity(root, "root.key")
    other = (root / "root.key").read_text()
    text = f"{TEXT}\n{pem}{other}{pem.splitlines()[1]}\n"
    for number in (2, 1, 0):
        path = folder / f"node.log{f'.{number}' if number else ''}"
        write_log(folder, (1.0, "node.started", {"reason": text, "address": "leader-box:7700"}))
        if number:
            (folder / "node.log").rename(path)
    for name in ("compute.log", "planning.log", "crash-20260101T000000Z-1.txt"):
        (folder / name).write_text(text)
    write_rounds(folder)
    with (folder / "journal" / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"name": text}) + "\n")
    write_iterations(folder, [{"iteration": 1, "time": "203.0.113.7", "duration_s": 1.0}])
    run = folder / "runs" / RUN_ID
    for path in (
        folder / "data" / "shard.bin",
        run / "states" / "1",
        run / "model" / "model.safetensors",
        folder / "memberships" / "key" / "papers.json",
        folder / "memberships" / "key" / "tokens.json",
        folder / "memberships" / "key" / "audit_log" / "1.jsonl",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{MARKERS} {text}")
    return [line for each in (pem, other) for line in each.splitlines() if "-----" not in line]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host whose facts hold secrets too; returns the folder to write to."""
    status = status_of(join_string=JOIN, data_join_string=JOIN, message=TEXT)
    monkeypatch.setattr("decod.daemon.control.ask", lambda *_, **__: status)
    monkeypatch.setattr("decod.insight.why_evidence.ask", lambda *_, **__: status)
    monkeypatch.setattr(command, "_doctor", lambda _: {"checks": [{"found": TEXT}]})
    monkeypatch.setattr(command, "_users", lambda: ["carol", "alice"])
    monkeypatch.setattr(command, "_home", lambda: "/home/alice")
    monkeypatch.setattr(facts, "own_hosts", lambda: ["alices-box"])
    (tmp_path / "run.toml").write_text(f"# {TEXT}\nname = 'test'\n")
    process = Mock(
        cmdline=lambda: ["decod", "leader", "run.toml", "--join", TEXT], cwd=lambda: str(tmp_path)
    )
    monkeypatch.setattr(facts, "_daemon_of", lambda _: process)
    monkeypatch.setenv("DECOD_JOIN_FILE", HOME_FILE)
    monkeypatch.setenv("DECOD_ADVERTISE", "vpn.secret-lab.example")
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def unpacked(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        assert {(info.uname, info.gname, info.uid) for info in archive} == {("", "", 0)}
        members = {info.name: archive.extractfile(info) for info in archive}
    top = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as archive:
        found = {}
        for info in archive:
            file = archive.extractfile(info)
            assert file is not None
            found[info.name.removeprefix(f"{top}/")] = file.read().decode()
    assert members.keys() == {f"{top}/{name}" for name in found}
    return found


def test_no_planted_secret_is_in_the_archive(
    told: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    secrets = plant(state)
    assert main(["bugreport", "--yes", "--state-dir", str(state)]) == ExitCode.OK
    (path,) = told.iterdir()
    files = unpacked(path)
    assert {*files} == {
        *("CONTENTS.txt", "versions.json", "system.json", "configuration.json", "status.json"),
        *("why.json", "doctor.json", "node.log", "node.log.1", "node.log.2", "journal.jsonl"),
        *("compute.log", "planning.log", "crash-20260101T000000Z-1.txt"),
        f"runs/{RUN_ID}/iterations.csv",
    }
    for name, text in files.items():
        for needle in (*NEEDLES, *secrets):
            assert needle.lower() not in text.lower(), (name, needle)
    assert path.stat().st_mode & 0o777 == 0o600
    # The same host has the same pseudonym everywhere.
    first = json.loads(files["node.log"].splitlines()[0])["address"].removesuffix(":7700")
    assert first.startswith("host-")
    for name in ("status.json", "doctor.json", "compute.log", "configuration.json"):
        assert f"{first}:7700" in files[name], name
    assert json.loads(files["status.json"])["join_string"] is None
    started = json.loads(files["configuration.json"])
    assert started["command"][:3] == ["decod", "leader", "run.toml"]
    assert "name = 'test'" in started["run_file"]
    said = capsys.readouterr().out
    assert f"written: {path}" in said
    for name in files:
        assert name in said


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True


def test_nothing_is_written_without_a_yes(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bugreport", "--state-dir", str(tmp_path / "none")]
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert main(arguments) == ExitCode.OK
    assert not [*told.iterdir()]
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(arguments) == ExitCode.USAGE
    asked = capsys.readouterr()
    assert "give --yes" in asked.err
    assert asked.out == "", "it has not looked at anything yet"
    assert not [*told.iterdir()]
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert main([*arguments, "-o", "mine.tar.gz"]) == ExitCode.OK
    assert [path.name for path in told.iterdir()] == ["mine.tar.gz"]
    assert main([*arguments, "-y", "-o", "mine.tar.gz"]) == ExitCode.USAGE
    assert main([*arguments, "-y", "-o", "mine.zip"]) == ExitCode.USAGE


def test_a_node_that_is_down_has_a_report_too(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object, **__: object) -> dict[str, Any]:
        raise NotRunningError("no daemon answers", why="none runs", fix="start one")

    monkeypatch.setattr("decod.daemon.control.ask", ask)
    monkeypatch.setattr("decod.insight.why_evidence.ask", ask)
    write_log(tmp_path, (1.0, "node.stopped", {"reason": "removed: lost"}))
    assert main(["bugreport", "-y", "-o", "mine.tar.gz", "--state-dir", str(tmp_path)]) == 0
    files = unpacked(told / "mine.tar.gz")
    assert "no daemon answers" in json.loads(files["status.json"])["error"]
    questions = [each["question"] for each in json.loads(files["why.json"])["answers"]]
    assert questions == ["idle", "slow", "removed"]


def test_a_full_disk_is_an_error_and_leaves_nothing(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert main(["bugreport", "-y", "--state-dir", str(tmp_path)]) == ExitCode.HARDWARE
    said = capsys.readouterr().err
    assert "E-HW-016" in said
    assert "No space left on device" in said
    assert not [*told.iterdir()]


def test_a_really_full_disk_is_an_error_and_leaves_nothing(told: Path, tmp_path: Path) -> None:
    folder = told / "small"
    with small_disk(folder, 64 << 10):
        with pytest.raises(OSError, match="No space"):
            (folder / "rest").write_bytes(bytes(1 << 20))
        before = {*folder.iterdir()}
        path = folder / "mine.tar.gz"
        arguments = ["bugreport", "-y", "-o", str(path), "--state-dir", str(tmp_path)]
        assert main(arguments) == ExitCode.HARDWARE
        assert {*folder.iterdir()} == before


def collected(folder: Path) -> Contents:
    return contents_of(folder, {}, Redactor(users=["alice"], home="/home/alice"))


def test_the_newest_parts_of_a_long_log_win_and_the_rest_is_told(tmp_path: Path) -> None:
    line = b"x" * 1023 + b"\n"
    for name, size in (("node.log", LOG_MAX_BYTES // 2), ("node.log.1", LOG_MAX_BYTES)):
        (tmp_path / name).write_bytes(line * (size // len(line)))
    (tmp_path / "node.log.2").write_bytes(line)
    (tmp_path / "compute.log").write_bytes(line * 4096)
    found = collected(tmp_path)
    sizes = {file.name: len(file.content) for file in found.files}
    assert sizes["node.log"] == LOG_MAX_BYTES // 2
    assert LOG_MAX_BYTES // 2 - 2048 < sizes["node.log.1"] <= LOG_MAX_BYTES // 2
    assert "node.log.2" not in sizes
    assert sizes["compute.log"] <= contents.OTHER_MAX_BYTES
    told = found.files[0].content.decode()
    assert "left out: its oldest" in told
    assert "node.log.2: 1,024 bytes, older than what the report has room for" in told


def test_unreadable_files_are_named_and_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node.log").write_text("one line\n")
    os.mkfifo(tmp_path / "planning.log")
    (tmp_path / "compute.log").mkdir()
    (tmp_path / "crash-1.txt").symlink_to(tmp_path / "gone")
    (tmp_path / "node.log.1").write_text("secret")
    read_end = contents.read_end

    def read(path: Path, size_max_bytes: int) -> bytes:
        if path.name == "node.log.1":
            raise PermissionError(errno.EACCES, "Permission denied")
        return read_end(path, size_max_bytes)

    monkeypatch.setattr(contents, "read_end", read)
    found = collected(tmp_path)
    assert [file.name for file in found.files] == ["CONTENTS.txt", "node.log"]
    told = "\n".join(found.left_out)
    for name in ("node.log.1: Permission denied", "planning.log: ", "compute.log: "):
        assert name in told
