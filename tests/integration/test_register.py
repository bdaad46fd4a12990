"""Join tokens outlive the leader that has made them: all data nodes know them."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from decod.protocol.core.view import Role
from tests.support import unhurried
from tests.support.cluster import Cluster, Daemon, assert_refused, run_decod, takes_part
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def token(at: Daemon, *arguments: str) -> str:
    """Returns what `decod token` prints at a data node."""
    result = run_decod("token", *arguments, "--state-dir", at.state_dir)
    assert result.returncode == 0, result
    assert "warning" not in result.stderr
    return result.stdout.strip()


def tokens(at: Daemon) -> dict[str, dict[str, Any]]:
    """Returns the tokens that a data node knows, by their notes."""
    listed = json.loads(token(at, "list", "--json"))
    return {each["note"]: each for each in listed if each["note"]}


def enrolled(cluster: Cluster, name: str, join_string: str) -> Daemon:
    daemon = cluster.start(name, "join", join_string, "--stage", "1")
    cluster.wait_for(lambda: takes_part(cluster, daemon), f"{name} in the run", timeout_s=90.0)
    return daemon


@pytest.mark.slow
def test_an_elected_leader_honours_the_tokens_of_its_predecessor(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(num_data_nodes=2, min_nodes_per_stage=1)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        other = cluster.start_data_node("data-1", program=unhurried.PROGRAM)
        cluster.start_relays(1)
        cluster.wait_for_iteration(2)
        good = token(leader, "create", "--uses", "2", "--note", "good")
        bad = token(leader, "create", "--note", "bad")
        # Not at the leader: the leader knows of it all the same.
        there = token(other, "create", "--uses", "1", "--note", "there")
        assert "there" in tokens(leader)
        cluster.wait_for(lambda: {"good", "bad"} <= tokens(other).keys(), "both at data-1")
        token(other, "revoke", tokens(other)["bad"]["id"])
        assert tokens(leader)["bad"]["state"] == "revoked"
        enrolled(cluster, "first", good)
        enrolled(cluster, "second", there)
        cluster.wait_for(lambda: tokens(other)["good"]["used"] == 1, "the use at data-1")

        leader.send(signal.SIGKILL)
        leader.wait()
        cluster.daemons.remove(leader)
        cluster.daemons.remove(other)
        cluster.daemons.insert(0, other)
        cluster.wait_for(lambda: other.events("leader.elected"), "another leader", timeout_s=30.0)
        cluster.wait_for_iteration(other.iteration + 1)
        enrolled(cluster, "third", good)
        known = tokens(other)
        assert (known["good"]["state"], known["good"]["used"]) == ("used up", 2)
        for spent in (good, bad, there):
            late = run_decod("join", spent, "--state-dir", tmp_path / "late", timeout_s=90.0)
            assert_refused(late, exit_code=5, holds=["E-REJ-010"])
        assert cluster.join_string(other, Role.RELAY) not in (None, good)
