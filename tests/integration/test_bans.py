"""Members are banned while real daemons train: they are out at once everywhere, and may return."""

import asyncio
import json
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.errors import RejectedError
from decod.ids import RunId
from decod.membership.ban_list import BanBook
from decod.membership.papers import Membership
from decod.net.ask import ask_status
from tests.support import unhurried
from tests.support.cluster import Cluster, Daemon, assert_refused, run_decod, takes_part
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

EVERYWHERE_S = 30.0
"""Within which all members refuse a banned node."""


def node(leader: Daemon, *arguments: str) -> str:
    """Returns what `decod node` prints at a leader."""
    result = run_decod("node", *arguments, "--state-dir", leader.state_dir)
    assert result.returncode == 0, result
    return result.stdout


def listed(leader: Daemon) -> dict[str, dict[str, Any]]:
    """Returns what the leader lists, by name."""
    return {each["name"]: each for each in json.loads(node(leader, "list", "--json"))}


def refused_by(member: Membership, run_id: RunId, address: str) -> str:
    """Returns why a node does not answer a member's call; empty if it does."""
    try:
        asyncio.run(ask_status(address, run_id, member, timeout_s=5.0))
    except RejectedError as error:
        return str(error)
    return ""


def wait_until_refused(cluster: Cluster, member: Membership, by: Iterable[Daemon]) -> None:
    """Wait until all of some daemons refuse a member's calls, because it is banned."""
    for daemon in by:
        status = daemon.status()
        run_id, address = RunId(status["run_id"]), status["node"]["address"]
        cluster.wait_for(
            lambda a=address, r=run_id: "E-REJ-020" in refused_by(member, r, a),
            f"{daemon.name} to refuse it",
            timeout_s=EVERYWHERE_S,
        )


def test_a_banned_relay_is_out_everywhere_and_may_come_back(tmp_path: Path, corpus: Path) -> None:
    with Cluster(tmp_path, make_run(), corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        relays = cluster.start_relays(2)
        cluster.wait_for_iteration(3)
        liar, *others = relays
        member, join_string = liar.membership(), cluster.join_string(leader) or ""
        known = listed(leader)
        assert known.keys() == {"leader", *(relay.name for relay in relays)}
        assert known[liar.name]["id"] == member.node_id
        assert 23 * 3600 < known[liar.name]["papers_end_in_s"] <= 24 * 3600
        assert all(each["ban"] is None for each in known.values())

        said = node(leader, "ban", liar.name, "--for", "2h", "--reason", "its gradients are noise")
        banned_s = time.monotonic()
        assert member.node_id in said
        assert liar.wait(timeout_s=EVERYWHERE_S) == 5
        assert "E-REJ-020" in liar.stderr
        assert "its gradients are noise" in liar.stderr
        assert "UTC" in liar.stderr, "until when"
        wait_until_refused(cluster, member, [leader, *others])
        everywhere_s = time.monotonic() - banned_s
        print(f"refused everywhere {everywhere_s:.2f} s after the ban")
        assert everywhere_s < EVERYWHERE_S
        assert listed(leader)[member.host.name]["state"] == "gone"

        cluster.wait_for_iteration(leader.iteration + 4)
        assert not leader.events("iteration.aborted")[1:], "the first is the run's opening"
        (mended,) = leader.events("iteration.mended")
        assert "banned" in mended["reason"]
        for daemon in others:
            kept = BanBook(member.root, daemon.membership().folder)
            assert not kept.allowed(member.node_id), "it goes by it after a restart too"

        again = run_decod("join", join_string, "--state-dir", liar.state_dir)
        assert_refused(again, exit_code=5, holds=["E-REJ-020", "its gradients are noise"])

        node(leader, "unban", member.node_id[:8])
        cluster.daemons.remove(liar)
        back = cluster.start(liar.name, "join", join_string, "--stage", "1")
        cluster.wait_for(lambda: takes_part(cluster, back), "the relay again", timeout_s=90.0)
        assert listed(leader)[liar.name]["ban"] is None
        cluster.wait_for_iteration(back.iteration + 2, node=back)


@pytest.mark.slow
def test_a_relay_that_stood_still_hears_of_its_ban_when_it_goes_on(
    tmp_path: Path, corpus: Path
) -> None:
    """Its calls are refused, nothing else is told it. Then it asks about the run, and hears why."""
    run = make_run()
    run = replace(run, protocol=replace(run.protocol, leader_timeout_s=3.0))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        liar, *others = cluster.start_relays(2)
        cluster.wait_for_iteration(3)
        member = liar.membership()
        liar.send(signal.SIGSTOP)
        node(leader, "ban", liar.name, "--forever", "--reason", "it stands still")
        wait_until_refused(cluster, member, [leader, *others])
        cluster.wait_for_iteration(leader.iteration + 3)
        liar.send(signal.SIGCONT)

        def told() -> bool:
            status = liar.try_status()
            return status is not None and "it stands still" in status["message"]

        cluster.wait_for(lambda: told() or liar.process.poll() is not None, "the reason")
        assert liar.wait(timeout_s=90.0) == 5
        assert "it stands still" in liar.stderr
        assert "for ever" in liar.stderr


def test_elsewhere_the_commands_say_where_the_leader_is(tmp_path: Path, corpus: Path) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader()
        relay = cluster.start_relays(1)[0]
        cluster.wait_for_iteration(1)
        address = leader.status()["node"]["address"]
        for command in (("list",), ("ban", "leader")):
            result = run_decod("node", *command, "--state-dir", relay.state_dir)
            assert_refused(result, exit_code=3, holds=["E-RUN-003", address])
        result = run_decod("node", "ban", "leader", "--state-dir", leader.state_dir)
        assert_refused(result, exit_code=3, holds=["E-CFG-083", "it leads the run"])
