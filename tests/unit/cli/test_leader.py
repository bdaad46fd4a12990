"""`decod leader`, `decod join`, `decod export`: what they make of their command lines."""

import io
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from decod.cli.node_options import speaking
from decod.config import NodeConfig
from decod.config.node_config import RESUME_AUTO, Recompute, default_state_dir
from decod.daemon.demands import JoinOptions
from decod.daemon.entry import LeaderOptions
from decod.errors import DataError, NotRunningError, RejectedError

Seen = list[Any]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the daemons were asked to do; none is started."""
    box: Seen = []

    def run(options: object, say_line: Callable[[str], None]) -> int:
        box.append(options)
        say_line("join string: decod1-x")
        return 0

    monkeypatch.setattr("decod.daemon.leader_daemon.run_leader", run)
    monkeypatch.setattr("decod.daemon.life.run_join", run)
    return box


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    assert main(["run", "init", str(path)]) == 0
    return str(path)


def test_a_leader_without_options_listens_everywhere_and_measures(
    seen: Seen, run_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["leader", run_file]) == 0
    (options,) = seen
    assert isinstance(options, LeaderOptions)
    assert options.node == NodeConfig(state_dir=default_state_dir())
    assert options.run_file.path == Path(run_file)
    assert (options.init_dir, options.join, options.export_dir, options.data) == (None,) * 4
    assert capfd.readouterr().out.endswith("join string: decod1-x\n")


def test_every_option_of_a_leader_arrives(
    seen: Seen, run_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "--listen [::1]:0 --advertise example.org:7 --device cuda:1 --capacity 3 --threads 2"
    line += (
        " --upload-max 1.5Gbit/s --drain-timeout 5m --state-dir state --name n --init i --data d"
    )
    line += " --join J --export e --no-rejoin --recompute on"
    assert main(["leader", run_file, *line.split()]) == 0
    (options,) = seen
    assert options.node == NodeConfig(
        listen_host="::1",
        listen_port=0,
        advertise="example.org:7",
        device="cuda:1",
        capacity=3,
        recompute=Recompute.ON,
        num_threads=2,
        upload_max_mbit=1500.0,
        drain_timeout_s=300.0,
        state_dir=tmp_path / "state",
        name="n",
        rejoins=False,
    )
    assert (options.init_dir, options.data) == (tmp_path / "i", str(tmp_path / "d"))
    assert (options.join, options.export_dir) == ("J", tmp_path / "e")


@pytest.mark.parametrize(("arguments", "stage_index"), [([], None), (["--stage", "3"], 3)])
def test_a_volunteer_names_a_stage_or_leaves_it_to_the_leader(
    seen: Seen, arguments: list[str], stage_index: int | None
) -> None:
    assert main(["join", "decod1-x@127.0.0.1:1", *arguments]) == 0
    (options,) = seen
    assert isinstance(options, JoinOptions)
    assert options.join_string == "decod1-x@127.0.0.1:1"
    assert options.stage_index == stage_index


def test_a_join_string_need_not_stand_on_the_command_line(
    seen: Seen, run_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody on a host can see that."""
    file = tmp_path / "join"
    file.write_text("decod1-x@127.0.0.1:1\n")
    assert main(["join", "--join-file", str(file)]) == 0
    assert main(["leader", run_file, "--join-file", str(file)]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"  decod1-y@127.0.0.1:1\n")))
    assert main(["join", "--join-file", "-"]) == 0
    volunteer, leader, piped = seen
    assert (volunteer.join_string, leader.join) == ("decod1-x@127.0.0.1:1",) * 2
    assert piped.join_string == "decod1-y@127.0.0.1:1"


