"""Nobody can use up the files that a daemon may open, and it says so when they are few."""

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from decod.daemon.control import SOCKET_NAME
from tests.support import few_files
from tests.support.cluster import Cluster, Daemon, assert_refused, child_environment
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

NUM_FILES = 200
NUM_STRANGERS = 600


def open_files(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


@pytest.fixture
def leading(corpus: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A run whose leader may open few files."""
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as living:
        living.start_leader(program=few_files.program(NUM_FILES))
        living.start_relays(1)
        living.wait_for_iteration(1)
        yield living


def test_a_leader_answers_and_trains_while_strangers_take_all_connections(leading: Cluster) -> None:
    leader = leading.leader
    host, _, port = leader.status()["node"]["address"].rpartition(":")
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            for _ in range(NUM_STRANGERS)
        ]
        assert len(strangers) == NUM_STRANGERS
        for _ in range(3):
            # It answers at once, though none of the strangers has gone by itself.
            assert leader.status()["run_state"] in ("training", "aggregating")
            assert open_files(leader) < NUM_FILES - 50
            leading.wait_for_iteration(leader.iteration + 2)
        # Whoever comes now finds a place, for strangers who say nothing lose theirs.
        newcomer = leading.start_relay("newcomer", "--stage", "1")
        leading.wait_for(newcomer.is_ready, "a newcomer among strangers")
        assert leader.status()["counters"]["peer.dropped"] >= 1
    assert not leader.events("member.lost")
    assert not leader.events("files.exhausted")
    log_size_bytes = (leader.state_dir / "node.log").stat().st_size
    assert log_size_bytes < 1 << 20, "no error fills the log"
    assert not leading.tracebacks()


def test_few_files_are_said_at_the_start(corpus: Path, tmp_path: Path) -> None:
    run = make_run(min_nodes_per_stage=9)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=few_files.program(128))
        (told,) = leader.events("files.few")
        assert told["reason"] == "enough for 4 other nodes, and there are 18"
        assert "ulimit -n" in told["fix"]
        assert "may open 128 files" in leader.stderr


def test_the_soft_limit_is_raised_to_the_hard_one(corpus: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, make_run(), corpus) as cluster:
        leader = cluster.start_leader(program=few_files.program(512, soft=100))
        limits = Path(f"/proc/{leader.process.pid}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
        assert line.split()[3:5] == ["512", "512"]
        assert not leader.events("files.few")


def test_too_few_files_for_any_node_are_refused(corpus: Path, tmp_path: Path) -> None:
    run_file = Cluster(tmp_path, make_run(), corpus).run_file
    command = [*few_files.program(64), "leader", str(run_file), "--listen", "127.0.0.1:0"]
    with tempfile.TemporaryDirectory(prefix="decod-") as folder:
        result = subprocess.run(
            [*command, "--state-dir", folder],
            capture_output=True,
            text=True,
            env=child_environment(),
            timeout=60,
            check=False,
        )
    assert_refused(result, exit_code=6, holds=["E-HW-011", "only 64 files", "LimitNOFILE"])


def test_files_that_run_out_all_the_same_are_said_briefly(leading: Cluster) -> None:
    """A program of the operator's own takes them, over the local socket."""
    leader = leading.leader
    path = leader.state_dir / SOCKET_NAME
    with ExitStack() as stack:

        def take_files() -> bool:
            """Connects as often as it can; returns whether there are no more files."""
            with suppress(BlockingIOError):
                while True:
                    client = stack.enter_context(socket.socket(socket.AF_UNIX))
                    client.setblocking(False)
                    client.connect(str(path))
            return bool(leader.events("files.exhausted"))

        leading.wait_for(take_files, "it to say that there are no more files")
        leading.wait_for_iteration(leader.iteration + 2)
    leading.wait_for(leader.try_status, "an answer once they are free")
    assert len(leader.events("files.exhausted")) < 30
    assert leader.stderr.count("\n") < 100
    assert not leader.events("task.failed")
    assert not leader.events("member.lost")
    assert not leading.tracebacks()
