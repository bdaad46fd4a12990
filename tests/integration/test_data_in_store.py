"""Data nodes that read their shards from an object store, with a cache on their disk."""

import shutil
from pathlib import Path

import pytest

from tests.integration.test_changed_data import ITERATIONS, assert_trained_well, prepare_lines
from tests.support.cluster import Cluster
from tests.support.http_store import http_store
from tests.support.runs import make_run

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_a_run_from_a_url_learns_what_one_from_the_folder_does(tmp_path: Path) -> None:
    """One object is damaged on its way, once for good and once for a moment. After a restart, most
    blocks come from the cache."""
    run = make_run(num_iterations=ITERATIONS, min_nodes_per_stage=1)
    good = prepare_lines(tmp_path / "good")
    with http_store(good) as store:
        store.corrupt = dict.fromkeys([path.name for path in good.glob("shard-*.bin")], 1)
        with Cluster(tmp_path / "first", run, Path(store.url)) as cluster:
            write_data(cluster, store.url)
            leader = cluster.start_leader()
            cluster.start_relays(1)
            cluster.wait_for(lambda: leader.iteration >= 3, "half of the run")
            leader.end_run()
            assert set(cluster.wait_for_end().values()) == {0}
            assert_trained_well(run, good, cluster.daemons)
            assert not leader.events("data.damaged")
            first, asked = leader.iteration, store.asked.copy()
        state = tmp_path / "again" / "leader" / "state"
        shutil.copytree(leader.state_dir, state, symlinks=True)
        with Cluster(tmp_path / "again", run, Path(store.url)) as cluster:
            write_data(cluster, store.url)
            if first < ITERATIONS:
                leader = cluster.start_leader("--resume", str(first))
                cluster.start_relays(1)
                assert set(cluster.wait_for_end().values()) == {0}
                assert max(leader.losses()) == ITERATIONS
                assert_trained_well(run, good, cluster.daemons)
        print(first, len(asked), sum(asked.values()), len(store.asked), sum(store.asked.values()))


def write_data(cluster: Cluster, url: str) -> None:
    text = cluster.run_file.read_text()
    cluster.run_file.write_text(text.replace(str(Path(url)), url))
