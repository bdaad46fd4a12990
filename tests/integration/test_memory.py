"""Daemons with too little memory: they recompute, or give a microbatch back, and learn the same."""

import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Daemon
from tests.support.runs import loss_error, make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

NUM_ITERATIONS = 10


def check(cluster: Cluster, corpus: Path, model: Path) -> None:
    """Compare with what one process learns that no memory lacks."""
    losses, weights = reference(cluster.run, corpus, NUM_ITERATIONS)
    assert loss_error(cluster.leader.losses(), losses) < 1e-8
    assert weight_error(model, weights) < 1e-8


def start_starved(cluster: Cluster, kind: str, times: int) -> Daemon:
    program = (sys.executable, "-u", "-m", "tests.support.starved", kind, "5", str(times))
    return cluster.start_relay("starved", "--stage", "1", "--capacity", "4", program=program)


def start_others(cluster: Cluster) -> None:
    """Start relays beside the starved one. All 8 microbatches have room only with its help."""
    cluster.start_relay("one", "--stage", "1", "--capacity", "4")
    for name in ("two", "three"):
        cluster.start_relay(name, "--stage", "2")


def test_daemons_that_recompute_learn_what_one_process_learns(tmp_path: Path, corpus: Path) -> None:
    with Cluster(tmp_path, make_run(num_iterations=NUM_ITERATIONS), corpus) as cluster:
        again = ("--recompute", "on")
        leader = cluster.start_leader("--export", tmp_path / "model", *again)
        for name, stage in (("one", 1), ("two", 1), ("three", 2), ("four", 2)):
            cluster.start_relay(name, "--stage", str(stage), *again)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        assert all(daemon.events("memory.recomputed") for daemon in cluster.daemons)
        assert all(daemon.losses() == leader.losses() for daemon in cluster.daemons)
        check(cluster, corpus, tmp_path / "model")


def test_forward_passes_without_memory_are_computed_by_others(tmp_path: Path, corpus: Path) -> None:
    """No microbatch waits for another iteration, so losses are those of an undisturbed run."""
    with Cluster(tmp_path, make_run(num_iterations=NUM_ITERATIONS), corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        starved = start_starved(cluster, "forward", times=2)
        start_others(cluster)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        assert [event["job"] for event in starved.events("memory.exhausted")] == ["Forward"] * 2
        assert [event["capacity"] for event in starved.events("capacity.lowered")] == [3]
        assert starved.events("capacity.agreed")
        assert not starved.events("worker.died")
        assert not leader.events("iteration.aborted")
        assert not leader.events("microbatch.deferred")
        check(cluster, corpus, tmp_path / "model")


def test_a_backward_pass_without_memory_repeats_the_iteration(tmp_path: Path, corpus: Path) -> None:
    """The stages behind have added the microbatch up already."""
    with Cluster(tmp_path, make_run(num_iterations=NUM_ITERATIONS), corpus) as cluster:
        leader = cluster.start_leader()
        starved = start_starved(cluster, "backward", times=1)
        start_others(cluster)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        assert [event["job"] for event in starved.events("memory.exhausted")] == ["Backward"]
        assert not starved.events("capacity.lowered")
        assert [event["iteration"] for event in leader.events("iteration.aborted")] == ["5.1"]
        assert sorted(leader.losses()) == list(range(1, NUM_ITERATIONS + 1))
