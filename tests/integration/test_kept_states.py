"""What hosts keep of stages' states on their own disks is used when they come back, and only if it
is right; a disk that takes no more of it stops nobody."""

import errno
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from decod.train.checkpoint.stage_states import KeptState, StateStore
from tests.support import unhurried
from tests.support.cluster import Cluster, Daemon, run_decod
from tests.support.disk import small_disk
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

TIMEOUT_S = 120.0


@contextmanager
def training(
    folder: Path, corpus: Path, *, every: int, stages: dict[str, int]
) -> Iterator[tuple[Cluster, dict[str, Daemon]]]:
    """Yield a run with these relays that keeps states every so many iterations."""
    run = make_run(min_nodes_per_stage=1)
    protocol = replace(run.protocol, snapshot_every_iterations=every)
    with Cluster(folder, replace(run, protocol=protocol), corpus) as cluster:
        nodes = {"leader": cluster.start_leader(program=unhurried.PROGRAM)}
        for name, stage in stages.items():
            nodes[name] = cluster.start_relay(name, "--stage", str(stage))
        yield cluster, nodes


def end(cluster: Cluster, leader: Daemon) -> None:
    """End the run; what it learnt is what one process would have learnt."""
    ended = [daemon for daemon in cluster.daemons if daemon.process.poll() is None]
    leader.send(signal.SIGTERM)
    assert {daemon.wait() for daemon in ended} == {0}, cluster.tails()
    for daemon in ended:
        assert_plain(daemon.state_dir / "runs")
    losses, _ = reference(cluster.run, cluster.corpus, leader.iteration)
    error = loss_error(leader.losses(), losses)
    print(f"losses of {len(losses)} iterations differ by {error:.1e}")
    assert error < 1e-8


def assert_plain(folder: Path) -> None:
    """Checks that all that a node keeps of a run is JSON, safetensors, or text for people."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "np") as tensors:  # type: ignore[no-untyped-call]
                assert tensors.keys()
        elif path.suffix == ".csv":
            assert path.read_text().startswith("iteration,time,loss,")
        elif path.suffix == ".md":
            assert path.read_text().startswith("---\n")
        else:
            json.loads(path.read_bytes())


def kept(node: Daemon, stage: int) -> int:
    """Return the newest iteration of which a node has kept a stage's state."""
    return max(
        (e["iteration"] for e in node.events("state.kept") if e["stage"] == stage), default=0
    )


def seconds_since(record: dict[str, Any]) -> float:
    return datetime.now().astimezone().timestamp() - at_s(record)


def at_s(record: dict[str, Any]) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()


# --- a relay that comes back -----------------------------------------------------------------


@contextmanager
def standing_still(cluster: Cluster, nodes: dict[str, Daemon]) -> Iterator[int]:
    """Have stage 2 compute nothing; yield the iteration that was committed last.

    The others find out that it is slow and alive, and wait.
    """
    worker = nodes["other"].compute_pid()
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    try:
        leader = nodes["leader"]

        def still() -> bool:
            commits = leader.events("step.committed")
            longest_s = max(at_s(b) - at_s(a) for a, b in pairwise(commits[-6:]))
            # A member takes a run that has lasted so much longer for one that stands still.
            return seconds_since(commits[-1]) > 3 * longest_s + 3.0

        cluster.wait_for(still, "the run to stand still", timeout_s=TIMEOUT_S)
        yield leader.iteration
    finally:
        # On a busy machine its node may have given it up.
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)


def flip_a_byte(state: KeptState) -> int:
    """Alter a byte of a state on its disk; return how long the chunk is that it is in."""
    chunk, start = max(state.places.values(), key=lambda place: place[0].num_bytes)
    with state.path.open("r+b") as file:
        file.seek(start)
        byte = file.read(1)[0]
        file.seek(start)
        file.write(bytes([byte ^ 1]))
    return chunk.num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_a_restarted_relay_has_its_state_from_its_own_disk(
    damaged: bool, tmp_path: Path, corpus: Path
) -> None:
    """Nothing was committed since it was written, so nothing of it is fetched but what is wrong."""
    stages = {"victim": 1, "sibling": 1, "other": 2}
    with training(tmp_path, corpus, every=1, stages=stages) as (cluster, nodes):
        leader, victim = nodes["leader"], nodes["victim"]
        cluster.wait_for_iteration(6)
        # It may have come when training had begun, and have to be let in.
        cluster.wait_for(lambda: kept(victim, 1), "a first state", timeout_s=TIMEOUT_S)
        with standing_still(cluster, nodes) as iteration:
            cluster.wait_for(lambda: kept(victim, 1) == iteration, "the state on the disk")
            victim.send(signal.SIGKILL)
            victim.wait()
            num_missing = 0
            if damaged:
                (folder,) = victim.state_dir.glob("runs/*/states")
                # It may mirror another stage's state of the same iteration.
                newest = next(s for s in StateStore(folder).find() if s.stage_index == 1)
                assert newest.iteration == iteration
                num_missing = flip_a_byte(newest)
            num_before, num_fetched = len(victim.commits()), len(victim.events("state.fetched"))
            victim = cluster.start_relay("victim", "--stage", "1")
            fetches = cluster.wait_for(
                lambda: victim.events("state.fetched")[num_fetched:],
                "its state",
                timeout_s=TIMEOUT_S,
            )
            # Until the next state is written.
            problem = status_of(victim)["states"]["problem"]
            assert leader.iteration == iteration
        assert ("1 of" in problem) if damaged else (problem is None), problem
        (fetched,) = fetches
        assert (fetched["stage"], fetched["iteration"]) == (1, iteration)
        assert fetched["num_bytes"] - fetched["num_local"] == num_missing
        print(f"{num_missing} of {fetched['num_bytes']} bytes were fetched", end="; ")
        told = [(e["stage"], e["iteration"]) for e in victim.events("state.damaged")]
        assert told == [(1, iteration)] * damaged
        cluster.wait_for(
            lambda: len(victim.commits()) > num_before + 3, "it to train", timeout_s=TIMEOUT_S
        )
        end(cluster, leader)


