"""However a host asks a node to leave, it leaves in order, and a leader keeps what was learnt."""

import fcntl
import signal
import socket
from pathlib import Path

import pytest

from decod.config.run_file import DataSource, render_run_file
from decod.membership.tokens import Token
from decod.net.join_string import JoinString
from decod.process import LEAVE_SIGNALS
from decod.protocol.core.view import Role
from tests.support import terminal, unhurried
from tests.support.cluster import Cluster, Daemon
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def checkpoints(daemon: Daemon) -> list[int]:
    return [record["iteration"] for record in daemon.events("checkpoint.written")]


def test_a_leader_whose_terminal_is_closed_keeps_the_last_iteration(
    tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(program=terminal.PROGRAM)
        relays = cluster.start_relays(1)
        cluster.wait_for_iteration(3)
        leader.send(terminal.CLOSE)
        assert leader.wait() == 0
        assert checkpoints(leader) == [leader.iteration]
        assert [relay.wait() for relay in relays] == [0, 0]


@pytest.mark.slow
def test_a_relay_on_a_closed_terminal_leaves_in_order_and_more_signals_do_not_hurry_it(
    tmp_path: Path, corpus: Path
) -> None:
    """A shell and the system both send SIGHUP, and a session that ends sends SIGTERM besides."""
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        join = cluster.join_string(leader) or ""
        more = ("--drain-timeout", "4s", "--stage")
        relay = cluster.start("relay-1", "join", join, *more, "1", program=terminal.PROGRAM)
        other = cluster.start("relay-2", "join", join, *more, "2")
        cluster.wait_for_iteration(2)

        relay.send(terminal.CLOSE)
        cluster.wait_for(lambda: relay.events("successor.awaited"), "that it waits for a successor")
        assert relay.wait() == 0
        assert len(relay.events("node.draining")) == 1

        other.send(signal.SIGHUP)
        cluster.wait_for(lambda: other.events("node.draining"), "that it leaves")
        other.send(signal.SIGHUP)
        other.send(signal.SIGTERM)
        other.send(signal.SIGHUP)
        assert other.wait() == 0
        assert "stopped at once" not in other.stdout


@pytest.mark.parametrize("number", LEAVE_SIGNALS)
def test_a_volunteer_that_still_looks_for_its_run_ends_in_order(
    tmp_path: Path, corpus: Path, number: signal.Signals
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Cluster(tmp_path, make_run(), corpus) as cluster,
    ):
        silent.settimeout(60.0)
        there = f"127.0.0.1:{silent.getsockname()[1]}"
        join = JoinString(root=bytes(32), addresses=(there,), token=Token.new(Role.RELAY))
        relay = cluster.start("relay", "join", str(join))
        with silent.accept()[0]:
            relay.send(number)
            assert relay.wait(timeout_s=10.0) == 0
        assert "left before anything had begun" in relay.stdout


@pytest.mark.parametrize("number", LEAVE_SIGNALS)
def test_a_leader_that_still_prepares_its_data_ends_in_order(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    cache = tmp_path / "cache" / "decod"
    cache.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    with (
        (cache / ".corpus.lock").open("wb") as lock,
        Cluster(tmp_path / "run", make_run(), corpus) as cluster,
    ):
        # Another process prepares the corpus: this one waits for it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster.run_file.write_text(render_run_file(cluster.run, DataSource()), encoding="utf-8")
        leader = cluster.start("leader", "leader", cluster.run_file)
        cluster.wait_for((leader.state_dir / "identity.key").exists, "its beginning")
        leader.send(number)
        assert leader.wait(timeout_s=10.0) == 0
        assert "left before anything had begun" in leader.stdout
