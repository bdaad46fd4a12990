"""A leader that fails keeps what was learnt before it ends, as one that is asked to end does."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Daemon, run_decod
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

MARKED = 5


def last_checkpoint(daemon: Daemon) -> int:
    """Returns the iteration of the only checkpoint, all of whose hashes hold."""
    verified = run_decod("checkpoint", "verify", "--state-dir", daemon.state_dir)
    assert verified.returncode == 0, verified
    (record,) = daemon.events("checkpoint.written")
    return int(record["iteration"])


def test_a_leader_that_loses_its_device_keeps_the_newest_state_on_disks(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(min_nodes_per_stage=1)
    protocol = replace(run.protocol, snapshot_every_iterations=MARKED)
    with Cluster(tmp_path / "before", replace(run, protocol=protocol), corpus) as cluster:
        leader = cluster.start_leader()
        relays = cluster.start_relays(1)
        cluster.wait_for_iteration(3 * MARKED)
        pid = leader.compute_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert leader.wait() == 1
        assert "the leader's device failed" in leader.stderr
        kept = last_checkpoint(leader)
        assert kept % MARKED == 0
        assert leader.iteration - 2 * MARKED < kept <= leader.iteration
        assert f"--resume {kept}" in leader.stdout
        assert [relay.wait() for relay in relays] == [1, 1]

    with Cluster(tmp_path / "after", run, corpus) as after:
        (tmp_path / "after" / "leader").mkdir()
        (leader.state_dir).rename(tmp_path / "after" / "leader" / "state")
        again = after.start_leader("--resume", "latest")
        after.start_relays(1)
        # Its log begins with what the first one has written: the status is its own.
        after.wait_for(lambda: again.status()["iteration"] >= kept + 3, "what it goes on with")
        again.send(signal.SIGTERM)
        assert again.wait() == 0
        found = again.losses()
        assert loss_error(found, reference(run, corpus, len(found))[0]) < 1e-8


def test_a_leader_whose_core_fails_keeps_the_last_iteration(tmp_path: Path, corpus: Path) -> None:
    order = tmp_path / "order"
    program = (sys.executable, "-u", "-m", "tests.support.failing_core", str(order))
    with Cluster(tmp_path / "run", make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(program=program)
        relays = cluster.start_relays(1)
        cluster.wait_for_iteration(3)
        order.touch()
        assert leader.wait() == 1
        assert "E-INT-001 ZeroDivisionError: a bug" in leader.stderr
        kept = last_checkpoint(leader)
        assert leader.iteration - 1 <= kept <= leader.iteration
        assert f"--resume {kept}" in leader.stdout
        for relay in relays:
            relay.send(signal.SIGKILL)
        (report,) = leader.state_dir.glob("crash-*.txt")
        report.unlink()
