"""Volunteers die, come and go while a run trains; what is learnt is as if nothing had happened.

An iteration that lost a node is repeated with the same microbatches, so even the loss of a run that
was disturbed equals that of one undisturbed process, to the last digits of float64.
"""

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import unhurried
from tests.support.cluster import Cluster, Daemon, is_removed, run_decod, stage_nodes, takes_part
from tests.support.runs import loss_error, make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

LEAVE_TIMEOUT_S = 20.0


def microbatches_done(cluster: Cluster, daemon: Daemon) -> int:
    """Returns how many microbatches a member has done as the leader knows, 0 for a stranger."""
    status = cluster.leader.status()
    found = [node for node in stage_nodes(status) if node["name"] == daemon.name]
    return int(found[0]["microbatches"] or 0) if found else 0


def waiting(leader: Daemon) -> bool:
    """Returns whether the relay waits at the leader to be taken."""
    status = leader.try_status()
    return status is not None and "relay" in [one["name"] for one in status["candidates"]]


def check_losses(cluster: Cluster, corpus: Path) -> None:
    found = cluster.leader.losses()
    expected, _ = reference(cluster.run, corpus, len(found))
    assert loss_error(found, expected) < 1e-8


@pytest.mark.slow
def test_relays_come_and_go_and_nothing_changes(tmp_path: Path, corpus: Path) -> None:
    """One joins, one leaves on SIGTERM, one loses its compute process, and one's stands still: both
    have another and come back. Then the leader ends it."""
    run = make_run()
    # A process that hangs is given a quarter of it.
    run = replace(run, protocol=replace(run.protocol, iteration_timeout_s=30.0))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        relays = cluster.start_relays(2)
        cluster.wait_for_iteration(3)

        # The model of a commit while training goes on, of both stages.
        export = run_decod("export", tmp_path / "model", "--state-dir", leader.state_dir)
        assert export.returncode == 0, export
        words = export.stdout.split()
        iteration = int(words[words.index("iteration") + 1])
        _, weights = reference(cluster.run, corpus, iteration)
        assert weight_error(tmp_path / "model", weights) < 1e-8

        # Its weights and optimizer state come from a member, in the middle of training.
        newcomer = cluster.start_relay("newcomer", "--stage", "2")
        cluster.wait_for(lambda: takes_part(cluster, newcomer), "the newcomer's admission")
        cluster.wait_for(lambda: microbatches_done(cluster, newcomer), "the newcomer's work")
        assert newcomer.events("state.loaded")
        joined = min(newcomer.losses())
        assert newcomer.losses()[joined] == leader.losses()[joined]

        leaving, start_s = relays[-1], time.monotonic()
        leaving.send(signal.SIGTERM)
        assert leaving.wait(timeout_s=LEAVE_TIMEOUT_S) == 0
        print(f"left after {time.monotonic() - start_s:.1f} s")
        cluster.wait_for(lambda: is_removed(cluster, leaving), "the leaver's goodbye")
        assert not leader.events("member.lost")

        # A host without its compute process can't serve: it says so, and the run goes on without it
        # until it has another one.
        broken = relays[1]
        pid = broken.compute_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        cluster.wait_for(lambda: is_removed(cluster, broken), "removal of the broken node")
        cluster.wait_for_iteration(leader.iteration + 3)

        hung = relays[2]
        a_compute_process_hangs(cluster, hung)

        leader.send(signal.SIGTERM)
        assert leader.wait(timeout_s=LEAVE_TIMEOUT_S) == 0
        assert newcomer.wait(timeout_s=LEAVE_TIMEOUT_S) == 0
        for relay in (relays[0], broken, hung):
            assert relay.wait(timeout_s=LEAVE_TIMEOUT_S) == 0
        check_losses(cluster, corpus)


def a_compute_process_hangs(cluster: Cluster, hung: Daemon) -> None:
    """Its node lives and answers, and is the only one that can tell."""
    pid = hung.compute_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    cluster.wait_for(lambda: is_removed(cluster, hung), "removal of the hung node")
    named = f"{hung.name} .* is gone: its compute process stands still"
    assert any(re.match(named, one["text"]) for one in cluster.leader.status()["recent"])
    assert len(hung.events("node.stopped")) == 1
    cluster.wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of what hung")
    cluster.wait_for(lambda: takes_part(cluster, hung), "its return")
    cluster.wait_for_iteration(cluster.leader.iteration + 3)


def test_a_candidate_leaves_before_it_was_needed(tmp_path: Path, corpus: Path) -> None:
    """The run waits for more volunteers; Ctrl-C ends those that wait, the leader too, with 0."""
    with Cluster(tmp_path, make_run(), corpus) as cluster:
        leader = cluster.start_leader()
        relay = cluster.start_relay("relay")
        cluster.wait_for(lambda: waiting(leader), "the candidate's knock")
        relay.send(signal.SIGINT)
        assert relay.wait(timeout_s=LEAVE_TIMEOUT_S) == 0
        leader.send(signal.SIGINT)
        assert leader.wait(timeout_s=LEAVE_TIMEOUT_S) == 0
