"""Data nodes that read their shards from an object store, with a cache on their disk."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

from tests.integration.test_changed_data import (
    ITERATIONS,
    assert_trained_well,
    first_read,
    prepare_lines,
)
from tests.support.cluster import Cluster
from tests.support.http_store import http_store
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.mark.slow
def test_a_run_from_a_url_learns_what_one_from_the_folder_does(tmp_path: Path) -> None:
    """Every object comes damaged once. After a restart, what was fetched comes from the cache, and
    the store may be slow to come back."""
    run = make_run(num_iterations=ITERATIONS, min_nodes_per_stage=1)
    good = prepare_lines(tmp_path / "good")
    with http_store(good) as store:
        store.corrupt = dict.fromkeys([path.name for path in good.glob("shard-*.bin")], 1)
        with Cluster(tmp_path / "first", run, store.url) as cluster:
            leader = cluster.start_leader()
            cluster.start_relays(1)
            cluster.wait_for(lambda: leader.iteration >= 2, "a part of the run")
            leader.end_run()
            assert set(cluster.wait_for_end().values()) == {0}
            assert_trained_well(run, good, cluster.daemons)
            assert not leader.events("data.damaged")
        store.asked.clear()
        shutil.copytree(leader.state_dir, tmp_path / "again" / "leader" / "state", symlinks=True)
        with Cluster(tmp_path / "again", run, store.url) as cluster:
            leader = cluster.start_leader("--resume", "latest")
            cluster.start_relays(1)
            assert set(cluster.wait_for_end().values()) == {0}
            assert max(leader.losses()) == ITERATIONS
            assert_trained_well(run, good, cluster.daemons)
            assert sum(store.asked.values()) == len(("index.json",)), "the rest is in the cache"


def test_a_store_out_of_reach_and_a_damaged_object_cost_no_iteration(tmp_path: Path) -> None:
    """Training waits for the store. A block that the store has lost comes from the other node."""
    run = make_run(num_iterations=ITERATIONS, num_data_nodes=2, min_nodes_per_stage=1)
    good = prepare_lines(tmp_path / "good")
    served = shutil.copytree(good, tmp_path / "served")
    with http_store(served) as store, Cluster(tmp_path / "run", run, store.url) as cluster:
        leader = cluster.start_leader()
        other = cluster.start_data_node("data-1", "--data", good)
        cluster.wait_for(lambda: other.events("worker.started"), "the end of its checks")
        cluster.wait_for(lambda: leader.events("worker.started"), "the end of its checks")
        for file in (leader.state_dir / "data").glob("*/blocks/*/*"):
            file.unlink()
        damaged = first_read(run, good, iteration=1)
        (served / damaged).write_bytes(bytes((served / damaged).stat().st_size))
        store.status = 503
        cluster.start_relays(1)
        cluster.wait_for(lambda: leader.events("data.unreachable"), "the trouble")
        store.status = None
        assert set(cluster.wait_for_end().values()) == {0}
        assert_trained_well(run, good, cluster.daemons)
        assert not leader.events("data.lost")
        assert {record["source"] for record in leader.events("data.restored")} <= {"data-1"}
        assert not leader.events("iteration.aborted")


def test_a_wrong_url_is_refused_at_the_start(tmp_path: Path, corpus: Path) -> None:
    run = make_run(num_iterations=ITERATIONS, min_nodes_per_stage=1)
    with http_store(corpus) as store, Cluster(tmp_path, run, store.url) as cluster:
        store.status = 403
        refused = cluster.start("refused", "leader", cluster.run_file)
        missing = cluster.start(
            "missing", "leader", cluster.run_file, "--data", "file:///nowhere/corpus"
        )
        assert refused.wait() == 9
        assert missing.wait() == 9
        (line,) = refused.stderr.strip().splitlines()
        assert f"{store.url}/index.json can't be read" in line
        assert "403" in line
        (line,) = missing.stderr.strip().splitlines()
        assert "file:///nowhere/corpus has no index.json" in line
