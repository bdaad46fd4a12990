"""What proves a membership, over the life of a run: renewed in time, and found again after it."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from decod.config.schema import RunConfig
from tests.integration.test_checkpoints import write_run_file
from tests.support import brief, unhurried
from tests.support.cluster import Cluster, Daemon, run_decod
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def impatient(run: RunConfig) -> RunConfig:
    """Returns a run whose nodes soon give up a leader that is gone."""
    return replace(run, protocol=replace(run.protocol, leader_timeout_s=3.0))


def test_papers_that_last_for_seconds_are_renewed_while_training_goes_on(
    tmp_path: Path, corpus: Path
) -> None:
    """Each node shows three or more certificates, and connections outlive none of them."""
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(program=brief.PROGRAM)
        relays = cluster.start_relays(1)

        def renewed(daemon: Daemon) -> bool:
            return len(daemon.events("member.renewed")) >= 3

        for daemon in (leader, *relays):
            cluster.wait_for(lambda d=daemon: renewed(d), f"{daemon.name}'s renewals")
        cluster.wait_for_iteration(leader.iteration + 3)
        assert not leader.events("member.lost")
        assert not leader.events("iteration.aborted")[1:], "the first is the run's opening"
        assert leader.status()["counters"].get("caller.refused", 0) == 0


def test_volunteers_find_a_resumed_run_again_without_a_new_join_string(
    tmp_path: Path, corpus: Path
) -> None:
    run = impatient(make_run(min_nodes_per_stage=1))
    with Cluster(tmp_path, run, corpus) as cluster:
        write_run_file(cluster, every_iterations=1)
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        relays = cluster.start_relays(1)
        cluster.wait_for_iteration(3)
        cluster.wait_for(lambda: leader.events("checkpoint.written"), "a checkpoint")
        address, run_id = leader.status()["node"]["address"], leader.status()["run_id"]
        leader.send(signal.SIGKILL)
        leader.wait()
        cluster.daemons.remove(leader)
        resumed = cluster.start(
            "leader", "leader", cluster.run_file, "--resume", "latest", "--listen", address
        )
        cluster.daemons.insert(0, cluster.daemons.pop())
        cluster.wait_for(lambda: cluster.join_string(resumed), "the run again")
        for relay in relays:
            cluster.wait_for(
                lambda r=relay: (
                    r.status()["run_id"] != run_id and r.status()["state"] == "training"
                ),
                f"{relay.name} in the resumed run",
                timeout_s=120.0,
            )
        cluster.wait_for_iteration(resumed.iteration + 2)
        tokens = run_decod("token", "list", "--json", "--state-dir", resumed.state_dir)
        assert tokens.returncode == 0, tokens
        assert '"used": 2' in tokens.stdout, "those of the first start"
        assert '"used": 0' in tokens.stdout, "nobody needed the new one"
