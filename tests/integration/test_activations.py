"""Daemons that send rounded activations learn what one process learns that rounds them alike."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from decod.run.run_config import RunConfig
from decod.run.training_config import ActivationCompression, ActivationsConfig
from tests.support.cluster import Cluster, Daemon
from tests.support.quick import first_of
from tests.support.runs import loss_error, make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

INT8 = ActivationCompression.INT8
NUM_ITERATIONS = 10
WEIGHT_ERROR_MAX = 1e-7
"""In float64. A sum in another order can move an element across a step of float32, and so change
the scale of a token by 6e-8."""


def make_coded_run(compression: ActivationCompression) -> RunConfig:
    run = make_run(num_iterations=NUM_ITERATIONS)
    return replace(run, activations=ActivationsConfig(compression=compression))


def check(cluster: Cluster, corpus: Path, model: Path) -> None:
    """Compare with one process that rounds, and with one that does not."""
    losses, weights = reference(cluster.run, corpus, NUM_ITERATIONS)
    error, found = weight_error(model, weights), cluster.leader.losses()
    print(f"losses differ by {loss_error(found, losses):.1e}, weights by {error:.1e}", end="; ")
    assert loss_error(found, losses) < 1e-8
    assert error < WEIGHT_ERROR_MAX
    plain = replace(cluster.run, activations=ActivationsConfig())
    losses, weights = reference(plain, corpus, NUM_ITERATIONS)
    lost = weight_error(model, weights)
    print(f"without rounding: {loss_error(found, losses):.1e} and {lost:.1e}")
    assert lost > 1e3 * WEIGHT_ERROR_MAX
    assert loss_error(found, losses) < 1e-2


@pytest.mark.parametrize("compression", first_of([INT8, ActivationCompression.BF16]))
def test_five_daemons_learn_what_one_process_learns(
    tmp_path: Path, corpus: Path, compression: ActivationCompression
) -> None:
    with Cluster(tmp_path, make_coded_run(compression), corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        cluster.start_relays(2)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        assert all(daemon.losses() == leader.losses() for daemon in cluster.daemons)
        check(cluster, corpus, tmp_path / "model")


@pytest.mark.parametrize("moment", first_of(["after_backward", "in_backward"]))
def test_what_is_sent_again_after_a_loss_is_what_was_sent_first(
    moment: str, tmp_path: Path, corpus: Path
) -> None:
    """Rounding it once more, or once less, would show in the weights."""
    program = (sys.executable, "-u", "-m", "tests.support.doomed", "kill", moment, "5")
    with Cluster(tmp_path, make_coded_run(INT8), corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        for name, stage in (("one", 1), ("two", 1), ("three", 2)):
            cluster.start_relay(name, "--stage", str(stage))
        doomed = cluster.start_relay("doomed", "--stage", "2", program=program)
        codes = cluster.wait_for_end()
        assert codes.pop(doomed.name) == -signal.SIGKILL
        assert set(codes.values()) == {0}, codes
        check(cluster, corpus, tmp_path / "model")
        assert [event["iteration"] for event in leader.events("iteration.mended")] == ["5.1"]
        assert not leader.events("iteration.aborted")


@pytest.mark.slow
def test_what_is_rounded_at_random_is_rounded_alike_after_a_loss(
    tmp_path: Path, corpus: Path
) -> None:
    """A run in which a relay dies, between its passes, learns what its twin learns."""
    run = make_coded_run(ActivationCompression.INT4)
    program = (sys.executable, "-u", "-m", "tests.support.doomed", "kill", "after_backward", "5")
    found = list[list[float]]()
    for twin, extra in (("whole", {}), ("struck", {"program": program})):
        with Cluster(tmp_path / twin, run, corpus) as cluster:
            leader = cluster.start_leader("--export", tmp_path / twin / "model")
            for name, stage in (("one", 1), ("two", 1), ("three", 2)):
                cluster.start_relay(name, "--stage", str(stage))
            last = cluster.start_relay("last", "--stage", "2", **extra)
            codes = cluster.wait_for_end()
            assert codes.pop(last.name) == (-signal.SIGKILL if extra else 0)
            assert set(codes.values()) == {0}, codes
            found.append([loss for _, loss in sorted(leader.losses().items())])
    whole, struck = found
    assert max(abs(one / two - 1) for one, two in zip(whole, struck, strict=True)) < 1e-8
    weights = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    assert weight_error(tmp_path / "struck" / "model", weights) < WEIGHT_ERROR_MAX
    losses, _ = reference(replace(run, activations=ActivationsConfig()), corpus, NUM_ITERATIONS)
    assert 1e-6 < loss_error(dict(enumerate(whole, 1)), losses) < 0.05


def start_spoiling(cluster: Cluster, what: str, stage: int) -> Daemon:
    program = (sys.executable, "-u", "-m", "tests.support.spoiling", what, "5")
    return cluster.start_relay("spoiling", "--stage", str(stage), program=program)


def test_an_activation_with_an_impossible_scale_is_computed_by_others(
    tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, make_coded_run(INT8), corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        cluster.start_relay("one", "--stage", "1")
        behind = [cluster.start_relay(name, "--stage", "2") for name in ("two", "three")]
        spoiling = start_spoiling(cluster, "activation", 1)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        assert_blamed(spoiling, behind, "activation received can't be read: the scale of block 0")
        assert not leader.events("iteration.aborted")
        check(cluster, corpus, tmp_path / "model")


def test_a_gradient_with_an_impossible_scale_repeats_the_iteration(
    tmp_path: Path, corpus: Path
) -> None:
    """The stages behind have added the microbatch up already."""
    with Cluster(tmp_path, make_coded_run(INT8), corpus) as cluster:
        leader = cluster.start_leader()
        before = [cluster.start_relay(name, "--stage", "1") for name in ("one", "two")]
        cluster.start_relay("three", "--stage", "2")
        spoiling = start_spoiling(cluster, "gradient", 2)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        assert_blamed(spoiling, before, "gradient received can't be read: the scale of block 0")
        assert [event["iteration"] for event in leader.events("iteration.aborted")] == ["5.1"]
        assert sorted(leader.losses()) == list(range(1, NUM_ITERATIONS + 1))


def assert_blamed(culprit: Daemon, others: list[Daemon], reason: str) -> None:
    """One of the others has refused a tensor, and its log says whose and why."""
    (started,) = culprit.events("node.started")
    (refusal,) = [event for daemon in others for event in daemon.events("microbatch.refused")]
    assert refusal["peer"] == started["node_id"]
    assert refusal["microbatch"].startswith("5/")
    assert reason in refusal["reason"]
