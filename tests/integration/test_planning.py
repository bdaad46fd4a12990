"""The leader's planning process: flows that it chose are used, and its death costs nothing else."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Daemon
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def num_whole_flows(leader: Daemon) -> int:
    """Returns how many of the flows in use were settled: the leader knows their whole way."""
    status = leader.try_status() or {"flows": ()}
    return sum(len(flow["path"]) == 4 for flow in status["flows"])


@pytest.mark.slow
def test_a_planning_process_that_is_killed_is_replaced_and_the_run_goes_on(
    tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, make_run(), corpus) as cluster:
        leader = cluster.start_leader()
        relays = cluster.start_relays(2)
        killed = cluster.wait_for(leader.planning_pid, "a planning process")
        os.kill(killed, signal.SIGKILL)
        cluster.wait_for(
            lambda: leader.planning_pid() not in (None, killed), "another planning process"
        )
        cluster.wait_for(lambda: num_whole_flows(leader) > 0, "flows that were settled")
        cluster.wait_for_iteration(leader.iteration + 2)
        assert leader.compute_pid() is not None
        assert not leader.events("member.lost")
        assert not any(relay.planning_pid() for relay in relays), "only a leader needs one"