def test_all_relays_are_restarted_and_go_on_from_their_own_disks(
    tmp_path: Path, corpus: Path
) -> None:
    """As when a site's power fails: nothing is fetched from anybody, and nothing is lost."""
    stages = {"one": 1, "two": 2}
    with training(tmp_path, corpus, every=5, stages=stages) as (cluster, nodes):
        leader = nodes["leader"]
        cluster.wait_for(lambda: min(kept(nodes["one"], 1), kept(nodes["two"], 2)) >= 10, "marks")
        for name in stages:
            nodes[name].send(signal.SIGKILL)
        for name in stages:
            nodes[name].wait()
        num_before = len(leader.commits())
        back = [cluster.start_relay(name, "--stage", str(stage)) for name, stage in stages.items()]
        cluster.wait_for(
            lambda: len(leader.commits()) > num_before + 8, "training", timeout_s=TIMEOUT_S
        )
        (rebuilt,) = leader.events("stage.rebuilt")
        assert (rebuilt["stage"], rebuilt["source"]) == ("1, 2", "kept")
        assert rebuilt["num_repeated"] < 10
        for node in back:
            (fetched,) = node.events("state.fetched")
            assert fetched["num_local"] == fetched["num_bytes"] > 0
            assert fetched["iteration"] % 5 == 0
        end(cluster, leader)


# --- a disk that takes no more ----------------------------------------------------------------


def status_of(node: Daemon) -> dict[str, Any]:
    """Return what an operator reads."""
    result = run_decod("status", "--json", "--state-dir", node.state_dir)
    assert result.returncode == 0, result
    status: dict[str, Any] = json.loads(result.stdout)
    return status


def filled(path: Path, *, leaving_bytes: int) -> bool:
    """Take the disk's room but for a rest; False if somebody else was writing meanwhile."""
    with path.open("wb") as file:
        free = os.statvfs(path)
        try:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - leaving_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return False
    return True


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_states_says_so_and_stops_nobody(
    tmp_path: Path, corpus: Path
) -> None:
    stages = {"other": 1, "two": 2}
    with training(tmp_path, corpus, every=2, stages=stages) as (cluster, nodes):
        leader = nodes["leader"]
        status = cluster.wait_for(leader.try_status, "the run's id")
        states = tmp_path / "full" / "state" / "runs" / status["run_id"] / "states"
        with small_disk(states, 8 << 20):
            full = cluster.start_relay("full", "--stage", "1")
            cluster.wait_for(lambda: kept(full, 1), "a state on the disk", timeout_s=TIMEOUT_S)
            ballast = states / "ballast"
            cluster.wait_for(lambda: filled(ballast, leaving_bytes=64 << 10), "a full disk")
            before = {e["iteration"] for e in full.events("state.kept")}
            refused = cluster.wait_for(
                lambda: [e for e in full.events("state.unkept") if e["stage"] == 1],
                "the disk to take no more",
                timeout_s=TIMEOUT_S,
            )
            assert "E-CKP-016" in refused[0]["reason"]
            cluster.wait_for_iteration(refused[0]["iteration"] + 6, timeout_s=TIMEOUT_S)
            told = status_of(full)
            assert "E-CKP-016" in told["states"]["problem"]
            shown = run_decod("status", "--state-dir", full.state_dir)
            assert "this host's disk: E-CKP-016" in shown.stdout
            last = max(e["iteration"] for e in full.events("state.kept") if e["stage"] == 1)
            assert last - max(before) <= 2, "one may have been under way"
            assert {"stage_index": 1, "iteration": last} in told["states"]["kept"]
            found = [(s.stage_index, s.iteration) for s in StateStore(states).find()]
            assert (1, last) in found, "it is whole"
            ballast.unlink()
            cluster.wait_for(lambda: kept(full, 1) > last, "room again", timeout_s=TIMEOUT_S)
            cluster.wait_for(
                lambda: status_of(full)["states"]["problem"] is None, "no problem any more"
            )
            assert not leader.events("iteration.aborted")
            assert not leader.events("member.lost")
            end(cluster, leader)
