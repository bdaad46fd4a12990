"""Everything is killed and started again: the run learns what it would have learnt anyway."""

import csv
import json
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from decod.config.run_file import DataSource, render_run_file
from decod.run.run_config import RunConfig
from decod.train.checkpoint.store import CheckpointConfig
from tests.support import unhurried
from tests.support.checkpoints import flip_a_byte, write_checkpoint
from tests.support.cluster import Cluster, Daemon, assert_refused, run_decod
from tests.support.disk import small_disk
from tests.support.oracle import assert_agreement
from tests.support.runs import make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

NUM_ITERATIONS = 18
EVERY = 3


def write_run_file(cluster: Cluster, run: RunConfig | None = None, **config: int) -> None:
    """Replaces the cluster's run file by one that says how often checkpoints are written."""
    text = render_run_file(
        run or cluster.run,
        DataSource(path=str(cluster.corpus)),
        CheckpointConfig(**({"every_iterations": EVERY} | config)),
    )
    cluster.run_file.write_text(text, encoding="utf-8")


def written(leader: Daemon) -> list[int]:
    """Returns the iterations of the checkpoints that a leader has written."""
    return [record["iteration"] for record in leader.events("checkpoint.written")]


def kill_all(cluster: Cluster) -> None:
    """Ends all nodes as a power cut would. Compute processes end with them, and write nothing."""
    for daemon in cluster.daemons:
        daemon.send(signal.SIGKILL)
    for daemon in cluster.daemons:
        daemon.wait()


def move_checkpoints(source: Daemon, target: Path) -> None:
    """Puts what a leader has written into another state folder, as after a move to a new host."""
    target.mkdir(parents=True)
    shutil.copytree(source.state_dir / "runs", target / "runs")


def checkpoints(state_dir: Path) -> list[dict[str, Any]]:
    result = run_decod("checkpoint", "list", "--json", "--state-dir", state_dir)
    assert result.returncode == 0, result
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def losses_on_disk(leader: Daemon) -> dict[int, float]:
    """The losses in the file of the run that the leader has led last."""
    paths = leader.state_dir.glob("runs/*/iterations.csv")
    newest = max(paths, key=lambda path: path.stat().st_mtime_ns)
    with newest.open(newline="", encoding="utf-8") as file:
        return {int(row["iteration"]): float(row["loss"]) for row in csv.DictReader(file)}


def assert_equals_reference(
    run: RunConfig, corpus: Path, found: dict[int, float], model: Path
) -> None:
    """Compares losses after a resume, and the last weights, with one process that never stopped."""
    losses, weights = reference(run, corpus, NUM_ITERATIONS)
    worst = max(abs(loss / losses[iteration - 1] - 1) for iteration, loss in found.items())
    error = weight_error(model, weights)
    print(f"resumed with iteration {min(found)}: losses {worst:.1e}, weights {error:.1e}")
    assert worst < 1e-8
    assert error < 1e-8


def test_all_is_killed_and_resumed_as_if_nothing_had_been(tmp_path: Path, corpus: Path) -> None:
    """The leader is killed while it writes a checkpoint. The newest whole one is damaged besides,
    so the run goes on from the one before."""
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    with Cluster(tmp_path / "before", run, corpus) as before:
        write_run_file(before)
        doomed = (sys.executable, "-u", "-m", "tests.support.doomed_writer", str(4 * EVERY))
        first = before.start("leader", "leader", before.run_file, program=doomed)
        before.wait_for(lambda: before.join_string(first), "the join string")
        before.start_relays(1)
        before.wait_for(lambda: first.process.poll() is not None, "a fourth checkpoint")
        kill_all(before)
        assert first.process.returncode == -signal.SIGKILL
        assert len(written(first)) == 3
        assert list(first.state_dir.glob("runs/*/checkpoints/.writing-*/*"))
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
    kept = {i: loss for i, loss in losses_before.items() if i <= usable["iteration"]}
    assert losses_on_disk(leader) == kept | losses_after
    twice = losses_before.keys() & losses_after.keys()
    assert twice, "the lost iterations are trained again"
    assert max(abs(losses_before[i] / losses_after[i] - 1) for i in twice) < 1e-12
    assert_equals_reference(run, corpus, losses_after, model)
    assert_agreement(model)


