"""Nodes that were about to join a run when it ended: they are told, and have not failed."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def assert_told(cluster: Cluster) -> None:
    """Ends the run, and checks that all others hear of it in a moment."""
    cluster.leader.send(signal.SIGINT)
    codes = cluster.wait_for_end(timeout_s=30.0)
    assert set(codes.values()) == {0}, codes
    for daemon in cluster.daemons[1:]:
        assert "the run has ended: the leader has ended the run" in daemon.stdout
        assert "error" not in daemon.stderr


def test_a_candidate_is_told_that_the_run_has_ended_before_it_began(
    tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader()
        relay = cluster.start_relay("relay", "--stage", "1")
        cluster.wait_for(lambda: relay.events("stage.assigned"), "a candidate with a stage")
        assert not leader.events("run.opened")
        assert_told(cluster)


def test_a_node_that_is_getting_ready_is_told_that_the_run_has_ended(
    tmp_path: Path, corpus: Path
) -> None:
    """It has not offered itself yet: its compute process takes its time, and ends it then."""
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader()
        cluster.start_relays(1)
        cluster.wait_for_iteration(1)
        late = cluster.start_relay("late", "--stage", "1")
        worker = cluster.wait_for(late.compute_pid, "its compute process")
        os.kill(worker, signal.SIGSTOP)
        try:
            cluster.wait_for(lambda: late.events("node.introduced"), "it to be known")
            leader.send(signal.SIGINT)
            assert leader.wait() == 0
        finally:
            os.kill(worker, signal.SIGCONT)
        assert late.wait(timeout_s=30.0) == 0
        assert "the run has ended: the leader has ended the run" in late.stdout


def test_a_node_that_was_removed_does_not_claim_that_the_run_goes_on(
    tmp_path: Path, corpus: Path
) -> None:
    """It was the only one of its stage: the run waits for another, and trains no more."""
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader()
        relay, _ = cluster.start_relays(1)
        cluster.wait_for_iteration(1)
        relay.send(signal.SIGSTOP)
        cluster.wait_for(lambda: leader.events("stage.waiting"), "the run to wait")
        relay.send(signal.SIGCONT)
        counted = "the leader counts this node as lost"
        cluster.wait_for(lambda: counted in relay.stderr, "the relay to hear of it")
        assert "without" not in relay.stderr
