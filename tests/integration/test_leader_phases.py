"""The leader is killed in every phase of an iteration, and the other data node goes on from there.

One run for all: who was killed comes back, and is the other one next time. The relays' wall clocks
jump by hours meanwhile, which nobody minds.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from decod.protocol.core.view import Role
from decod.run.run_config import RunConfig
from tests.support.cluster import Cluster, Daemon
from tests.support.doomed_leader import MOMENTS
from tests.support.history import check, read_lives
from tests.support.runs import make_run
from tests.support.soak import LEARNING_RATE, reference_error

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

HOURS_S = 1 * 3600
CLIP_NORM = 0.5


def start_data_node(cluster: Cluster, name: str, *arguments: str) -> Daemon:
    """Returns a data node that can be told to die, by what is written to the file `order`."""
    order = cluster.folder / name / "order"
    order.unlink(missing_ok=True)
    program = (sys.executable, "-u", "-m", "tests.support.doomed_leader", str(order))
    return cluster.start(name, "leader", cluster.run_file, *arguments, program=program)


def start_all(cluster: Cluster) -> dict[str, Daemon]:
    """Returns the two data nodes, the leader first."""
    leader = start_data_node(cluster, "data-0")
    join_string = cluster.wait_for(lambda: cluster.join_string(leader), "the join string")
    data_join = cluster.join_string(leader, Role.DATA) or ""
    other = start_data_node(cluster, "data-1", "--join", data_join)
    for stage, offset_s in ((1, HOURS_S), (2, -HOURS_S)):
        skewed = (sys.executable, "-u", "-m", "tests.support.skewed", str(offset_s))
        options = ("--stage", str(stage))
        cluster.start(f"relay-{stage}", "join", join_string, *options, program=skewed)
    return {"data-0": leader, "data-1": other}


def test_a_leader_that_dies_in_any_phase_is_followed_by_the_other(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(num_data_nodes=2, min_nodes_per_stage=1)
    # Small, since one process must do again what all have done while a node was starting.
    run = replace(
        run,
        model=replace(run.model, num_hidden_layers=2),
        batch=replace(run.batch, num_microbatches=4),
        # Else no norm would go down.
        optimizer=replace(run.optimizer, lr=LEARNING_RATE, clip_norm=CLIP_NORM),
    )
    with Cluster(tmp_path, run, corpus) as cluster:
        nodes = start_all(cluster)
        dies, goes_on = "data-0", "data-1"
        for moment in MOMENTS:
            kill_and_recover(cluster, nodes, (dies, goes_on), moment)
            join_string = nodes[goes_on].status()["join_string"]
            nodes[dies] = start_data_node(cluster, dies, "--join", join_string)
            cluster.wait_for(nodes[dies].is_ready, f"{dies} back in the run")
            dies, goes_on = goes_on, dies
        last = nodes[dies].iteration + 2
        cluster.wait_for_iteration(last, node=nodes[dies])
        end(cluster, nodes[dies])
        assert_whole(run, corpus, cluster)


def kill_and_recover(
    cluster: Cluster, nodes: dict[str, Daemon], names: tuple[str, str], moment: str
) -> None:
    """Has the leader die, and waits until the other one has committed something."""
    dies, goes_on = (nodes[name] for name in names)
    (dies.folder / "order").write_text(moment, encoding="utf-8")
    cluster.wait_for(lambda: dies.process.poll() is not None, f"{dies.name} to die as {moment}")
    killed_s, before = time.monotonic(), goes_on.iteration
    assert dies.process.poll() == -9
    cluster.wait_for_iteration(before + 2, node=goes_on)
    status = goes_on.status()
    assert status["leader"]["name"] == goes_on.name
    print(f"killed while {moment}: training goes on after {time.monotonic() - killed_s:.1f} s")


def end(cluster: Cluster, leader: Daemon) -> None:
    leader.end_run()
    assert leader.wait() == 0
    for daemon in cluster.daemons:
        daemon.wait()


def assert_whole(run: RunConfig, corpus: Path, cluster: Cluster) -> None:
    """Checks what all nodes have logged, and the losses against one process."""
    names = {daemon.name: daemon for daemon in cluster.daemons}
    lives = [life for name, daemon in names.items() for life in read_lives(name, daemon.state_dir)]
    found = check(lives)
    error = reference_error(run, corpus, found)
    print(found, f"losses differ by {error:.1e}", sep="\n")
    assert not found.violations
    assert len(found.leaders) == len(MOMENTS) + 1
    assert error < 1e-8