@pytest.mark.slow
def test_two_data_nodes_are_stopped_in_order_and_resumed(tmp_path: Path, corpus: Path) -> None:
    """The very last iteration is kept; the further data node gets its state like a relay."""
    run = make_run(num_iterations=NUM_ITERATIONS, num_data_nodes=2, min_nodes_per_stage=1)
    with Cluster(tmp_path / "before", run, corpus) as before:
        write_run_file(before, every_iterations=1000)
        # It must not get to the end of the run before it is told to leave.
        first = before.start_leader(program=unhurried.PROGRAM)
        before.start_data_node("data-1")
        before.start_relays(1)
        before.wait_for_iteration(5)
        first.end_run()
        assert first.wait() == 0
        last = first.iteration
        where = f"{before.run_file} --state-dir {first.state_dir} --listen 127.0.0.1:"
        told = f"go on from iteration {last} with: decod leader {where}"
        assert told in first.stdout
        assert first.stdout.partition(told)[2].splitlines()[0].endswith(f" --resume {last}")
        assert [row["iteration"] for row in checkpoints(first.state_dir)] == [last]

    with Cluster(tmp_path / "after", run, corpus) as after:
        write_run_file(after, every_iterations=0)
        move_checkpoints(first, tmp_path / "after" / "leader" / "state")
        model = tmp_path / "model"
        leader = after.start_leader("--resume", str(last), "--export", model)
        after.start_data_node("data-1")
        after.start_relays(1)
        assert leader.status()["iteration"] >= last
        codes = after.wait_for_end()
        assert set(codes.values()) == {0}, codes
        losses = leader.losses()
        assert checkpoints(leader.state_dir)[0]["iteration"] == last, "none is written with 0"
    assert sorted(losses) == list(range(last + 1, NUM_ITERATIONS + 1))
    assert_equals_reference(run, corpus, losses, model)


def test_a_full_disk_is_told_and_training_goes_on(tmp_path: Path, corpus: Path) -> None:
    """Only the runs' folder lies on it: logs and sockets are another disk's matter."""
    run = make_run(min_nodes_per_stage=1)
    runs = tmp_path / "leader" / "state" / "runs"
    with small_disk(runs), Cluster(tmp_path, run, corpus) as cluster:
        write_run_file(cluster, keep=1)
        leader = cluster.start_leader()
        cluster.start_relays(1)
        cluster.wait_for(lambda: written(leader), "a checkpoint")
        fill = runs / "something-else"

        def no_room_is_told() -> bool:
            """Fill the disk again: a checkpoint that was being written has left its room."""
            with fill.open("ab", buffering=0) as file, suppress(OSError):
                while file.write(bytes(1 << 12)):
                    pass
            shown = run_decod("status", "--state-dir", leader.state_dir)
            return "CHECKPOINT FAILED: E-CKP-012" in shown.stdout

        cluster.wait_for(no_room_is_told, "the failure to be told")
        assert leader.events("checkpoint.failed")
        good = written(leader)[-1]
        status = leader.status()["checkpoint"]
        assert "No space left on device" in status["problem"]
        assert status["iteration"] == good
        verified = run_decod("checkpoint", "verify", "--state-dir", leader.state_dir)
        assert verified.returncode == 0, verified
        assert f"{good}" in verified.stdout.split()
        cluster.wait_for_iteration(leader.iteration + 2)
        fill.unlink()
        cluster.wait_for(lambda: written(leader)[-1] > good, "a checkpoint when there is room")
        assert leader.status()["checkpoint"]["problem"] is None
        assert all(commit.attempt == 1 for commit in leader.commits()), "nothing was repeated"


def test_what_can_not_be_resumed_is_refused_in_one_line(tmp_path: Path, corpus: Path) -> None:
    """Before anybody is asked to join."""
    run = make_run()
    cluster = Cluster(tmp_path, run, corpus)
    state_dir = tmp_path / "state"
    arguments = ("--listen", "127.0.0.1:0", "--state-dir", state_dir, "--resume")
    result = run_decod("leader", cluster.run_file, *arguments, "latest")
    assert_refused(result, exit_code=9, holds=["E-CKP-011", str(state_dir)])
    write_checkpoint(state_dir, 40, settings={"name": "test", "seed": 3})
    result = run_decod("leader", cluster.run_file, *arguments, "latest")
    assert_refused(result, exit_code=9, holds=["E-CKP-013", "batch."])
    result = run_decod("leader", cluster.run_file, *arguments, "41")
    assert_refused(result, exit_code=9, holds=["E-CKP-011", "41"])
