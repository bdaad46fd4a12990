"""A node that stood still blames nobody: only time in which it ran counts against others."""

import os
import signal
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from decod.protocol.core.messages import STANDS_STILL
from tests.support import stalled
from tests.support.cluster import Cluster
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

STALL_S = 4.5
"""Of each stall. Longer than a suspect has to answer, and than watchers wait for a heartbeat."""


HELD_UP_MAX_S = 10.0


@pytest.mark.slow
def test_a_leader_whose_loop_is_blocked_again_and_again_keeps_its_members(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run()
    assert max(run.protocol.heartbeat_timeout_s, run.protocol.probe_timeout_s) < STALL_S
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=(*stalled.PROGRAM, str(STALL_S)))
        cluster.start_relays(2)
        cluster.wait_for_iteration(3)
        leader.send(signal.SIGUSR1)
        cluster.wait_for_iteration(leader.iteration + 10, timeout_s=90.0)
        assert not leader.events("member.lost")
        found = leader.losses()
        expected, _ = reference(run, corpus, len(found))
        assert loss_error(found, expected) < 1e-8


@pytest.mark.slow
def test_a_compute_process_that_stands_still_holds_a_run_up_for_seconds(
    tmp_path: Path, corpus: Path
) -> None:
    """Another relay of its stage does the work. Its own node waits a minute before it ends it."""
    run = make_run()
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        relays = cluster.start_relays(2)
        cluster.wait_for_iteration(3)
        pid = relays[0].compute_pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        cluster.wait_for_iteration(leader.iteration + 3, timeout_s=30.0)
        commits = [e["time"] for e in leader.events("iteration.committed")]
        gaps_s = [
            (datetime.fromisoformat(after) - datetime.fromisoformat(before)).total_seconds()
            for before, after in pairwise(commits)
        ]
        print(f"held up for {max(gaps_s):.1f} s")
        assert max(gaps_s) < HELD_UP_MAX_S
        (lost,) = leader.events("member.lost")
        assert lost["reason"] == STANDS_STILL
        found = leader.losses()
        expected, _ = reference(run, corpus, len(found))
        assert loss_error(found, expected) < 1e-8
