"""What relays have contributed: vouched for while the run goes on, and to the last microbatch."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from decod.texts import base32
from tests.support.cluster import Cluster, Daemon, run_decod
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def receipts_of(daemon: Daemon) -> list[dict[str, Any]]:
    """Returns what `decod receipts` says of a node, from its disk."""
    result = run_decod("receipts", "--json", "--state-dir", daemon.state_dir)
    assert result.returncode == 0, result
    runs = json.loads(result.stdout)["runs"]
    return [row for run in runs for row in run["receipts"]]


def credit_of(daemon: Daemon) -> dict[str, Any]:
    """Returns the sums of `decod credit`, from the node's disk."""
    result = run_decod("credit", "--json", "--state-dir", daemon.state_dir)
    assert result.returncode == 0, result
    total: dict[str, Any] = json.loads(result.stdout)["total"]
    return total


@pytest.mark.slow
def test_all_work_is_vouched_for_when_a_relay_leaves_and_when_the_run_ends(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(min_nodes_per_stage=1)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        relays = cluster.start_relays(2)
        cluster.wait_for_iteration(3)
        leaver = relays[0]
        for relay in relays:
            cluster.wait_for(partial(_num_worked, relay), f"work of {relay.name}")
        drained = run_decod("drain", "--state-dir", leaver.state_dir)
        assert drained.returncode == 0, drained
        assert leaver.wait() == 0
        (left,) = receipts_of(leaver)
        assert left["issuer"] == leader.membership().node_id
        assert left["holder"] == leaver.membership().node_id
        cluster.wait_for_iteration(leader.iteration + 2)
        leader.end_run()
        for daemon in cluster.daemons:
            if daemon is not leaver:
                assert daemon.wait() == 0
        (own,) = receipts_of(leader)
        assert own["own_word"]
        rows = [row for relay in relays for row in receipts_of(relay)]
        num_stages = run.stages.num_relay_stages
        vouched = sum(row["num_microbatches"] for row in rows)
        assert vouched == num_stages * own["num_microbatches"]
        assert sum(row["num_tokens"] for row in rows) == num_stages * own["num_tokens"]
        last = max(commit.iteration for commit in leader.commits())
        assert own["last_iteration"] == last

        for daemon in cluster.daemons:
            # What a node counts itself is what data nodes vouch for. But a node that leaves is not
            # told whether its last iteration was committed.
            credit, receipts = credit_of(daemon), receipts_of(daemon)
            assert credit["num_runs"] == 1
            for name in ("num_microbatches", "num_tokens"):
                missing = sum(row[name] for row in receipts) - credit[name]
                assert missing >= 0, daemon.name
                assert not missing or daemon is leaver, daemon.name
            assert credit["device_s"] > 0
            assert min(credit["sent_bytes"], credit["received_bytes"]) > 0

        exported = run_decod("receipts", "export", "--state-dir", leaver.state_dir)
        file = tmp_path / "its.receipts"
        file.write_text(exported.stdout)
        key = base32(leader.membership().root)
        verified = run_decod("receipts", "verify", file, "--run-key", key)
        assert verified.returncode == 0, verified
        assert f"{left['num_microbatches']:,}" in verified.stdout


def _num_worked(daemon: Daemon) -> int:
    return int(daemon.status()["contributed"]["num_microbatches"])