def test_a_join_string_has_one_place(
    seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "join"
    file.write_bytes(b"\xff")
    os.mkfifo(tmp_path / "pipe")
    assert main(["join"]) == 2
    assert main(["join", "J", "--join-file", str(file)]) == 2
    capsys.readouterr()
    for name, reason in (("none", "No such file"), ("pipe", "no ordinary"), ("join", "not UTF-8")):
        assert main(["join", "--join-file", str(tmp_path / name)]) == 3
        error = capsys.readouterr().err
        assert "E-CFG-046" in error
        assert reason in error
    assert seen == []


def test_a_leader_goes_on_with_whatever_there_is(seen: Seen, run_file: str, tmp_path: Path) -> None:
    where = ["--resume", "auto", "--init", str(tmp_path), "--write-join", str(tmp_path / "j")]
    assert main(["leader", run_file, *where]) == 0
    (options,) = seen
    assert (options.resume, options.init_dir, options.join_path) == (
        RESUME_AUTO,
        tmp_path,
        tmp_path / "j",
    )
    assert main(["leader", run_file, "--resume", "latest", "--init", str(tmp_path)]) == 2
    assert main(["leader", run_file, "--resume", "auto", "--join", "J"]) == 2
    assert not options.begins_anew
    assert main(["leader", run_file, "--resume", "latest", "--new-run"]) == 0
    assert seen[-1].begins_anew
    assert main(["leader", run_file, "--resume", "auto", "--new-run"]) == 2
    assert main(["leader", run_file, "--join", "J", "--new-run"]) == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--stage", "0"], 2),
        (["--stage", "-1"], 2),
        (["--capacity", "0"], 2),
        (["--capacity", "many"], 2),
        (["--capacity", "4097"], 2),
        (["--threads", "0"], 2),
        (["--listen", "127.0.0.1:99999"], 2),
        (["--listen", "300.0.0.1:1"], 2),
        (["--advertise", "example.org:0"], 3),
        (["--device", "tpu"], 3),
        (["--drain-timeout", "60"], 2),
        (["--drain-timeout", "25h"], 2),
        (["--name", "x\x1b[31m"], 3),
    ],
)
def test_an_impossible_option_starts_nothing(
    seen: Seen, arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["join", "decod1-x@127.0.0.1:1", *arguments]) == code
    assert seen == []
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert "\x1b" not in text


def test_a_leader_needs_a_readable_run_file(seen: Seen, tmp_path: Path) -> None:
    assert main(["leader", str(tmp_path / "none.toml")]) == 3
    assert main(["leader"]) == 3, "there is no run.toml"
    assert seen == []


