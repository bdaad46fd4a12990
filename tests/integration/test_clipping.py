"""Gradients that are clipped over all stages: what is learnt is what one process would learn."""

import math
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from decod.run.model_config import ModelDtype
from decod.run.run_config import RunConfig
from tests.support import unhurried
from tests.support.cluster import Cluster, Daemon
from tests.support.runs import loss_error, make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

CLIP_NORM = 1.7
"""Less than some gradients' norms, and more than others'."""


def clipping(run: RunConfig) -> RunConfig:
    return replace(run, optimizer=replace(run.optimizer, clip_norm=CLIP_NORM))


def start_doomed(cluster: Cluster, stage: int, *, iteration: int) -> Daemon:
    """Starts a relay that is killed when it is told the gradient's norm."""
    join_string = cluster.join_string(cluster.leader) or ""
    program = (sys.executable, "-u", "-m", "tests.support.doomed", "kill", "at_norm")
    arguments = ("join", join_string, "--stage", str(stage))
    return cluster.start("doomed", *arguments, program=(*program, str(iteration)))


def norms_of(daemon: Daemon) -> dict[str, float]:
    """Returns the norms of the steps that a node has taken with the others, by iteration."""
    commits = daemon.events("step.committed")
    return {commit["iteration"]: commit["gradient_norm"] for commit in commits if "stage" in commit}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [ModelDtype.FLOAT64, pytest.param(ModelDtype.FLOAT32, marks=pytest.mark.slow)]
)
def test_a_run_that_clips_learns_what_one_process_learns(
    dtype: ModelDtype, tmp_path: Path, corpus: Path
) -> None:
    """Two data nodes share stage 0, whose gradient counts once; a relay dies as the norm comes.

    In float32 only the rounding differs, so that is for `-m slow`.
    """
    num_iterations = 12
    run = clipping(make_run(dtype=dtype, num_iterations=num_iterations, num_data_nodes=2))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        cluster.start_data_node("data-1")
        for name, stage in (("one", 1), ("two", 1), ("three", 2)):
            cluster.start_relay(name, "--stage", str(stage))
        doomed = start_doomed(cluster, 2, iteration=5)
        codes = cluster.wait_for_end()
        assert codes.pop(doomed.name) == -signal.SIGKILL
        assert set(codes.values()) == {0}, codes
        losses, weights = reference(run, corpus, num_iterations)
        error = loss_error(leader.losses(), losses)
        norms = norms_of(leader)
        for daemon in cluster.daemons:
            assert norms_of(daemon).items() <= norms.items(), "all scale by the same number"
    assert [event["iteration"] for event in leader.events("iteration.mended")] == ["5.1"]
    assert max(norms.values()) > CLIP_NORM > min(norms.values()), norms
    print(f"losses differ by {error:.1e}, weights by", end=" ")
    print(f"{weight_error(tmp_path / 'model', weights):.1e}; norms {sorted(norms.values())}")
    wide = dtype is ModelDtype.FLOAT64
    assert error < (1e-12 if wide else 1e-4)
    assert weight_error(tmp_path / "model", weights) < (1e-10 if wide else 1e-3)


@pytest.mark.slow
def test_a_newcomer_takes_the_clipped_steps_that_it_has_missed(
    tmp_path: Path, corpus: Path
) -> None:
    """It follows a relay that serves its stage alone, and enters with that relay's very bits."""
    run = clipping(make_run(min_nodes_per_stage=1))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        join_string = cluster.join_string(leader) or ""
        slow = (sys.executable, "-u", "-m", "tests.support.slow_donor", "60000")
        donor = cluster.start("donor", "join", join_string, "--stage", "1", program=slow)
        cluster.start_relay("other", "--stage", "2")
        cluster.wait_for_iteration(3)
        newcomer = cluster.start_relay("newcomer", "--stage", "1")
        cluster.wait_for(lambda: newcomer.iteration, "the newcomer to take part", timeout_s=90.0)
        cluster.wait_for_iteration(leader.iteration + 3)
        shown = leader.status()["gradient_norm"]
        leader.end_run()
        assert set(cluster.wait_for_end().values()) == {0}
        assert not newcomer.events("replay.failed")
        assert not leader.events("iteration.aborted")
        found = leader.losses()
        losses, _ = reference(run, corpus, len(found))
        assert loss_error(found, losses) < 1e-12
        norms = norms_of(donor)
        assert max(norms.values()) > CLIP_NORM, "nothing was clipped"
        assert norms_of(newcomer)
        assert norms_of(newcomer).items() <= norms.items()
        assert any(math.isclose(shown, norm, rel_tol=1e-12) for norm in norms.values())
