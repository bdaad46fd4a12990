"""A node that stood still blames nobody: only time in which it ran counts against others."""

import signal
from pathlib import Path

import pytest

from tests.support import stalled
from tests.support.cluster import Cluster
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

STALL_S = 4.5
"""Of each stall. Longer than a suspect has to answer, and than watchers wait for a heartbeat."""


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