def test_a_run_file_is_called_run_toml_unless_another_is_named(
    seen: Seen, run_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    shutil.copy(run_file, tmp_path / "here" / "run.toml")
    monkeypatch.chdir(tmp_path / "here")
    assert main(["leader", "--state-dir", str(tmp_path / "state")]) == 0
    assert len(seen) == 1
    for command in (["run", "plan"], ["run", "check"], ["run", "plan", "--json"]):
        assert main(command) == 0, command
    for command in (["run", "init"], ["plan", "run", "--hosts", "nowhere.json"]):
        assert main(command) == 3, "the run file is there, and the file of hosts is not"


def test_a_broken_join_string_is_a_network_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--state-dir", str(tmp_path), "--listen", "127.0.0.1:0"]
    assert main(["join", "decod1-cut", *arguments]) == 4
    text = capsys.readouterr().err
    (line,) = [line for line in text.splitlines() if not line.startswith("warning: ")]
    assert "E-NET-010" in line


def test_an_export_goes_to_an_absolute_path_and_names_its_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def ask(state_dir: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        asked.append((state_dir, request))
        assert timeout_s > 60
        return {"iteration": 12, "path": request["path"]}

    monkeypatch.setattr("decod.daemon.control.ask", ask)
    monkeypatch.chdir(tmp_path)
    assert main(["export", "model", "--state-dir", str(tmp_path)]) == 0
    path = str(tmp_path / "model")
    assert asked == [(tmp_path, {"command": "export", "path": path})]
    assert capsys.readouterr().out == (
        f'iteration 12 is in {path}\nnext: decod generate --model {path} "Once upon a time"\n'
    )


def test_a_failed_export_has_the_daemons_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: object, **__: object) -> dict[str, Any]:
        raise DataError("disk full", why="w", fix="f")

    monkeypatch.setattr("decod.daemon.control.ask", ask)
    assert main(["export", str(tmp_path / "m")]) == 9
    assert "disk full" in capsys.readouterr().err


def test_an_export_without_a_daemon_exits_with_7(tmp_path: Path) -> None:
    assert main(["export", str(tmp_path / "m"), "--state-dir", str(tmp_path)]) == 7
    assert not (tmp_path / "m").exists()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the daemon was asked; the first item is what it answers, or raises."""
    box: Seen = [{}]

    def ask(state_dir: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        box.append(request)
        if isinstance(box[0], Exception):
            raise box[0]
        answer: dict[str, Any] = box[0]
        return answer

    monkeypatch.setattr("decod.daemon.control.ask", ask)
    return box


@pytest.mark.parametrize(
    ("command", "capacity", "line"),
    [
        ("pause", 4, "pausing when the iteration in hand ends"),
        ("pause", 0, "paused"),
        ("resume", 0, "takes microbatches when the iteration in hand ends"),
        ("resume", 4, "this node takes microbatches\n"),
    ],
)
def test_pausing_says_whether_it_is_done(
    asked: Seen, command: str, capacity: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked[0] = {"capacity": capacity}
    assert main([command]) == 0
    assert asked[1:] == [{"command": command}]
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ({"capacity": 4}, "the device is free in an iteration or two"),
        ({"capacity": 0, "device_free": True}, "paused, and the device is free"),
    ],
)
def test_a_pause_may_free_the_device(
    asked: Seen, answer: dict[str, Any], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked[0] = answer
    assert main(["pause", "--free-device"]) == 0
    assert asked[1:] == [{"command": "pause", "free_device": True}]
    assert line in capsys.readouterr().out


def test_who_resumes_with_a_free_device_is_told_that_it_takes_a_while(
    asked: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    asked[0] = {"capacity": 0, "device_free": True}
    assert main(["resume"]) == 0
    assert "joins the run again" in capsys.readouterr().out


def test_a_pause_that_is_refused_says_why(asked: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    asked[0] = RejectedError("this node can't be paused now", why="stage 1 would stop", fix="f")
    assert main(["pause"]) == 5
    assert "stage 1 would stop" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "request_"),
    [
        ([], {"wait": True}),
        (["--no-wait"], {"wait": False}),
        (["--timeout", "0s"], {"wait": True, "timeout_s": 0.0}),
        (["--timeout", "2m"], {"wait": True, "timeout_s": 120.0}),
        (["--end-run"], {"wait": True, "end_run": True}),
    ],
)
def test_draining_waits_unless_it_is_told_not_to(
    asked: Seen, arguments: list[str], request_: dict[str, Any]
) -> None:
    assert main(["drain", *arguments]) == 0
    *looked, drained = asked[1:]
    assert drained == {"command": "drain", **request_}
    timeout = {"timeout_s": request_["timeout_s"]} if "timeout_s" in request_ else {}
    ahead = [] if "end_run" in request_ else [{"command": "leaving", **timeout}]
    assert looked == ahead, "it is told first what leaving means"


LAST = "relay-3 is the last member of stage 2\x1b"


def test_leaving_a_stage_alone_is_told_and_on_a_terminal_asked(
    asked: Seen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked[0] = {"means": LAST, "is_grave": True, "stage": 2, "left_s": 60.0, "detail": "it left"}
    terminal = io.StringIO("n\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["drain"]) == 130
    said = capsys.readouterr().err
    assert said.startswith("relay-3 is the last member of stage 2?\n")
    assert "leave all the same? [y/N]" in said
    assert asked[1:] == [{"command": "leaving"}], "it stays"
    terminal.seek(0)
    assert main(["drain", "--yes"]) == 0
    told = capsys.readouterr()
    assert (told.out, "leave all the same" in told.err) == ("left the run: it left\n", False)
    terminal.seek(0)
    terminal.write("y\n")
    terminal.seek(0)
    assert main(["drain"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["drain"]) == 0, "a script is told, and not asked"
    assert capsys.readouterr().err.endswith("relay-3 is the last member of stage 2?\n")


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        (2, "waiting for another member of stage 2: leaves in 41 s at the latest\n"),
        (None, "finishing what is in hand: leaves in 41 s at the latest\n"),
    ],
)
def test_draining_counts_down(
    stage: int | None,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = threading.Event()
    looks: list[int] = []

    def ask(state_dir: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        if request["command"] == "drain":
            assert left.wait(30.0)
            return {"draining": True, "detail": "time was up"}
        looks.append(1)
        if len(looks) == 3:
            left.set()
        return {"means": "", "is_grave": False, "stage": stage, "left_s": 41.3}

    monkeypatch.setattr("decod.daemon.control.ask", ask)
    monkeypatch.setattr("decod.cli.pause_command._INTERVAL_S", 0.01)
    assert main(["drain"]) == 0
    told = capsys.readouterr()
    assert told.out == "left the run: time was up\n"
    assert told.err == line, "once in ten looks where there is no terminal"


def test_draining_tells_how_the_node_left(asked: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    asked[0] = {"draining": True, "detail": "time was up\x1b[2J"}
    assert main(["drain"]) == 0
    assert capsys.readouterr().out == "left the run: time was up?[2J\n"
    asked[0] = {"draining": True, "detail": "run finished", "unkept": "no model\x1b: a gap"}
    assert main(["drain"]) == 0
    assert capsys.readouterr().err == "no model?: a gap\n"


def test_a_daemon_that_ends_before_it_can_answer_has_left(
    asked: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    asked[0] = NotRunningError("w", why="w", fix="f", code="E-RUN-007")
    assert main(["drain"]) == 0
    assert "the daemon has ended" in capsys.readouterr().out
    asked[0] = NotRunningError("w", why="w", fix="f")
    assert main(["drain"]) == 7


def test_a_line_from_a_peer_cannot_forge_a_second_one(capfd: pytest.CaptureFixture[str]) -> None:
    with speaking() as say:
        say("node x\x1b[2J\njoin string: evil")
    assert capfd.readouterr().out == "node x?[2J join string: evil\n"
