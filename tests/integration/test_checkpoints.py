"""Everything is killed and started again: the run learns what it would have learnt anyway."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from decod.checkpoint.params import CheckpointConfig
from decod.config.run_file import DataSource
from decod.config.schema import RunConfig
from decod.config.template import render_run_file
from tests.support.cluster import Cluster, Daemon, assert_refused, run_decod
from tests.support.oracle import assert_agreement
from tests.support.runs import make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

NUM_ITERATIONS = 30
EVERY = 5


def write_run_file(cluster: Cluster, run: RunConfig | None = None, **config: int) -> None:
    """Replaces the cluster's run file by one that says how often checkpoints are written."""
    text = render_run_file(
        run or cluster.run,
        DataSource(path=str(cluster.corpus)),
        CheckpointConfig(**{"every_iterations": EVERY} | config),
    )
    cluster.run_file.write_text(text, encoding="utf-8")


def written(leader: Daemon) -> list[int]:
    """Returns the iterations of the checkpoints that a leader has written."""
    return [record["iteration"] for record in leader.events("checkpoint.written")]


def kill_all(cluster: Cluster) -> None:
    """Ends all processes as a power cut would: nodes and their compute processes, at once."""
    workers = [pid for daemon in cluster.daemons if (pid := daemon.compute_pid()) is not None]
    for daemon in cluster.daemons:
        daemon.send(signal.SIGKILL)
    for daemon in cluster.daemons:
        daemon.wait()
    # They end with their node by themselves; nothing of them writes anything.
    assert len(workers) == len(cluster.daemons)


def move_checkpoints(source: Daemon, target: Path) -> None:
    """Puts what a leader has written into another state folder, as after a move to a new host."""
    target.mkdir(parents=True)
    shutil.copytree(source.state_dir / "runs", target / "runs")


def checkpoints(state_dir: Path) -> list[dict[str, Any]]:
    result = run_decod("checkpoint", "list", "--json", "--state-dir", state_dir)
    assert result.returncode == 0, result
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_all_is_killed_and_resumed_as_if_nothing_had_been(tmp_path: Path, corpus: Path) -> None:
    """The newest checkpoint is damaged besides, so the run goes on from the one before."""
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    with Cluster(tmp_path / "before", run, corpus) as before:
        write_run_file(before)
        first = before.start_leader()
        before.start_relays(1)
        before.wait_for(lambda: len(written(first)) >= 3, "three checkpoints")
        kill_all(before)
        losses_before = first.losses()
    rows = checkpoints(first.state_dir)
    newest, usable = rows[0], rows[1]
    assert newest["iteration"] > usable["iteration"] >= EVERY
    flip_a_byte(Path(newest["folder"]) / "stage-1.safetensors")
    result = run_decod("checkpoint", "verify", "--state-dir", first.state_dir)
    assert_refused(result, exit_code=9, holds=["E-CKP-010", newest["folder"]])

    with Cluster(tmp_path / "after", run, corpus) as after:
        write_run_file(after)
        move_checkpoints(first, tmp_path / "after" / "leader" / "state")
        model = tmp_path / "model"
        leader = after.start_leader("--resume", "latest", "--export", model)
        assert f"checkpoints/{newest['iteration']} is bad" in leader.stdout
        assert f"resuming after iteration {usable['iteration']}," in leader.stdout
        after.start_relays(1)
        codes = after.wait_for_end()
        assert set(codes.values()) == {0}, codes
        losses_after = leader.losses()
        assert all(daemon.losses() == losses_after for daemon in after.daemons)
    assert sorted(losses_after) == list(range(usable["iteration"] + 1, NUM_ITERATIONS + 1))
    twice = losses_before.keys() & losses_after.keys()
    assert twice, "the lost iterations are trained again"
    assert max(abs(losses_before[i] / losses_after[i] - 1) for i in twice) < 1e-12
    losses, weights = reference(run, corpus, NUM_ITERATIONS)
    worst = max(abs(loss / losses[i - 1] - 1) for i, loss in losses_after.items())
    error = weight_error(model, weights)
    print(f"resumed after {usable['iteration']}: losses {worst:.1e}, weights {error:.1e}")
    assert worst < 1e-8
    assert error < 1e-8
    assert_agreement(model)
