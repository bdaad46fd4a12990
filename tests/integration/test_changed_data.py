"""Data that change under a running data node: never trained on, and told with the file's name."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from decod.data.block import Block
from decod.data.dataset import Dataset
from decod.data.order import microbatch_windows
from decod.data.prepare import PrepareConfig, prepare
from decod.errors import RejectedError
from decod.ids import MicrobatchId
from decod.net.block_transfer import BlockRequest, fetch_block
from decod.run.run_config import RunConfig
from tests.support.cluster import Cluster, Daemon
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

ITERATIONS = 6


def overwrite(shard: Path) -> None:
    """Writes other tokens into the file, which stays the same one, and as long."""
    with shard.open("r+b") as file:
        file.write(bytes(shard.stat().st_size))


def exchange(shard: Path) -> None:
    """Puts another file in its place, of the same size."""
    other = shard.with_name("other")
    other.write_bytes(bytes(shard.stat().st_size))
    other.replace(shard)


def truncate(shard: Path) -> None:
    """Cuts the file off: whoever has mapped it would be killed."""
    with shard.open("r+b") as file:
        file.truncate(1000)


def prepare_lines(folder: Path) -> Path:
    """Returns a folder of so many shards that most are not read in the first iterations."""
    text = folder.with_suffix(".txt")
    text.write_text("".join(f"line {n * n} of many\n" for n in range(8000)))
    prepare(folder, [text], PrepareConfig(shard_tokens=2000))
    return folder


def first_read(run: RunConfig, folder: Path, iteration: int) -> str:
    """Returns the file of a shard that no iteration before this one reads, and this one does."""
    with Dataset.open(folder) as dataset:
        tokens_per_shard = dataset.index.shards[0].num_tokens
        seen: list[set[int]] = []
        for number in range(1, iteration + 1):
            windows = {
                window
                for data_node in range(run.batch.num_data_nodes)
                for index in range(run.batch.num_microbatches)
                for window in microbatch_windows(
                    MicrobatchId(number, data_node, index),
                    batch=run.batch,
                    num_tokens=dataset.num_tokens,
                    seed=run.seed,
                )
            }
            ends = [w * run.batch.sequence_length + k for w in windows for k in (0, 32)]
            seen.append({position // tokens_per_shard for position in ends})
        new = seen[-1].difference(*seen[:-1])
        return dataset.index.shards[min(new)].file


def assert_trained_well(run: RunConfig, corpus: Path, daemons: list[Daemon]) -> None:
    """Checks that all daemons committed what one process would have learnt from the good data."""
    losses, _ = reference(run, corpus, ITERATIONS)
    for daemon in daemons:
        found = daemon.losses()
        first = min(found, default=1)
        assert (
            loss_error(
                {n - first + 1: loss for n, loss in found.items()},
                losses[first - 1 : first - 1 + len(found)],
            )
            < 1e-9
        ), daemon.name


CHANGES: Sequence[Callable[[Path], None]] = (overwrite, exchange, truncate, Path.unlink)


def test_changed_data_come_from_the_other_data_node(tmp_path: Path, corpus: Path) -> None:
    """All that the leader has changes before it reads it for the first time, each file its way."""
    run = make_run(num_iterations=ITERATIONS, num_data_nodes=2, min_nodes_per_stage=1)
    own = shutil.copytree(corpus, tmp_path / "own")
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--data", own)
        other = cluster.start_data_node("data-1")
        cluster.wait_for(other.try_status, "the other data node")
        shards = sorted(own.glob("shard-*.bin"))
        for shard, change in zip(shards, CHANGES, strict=True):
            change(shard)
        cluster.start_relays(1)
        assert set(cluster.wait_for_end().values()) == {0}
        assert_trained_well(run, corpus, cluster.daemons)
        named = [record["path"] for record in leader.events("data.damaged")]
        assert set(named) == {str(shard) for shard in shards}
        assert len(named) == len(set(named)), "each file is told once in a while"
        assert {record["source"] for record in leader.events("data.restored")} == {"data-1"}
        assert not leader.events("iteration.aborted")
        assert not leader.events("microbatch.deferred")


def test_a_block_that_is_good_again_is_read_again(tmp_path: Path, corpus: Path) -> None:
    """A network file system that fails for a moment costs that moment. Meanwhile a volunteer is
    not given data."""
    run = make_run(num_iterations=ITERATIONS, min_nodes_per_stage=1)
    own = shutil.copytree(corpus, tmp_path / "own")
    with Cluster(tmp_path, run, own) as cluster:
        leader = cluster.start_leader()
        own.rename(tmp_path / "away")
        cluster.start_relays(1)
        cluster.wait_for(lambda: leader.events("data.damaged"), "a bad block")
        status = leader.status()
        stranger = cluster.admit("stranger")
        request = BlockRequest(
            run_id=status["run_id"], sender=stranger.node_id, block=Block(0, 0, 100_000)
        )
        with pytest.raises(RejectedError, match="E-REJ-009"):
            asyncio.run(fetch_block(status["node"]["address"], request, stranger.tls))
        (tmp_path / "away").rename(own)
        assert set(cluster.wait_for_end().values()) == {0}
        assert_trained_well(run, corpus, cluster.daemons)
        assert leader.events("data.restored")[0]["source"] == "this host's disk"


@pytest.mark.slow
def test_a_lone_leader_whose_data_change_stops_with_a_checkpoint(tmp_path: Path) -> None:
    """It trains on what is good, and stops where it would need the changed part. With the data
    mended the run goes on from there, as if nothing had been."""
    run = make_run(num_iterations=ITERATIONS, min_nodes_per_stage=1)
    own, good = prepare_lines(tmp_path / "own"), prepare_lines(tmp_path / "good")
    shard = own / first_read(run, own, iteration=4)
    with Cluster(tmp_path, run, own) as cluster:
        leader = cluster.start_leader()
        overwrite(shard)
        cluster.start_relays(1)
        codes = cluster.wait_for_end()
        assert codes == {"leader": 9, "relay-1-0": 0, "relay-2-0": 0}
        errors = [line for line in leader.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        for text in ("E-DAT-022", str(shard), "bytes 0 to 3999", "reading it again did not help"):
            assert text in errors[0], errors[0]
        assert leader.iteration == 3
        assert_trained_well(run, good, cluster.daemons)
        assert "go on from iteration 3 with: decod leader" in leader.stdout
        assert leader.events("checkpoint.written")[-1]["iteration"] == 3
    shutil.copy(good / shard.name, shard)
    shutil.copytree(leader.state_dir, tmp_path / "again" / "leader" / "state", symlinks=True)
    with Cluster(tmp_path / "again", run, own) as cluster:
        cluster.start_leader("--resume", "3")
        cluster.start_relays(1)
        assert set(cluster.wait_for_end().values()) == {0}
        assert sorted(cluster.leader.losses()) == [1, 2, 3, 4, 5, 6]
        assert_trained_well(run, good, cluster.daemons)


@pytest.mark.slow
def test_data_nodes_with_the_same_damage_end_the_run_one_after_the_other(tmp_path: Path) -> None:
    """Who leaves first hands its share over; the last one keeps what was committed."""
    run = make_run(num_iterations=ITERATIONS, num_data_nodes=2, min_nodes_per_stage=1)
    folders = [prepare_lines(tmp_path / name) for name in ("own", "other", "good")]
    own, other, good = folders
    damaged = first_read(run, good, iteration=4)
    with Cluster(tmp_path, run, own) as cluster:
        leader = cluster.start_leader()
        second = cluster.start_data_node("data-1", "--data", other)
        cluster.wait_for(lambda: second.events("worker.started"), "the end of its checks")
        for folder in (own, other):
            overwrite(folder / damaged)
        cluster.start_relays(1)
        codes = cluster.wait_for_end()
        assert codes == {"leader": 9, "data-1": 9, "relay-1-0": 0, "relay-2-0": 0}
        for node, folder in ((leader, own), (second, other)):
            assert str(folder / damaged) in node.stderr
        assert max(leader.iteration, second.iteration) == 3
        assert_trained_well(run, good, cluster.daemons)
        kept = leader.events("checkpoint.written") + second.events("checkpoint.written")
        assert kept[-1]["iteration"] == 3
