"""Standard output and error that are closed, full, unread, or whose reader has gone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Daemon, child_environment
from tests.support.quick import first_of
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

NUM_ITERATIONS = 12

REDIRECTIONS = {
    "closed": ">&-",
    "full": ">/dev/full",
    "reader gone": "| true",
}
COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "a run file": ["run", "init", "-"],
    "a check": ["run", "check", "run.toml"],
    "tokens": ["data", "show", "--iteration", "1"],
    "checkpoints": ["checkpoint", "list", "--state-dir", "state"],
    "a table": ["simulate", "scenario.toml"],
}
SCENARIO = Path(__file__).resolve().parents[2] / "docs" / "scenario.toml"


def run_redirected(
    folder: Path, arguments: list[str], redirection: str
) -> "subprocess.CompletedProcess[str]":
    """Returns what a command came to, and what it wrote on standard error, if that is open."""
    shell = f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}'
    return subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, "-m", "decod", *arguments],
        cwd=folder,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path, corpus: Path) -> Path:
    cluster = Cluster(tmp_path, make_run(), corpus)
    (tmp_path / "scenario.toml").write_bytes(SCENARIO.read_bytes())
    assert cluster.run_file == tmp_path / "run.toml"
    return tmp_path


@pytest.mark.parametrize("name", first_of(COMMANDS, 4))
def test_what_can_not_be_printed_is_no_bug(folder: Path, name: str) -> None:
    """Closed is as good as /dev/null. A reader that has gone has seen enough."""
    for how, (code, says) in {
        "closed": (0, ""),
        "full": (6, "error: E-HW-013 what this command says can't be written"),
        "reader gone": (141, ""),
    }.items():
        result = run_redirected(folder, COMMANDS[name], REDIRECTIONS[how])
        assert (how, result.returncode) == (how, code), result
        errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
        assert len(errors) == bool(says), result.stderr
        assert all(line.startswith(says) for line in errors), result.stderr
        assert "Traceback" not in result.stderr
    assert not [*folder.rglob("crash-*")]


@pytest.mark.parametrize(
    "redirection", first_of(["2>&-", "<&- >&- 2>&-", "2>/dev/full", ">&- 2>&-"], 2)
)
def test_an_error_that_can_not_be_printed_still_has_its_exit_code(
    folder: Path, redirection: str
) -> None:
    for arguments, code in (
        (["run", "check", "nothing.toml"], 3),
        (["jion"], 2),
        (["status", "--state-dir", "state"], 7),
        (["run", "check", "run.toml"], 0),
    ):
        result = run_redirected(folder, arguments, redirection)
        assert result.returncode == code, (arguments, result)


def start(cluster: Cluster, name: str, redirection: str, *arguments: str | Path) -> Daemon:
    """Starts a node whose standard streams a shell has redirected."""
    folder = cluster.folder / name
    folder.mkdir()
    command = [sys.executable, "-m", "decod", *map(str, arguments), "--name", name]
    command += ["--threads", "1", "--state-dir", str(folder / "state"), "--listen", "127.0.0.1:0"]
    command += ["--device", "cpu"]
    start_s = time.monotonic()
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        stdin=subprocess.DEVNULL,
        env=child_environment(),
        cwd=folder,
        start_new_session=True,
    )
    daemon = Daemon(name, process, folder, start_s)
    cluster.daemons.append(daemon)
    return daemon


@pytest.mark.parametrize(
    "redirection",
    [
        *(
            pytest.param(redirection, marks=pytest.mark.slow)
            for redirection in ("<&- >&- 2>&-", ">/dev/full 2>/dev/full", ">gone 2>gone")
        ),
        ">stuck 2>stuck",
    ],
)
def test_nodes_train_on_whatever_becomes_of_their_streams(
    tmp_path: Path, corpus: Path, redirection: str
) -> None:
    """A pipe is `gone` when its reader is, and `stuck` when that does not read: it is full."""
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    with Cluster(tmp_path, run, corpus) as cluster:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            if "stuck" in redirection:
                while True:
                    try:
                        os.write(writer, bytes(4096))
                    except BlockingIOError:
                        break
            streams = redirection.replace("gone", str(pipe)).replace("stuck", str(pipe))
            leader = start(cluster, "leader", streams, "leader", cluster.run_file)

            def joins() -> str | None:
                status = leader.try_status()
                return status["join_string"] if status is not None else None

            join = cluster.wait_for(joins, "the join string in its status")
            relay = start(cluster, "relay-1", streams, "join", join, "--stage", "1")
            cluster.wait_for(relay.try_status, "its streams to be open")
            # One relay is as good as another, so this one has streams like any.
            cluster.start("relay-2", "join", join, "--stage", "2")
            if "gone" in redirection:
                os.close(reader)
                reader = -1
            assert cluster.wait_for_end() == {"leader": 0, "relay-1": 0, "relay-2": 0}
        finally:
            for end in {reader, writer} - {-1}:
                os.close(end)
        for daemon in cluster.daemons:
            assert daemon.iteration == NUM_ITERATIONS
            log = (daemon.state_dir / "node.log").read_text().splitlines()
            assert all(json.loads(line) for line in log), "nothing else was written into it"
