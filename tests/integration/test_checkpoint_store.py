"""Members write their stages' parts of a checkpoint into a store that they share, and resume."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from decod.config.run_file import DataSource, render_run_file
from decod.train.checkpoint.store import CheckpointConfig
from tests.support.checkpoints import flip_a_byte
from tests.support.cluster import Cluster, Daemon, run_decod
from tests.support.runs import make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

NUM_ITERATIONS, EVERY, KEEP = 18, 3, 2


def write_run_file(cluster: Cluster) -> None:
    """Replaces the cluster's run file by one with frequent checkpoints."""
    config = CheckpointConfig(every_iterations=EVERY, keep=KEEP)
    source = DataSource(path=str(cluster.corpus))
    cluster.run_file.write_text(render_run_file(cluster.run, source, config), encoding="utf-8")


def checkpoints(state_dir: Path, store: Path) -> list[dict[str, Any]]:
    places = ("--state-dir", state_dir, "--checkpoint-store", store)
    result = run_decod("checkpoint", "list", "--json", *places)
    assert result.returncode == 0, result
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def kill_all(cluster: Cluster) -> None:
    for daemon in cluster.daemons:
        daemon.send(signal.SIGKILL)
    for daemon in cluster.daemons:
        daemon.wait()


def parts_of(daemon: Daemon) -> set[int]:
    """Returns the iterations of the parts that a member has written."""
    return {record["iteration"] for record in daemon.events("part.written")}


def test_every_stage_writes_its_part_and_a_new_host_resumes_from_the_store(
    tmp_path: Path, corpus: Path
) -> None:
    """The leader's disk is lost with it. The newest checkpoint is damaged in the store besides, so
    the run goes on from the one before, and learns what a run without a stop learns."""
    run, store = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1), tmp_path / "store"
    shares = ("--checkpoint-store", store)
    with Cluster(tmp_path / "before", run, corpus) as before:
        write_run_file(before)
        first = before.start_leader(*shares)
        relays = [before.start_relay(f"r{k}", "--stage", str(k), *shares) for k in (1, 2)]
        before.wait_for(lambda: len(first.events("checkpoint.written")) >= 3, "3 checkpoints")
        kill_all(before)
        written = [record["iteration"] for record in first.events("checkpoint.written")]
        assert not first.events("store.failed")
        assert not first.events("store.unused")
        assert all(set(written) <= parts_of(relay) for relay in relays)
        assert not list(first.state_dir.glob("runs/*/checkpoints/*/manifest.json"))
    rows = checkpoints(tmp_path / "nowhere", store)
    newest, usable = rows[0], rows[1]
    assert newest["iteration"] > usable["iteration"] >= EVERY
    flip_a_byte(Path(newest["folder"]) / "stage-1.safetensors")

    with Cluster(tmp_path / "after", run, corpus) as after:
        write_run_file(after)
        model = tmp_path / "model"
        leader = after.start_leader("--resume", "latest", "--export", model, *shares)
        assert f"checkpoint {newest['folder']} is bad" in leader.stdout
        assert f"resuming after iteration {usable['iteration']}," in leader.stdout
        relays = [after.start_relay(f"r{k}", "--stage", str(k), *shares) for k in (1, 2)]
        codes = after.wait_for_end()
        assert set(codes.values()) == {0}, codes
        for relay in relays:
            state = relay.events("state.fetched")[0]
            assert state["num_local"] == state["num_bytes"] > 0, "nothing passes the leader's link"
        losses_after = leader.losses()
    assert sorted(losses_after) == list(range(usable["iteration"] + 1, NUM_ITERATIONS + 1))
    losses, weights = reference(run, corpus, NUM_ITERATIONS)
    assert max(abs(loss / losses[i - 1] - 1) for i, loss in losses_after.items()) < 1e-8
    assert weight_error(model, weights) < 1e-8
    rows = [row for row in checkpoints(leader.state_dir, store) if row not in rows]
    assert [row["iteration"] for row in rows] == [NUM_ITERATIONS, NUM_ITERATIONS - EVERY]


def test_the_leader_writes_the_part_of_a_stage_without_the_store(
    tmp_path: Path, corpus: Path
) -> None:
    run, store = make_run(min_nodes_per_stage=1), tmp_path / "store"
    shares = ("--checkpoint-store", store)
    with Cluster(tmp_path / "run", run, corpus) as cluster:
        write_run_file(cluster)
        leader = cluster.start_leader(*shares)
        with_store = cluster.start_relay("r1", "--stage", "1", *shares)
        without = cluster.start_relay("r2", "--stage", "2")
        wrong = ("--checkpoint-store", tmp_path / "elsewhere")
        other = cluster.start_relay("r3", "--stage", "2", *wrong)
        cluster.wait_for(lambda: parts_of(with_store) and parts_of(other), "parts of both")
        after = max(parts_of(other))

        def written() -> bool:
            records = leader.events("checkpoint.written")
            return any(record["iteration"] > after for record in records)

        cluster.wait_for(written, "a checkpoint")
        assert not parts_of(without)
        told = leader.events("store.unused")
        assert told, "a member names another store"
        assert {record["stage"] for record in told} == {2}
        # It may also have been asked before it served the stage.
        assert any("do all hosts name the same store?" in record["reason"] for record in told)
        kill_all(cluster)
    places = ("--state-dir", leader.state_dir, *shares)
    result = run_decod("checkpoint", "verify", *places)
    assert result.returncode == 0, result
    rows = checkpoints(leader.state_dir, store)
    assert rows
    assert all(str(store) in row["folder"] for row in rows), "no disk took one"
