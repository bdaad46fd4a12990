"""A node whose devices divide each microbatch learns the same, and comes back after a lost rank."""

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from decod.exit_codes import ExitCode
from tests.support import unhurried
from tests.support.cluster import Cluster, Daemon, assert_refused, run_decod, takes_part
from tests.support.quick import first_of
from tests.support.runs import loss_error, make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

LOSS_ERROR_MAX = 1e-9
NUM_ITERATIONS = 16
WAIT_S = 240.0
"""For processes that load torch one after another, while the machine is busy."""


def ranks_of(daemon: Daemon) -> list[int]:
    """Returns the ids of a node's ranks but the first, which is its compute process."""
    pid = daemon.compute_pid()
    return [] if pid is None else [child.pid for child in psutil.Process(pid).children()]


@pytest.mark.slow
@pytest.mark.parametrize("spread", first_of(["shard", "copy"]))
def test_a_node_with_two_ranks_learns_the_same_and_comes_back_when_one_has_died(
    tmp_path: Path, corpus: Path, spread: str
) -> None:
    devices = ("--device", "cpu,cpu", "--spread", spread)
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(*devices, program=unhurried.PROGRAM)
        relay = cluster.start_relay("relay-1-0", "--stage", "1", *devices)
        others = [cluster.start_relay(f"relay-{k}-1", "--stage", str(k)) for k in (1, 2)]
        for each in (relay, *others):
            cluster.wait_for(
                lambda each=each: takes_part(cluster, each), "all members", timeout_s=WAIT_S
            )
        assert "\ndevice: 2 devices: CPU; CPU\n" in relay.stdout
        assert relay.status()["node"]["device"] == "cpu,cpu"
        assert bool(relay.events("memory.spread")) == (spread == "shard")
        assert len(ranks_of(leader)) == 1
        before = leader.iteration
        cluster.wait_for_iteration(before + 3, node=relay, timeout_s=WAIT_S)

        (rank,) = ranks_of(relay)
        os.kill(rank, signal.SIGKILL)
        cluster.wait_for(lambda: relay.events("worker.died"), "its word", timeout_s=WAIT_S)
        (died,) = relay.events("worker.died")
        assert died["reason"] == "rank 1 on cpu ended (signal 9), and its sum of gradients is lost"

        def is_back() -> bool:
            relay.refuse_death()
            return ranks_of(relay) not in ([], [rank]) and takes_part(cluster, relay)

        cluster.wait_for(is_back, "its return", timeout_s=WAIT_S)
        before = leader.iteration
        cluster.wait_for_iteration(before + 3, node=relay, timeout_s=WAIT_S)
        left = [*ranks_of(leader), *ranks_of(relay)]
        leader.send(signal.SIGTERM)
        assert [daemon.wait() for daemon in cluster.daemons] == [0] * 4
        assert not any(map(psutil.pid_exists, left))
        expected, _ = reference(cluster.run, corpus, len(leader.losses()))
        worst = loss_error(leader.losses(), expected)
        print(f"losses {worst:.1e} after {len(expected)} iterations")
        assert worst < LOSS_ERROR_MAX


@pytest.mark.slow
def test_a_spread_stage_is_stopped_and_resumed_as_if_nothing_had_been(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    devices = ("--device", "cpu,cpu", "--spread", "shard")

    def start(cluster: Cluster, *arguments: str | Path) -> Daemon:
        leader = cluster.start_leader(*devices, *arguments, program=unhurried.PROGRAM)
        cluster.start_relay("relay-1-0", "--stage", "1", *devices)
        cluster.start_relay("relay-2-0", "--stage", "2")
        return leader

    with Cluster(tmp_path / "before", run, corpus) as before:
        first = start(before)
        before.wait_for_iteration(3, timeout_s=WAIT_S)
        first.end_run()
        assert first.wait() == 0
        assert first.events("memory.spread")
        losses = first.losses()
    last, model = max(losses), tmp_path / "model"
    assert last < NUM_ITERATIONS, "it has ended by itself"
    shutil.copytree(first.state_dir / "runs", tmp_path / "after" / "leader" / "state" / "runs")
    with Cluster(tmp_path / "after", run, corpus) as after:
        second = start(after, "--resume", "latest", "--export", model)
        assert set(after.wait_for_end(timeout_s=WAIT_S).values()) == {0}
        assert min(second.losses()) == last + 1
        losses |= second.losses()
    expected, weights = reference(run, corpus, NUM_ITERATIONS)
    worst, error = loss_error(losses, expected), weight_error(model, weights)
    print(f"resumed with iteration {last + 1}: losses {worst:.1e}, weights {error:.1e}")
    assert worst < LOSS_ERROR_MAX
    assert error < LOSS_ERROR_MAX


def test_devices_that_cannot_divide_a_microbatch_are_refused(tmp_path: Path, corpus: Path) -> None:
    with Cluster(tmp_path, make_run(), corpus) as cluster:
        result = run_decod(
            *("leader", cluster.run_file, "--state-dir", tmp_path / "state"),
            *("--listen", "127.0.0.1:0", "--no-page", "--device", "cpu,cpu,cpu"),
            timeout_s=WAIT_S,
        )
    words = ["E-CFG-021 3 devices for microbatches of 2 sequences", "batch.microbatch_size"]
    assert_refused(result, exit_code=ExitCode.CONFIG, holds=words)
