"""What proves a membership, over the life of a run: renewed in time, and found again after it."""

import asyncio
import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.ids import NodeId
from decod.membership.papers import Membership
from decod.net.dht import Dht
from decod.net.dht_record import PEER
from decod.protocol.core.view import Role
from decod.run.run_config import RunConfig
from tests.integration.test_checkpoints import write_run_file
from tests.support import askew, brief, unhurried
from tests.support.cluster import Cluster, Daemon, assert_refused, run_decod
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def impatient(run: RunConfig) -> RunConfig:
    """Returns a run whose nodes soon give up a leader that is gone."""
    return replace(run, protocol=replace(run.protocol, leader_timeout_s=3.0))


def test_papers_that_last_for_seconds_are_renewed_while_training_goes_on(
    tmp_path: Path, corpus: Path
) -> None:
    """Each node shows three or more certificates, and connections outlive none of them."""
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(program=brief.PROGRAM)
        relays = cluster.start_relays(1)

        def renewed(daemon: Daemon) -> bool:
            return len(daemon.events("member.renewed")) >= 3

        for daemon in (leader, *relays):
            cluster.wait_for(lambda d=daemon: renewed(d), f"{daemon.name}'s renewals")
        cluster.wait_for_iteration(leader.iteration + 3)
        assert not leader.events("member.lost")
        assert not leader.events("iteration.aborted")[1:], "the first is the run's opening"
        assert leader.status()["counters"].get("caller.refused", 0) == 0


@pytest.mark.slow
def test_volunteers_find_a_resumed_run_again_without_a_new_join_string(
    tmp_path: Path, corpus: Path
) -> None:
    run = impatient(make_run(min_nodes_per_stage=1))
    with Cluster(tmp_path, run, corpus) as cluster:
        write_run_file(cluster, every_iterations=1)
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        relays = cluster.start_relays(1)
        cluster.wait_for_iteration(3)
        cluster.wait_for(lambda: leader.events("checkpoint.written"), "a checkpoint")
        spent = _revoked_and_tried(cluster)
        address, run_id = leader.status()["node"]["address"], leader.status()["run_id"]
        leader.send(signal.SIGKILL)
        leader.wait()
        cluster.daemons.remove(leader)
        resumed = cluster.start(
            "leader", "leader", cluster.run_file, "--resume", "latest", "--listen", address
        )
        cluster.daemons.insert(0, cluster.daemons.pop())
        cluster.wait_for(lambda: cluster.join_string(resumed), "the run again")
        for relay in relays:
            cluster.wait_for(
                lambda r=relay: _trains_elsewhere(r, run_id),
                f"{relay.name} in the resumed run",
                timeout_s=120.0,
            )
        cluster.wait_for_iteration(resumed.iteration + 2)
        tokens = run_decod("token", "list", "--json", "--state-dir", resumed.state_dir)
        assert tokens.returncode == 0, tokens
        assert '"used": 2' in tokens.stdout, "those of the first start"
        assert '"used": 0' in tokens.stdout, "nobody needed the new one"
        _check_audit_log(resumed, spent, [relay.membership().node_id for relay in relays])


def test_hosts_whose_clocks_are_off_by_an_hour_train_and_are_found(
    tmp_path: Path, corpus: Path
) -> None:
    """They go by the leader's clock in the DHT, and say that theirs are wrong."""
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        early = cluster.start_relay("early", program=askew.program(-3600.0))
        late = cluster.start_relay("late", program=askew.program(3600.0))
        cluster.wait_for_iteration(2)
        for relay, way in ((early, "behind"), (late, "ahead of")):
            (noted,) = relay.events("clock.differs")
            assert abs(noted["seconds"] - 3600) <= 5
            assert f"{way} the leader's: set it" in relay.stderr
        counters = [daemon.status()["counters"] for daemon in (leader, early, late)]
        assert not [each for each in counters if each.get("dht.malformed")]
        found = asyncio.run(_records_of((early, late), cluster.admit("seeker"), leader))
        assert found == {relay.status()["node"]["address"] for relay in (early, late)}


async def _records_of(daemons: tuple[Daemon, ...], seeker: Membership, leader: Daemon) -> set[str]:
    """Return the addresses of some nodes as the DHT has them, for a member with the right clock."""
    status = leader.status()
    dht = Dht(seeker, status["run_id"])
    await dht.start("127.0.0.1", 0)
    try:
        await dht.bootstrap([status["node"]["address"]])
        records = [
            await dht.lookup(PEER, NodeId(daemon.status()["node"]["id"])) for daemon in daemons
        ]
    finally:
        await dht.close()
    return {record.value["address"] for record in records if record is not None}


def _trains_elsewhere(relay: Daemon, run_id: str) -> bool:
    """Whether a relay trains in another run. Between two, it does not answer for a moment."""
    status = relay.try_status()
    return status is not None and status["run_id"] != run_id and status["state"] == "training"


def _revoked_and_tried(cluster: Cluster) -> str:
    """Revoke a new token, and have a node try it; return the token's id."""
    where = ("--state-dir", cluster.leader.state_dir)
    join = cluster.invite(Role.RELAY)
    (record, *_) = json.loads(run_decod("token", "list", "--json", *where).stdout)
    assert run_decod("token", "revoke", record["id"], *where).returncode == 0
    late = run_decod("join", join, "--state-dir", cluster.folder / "late")
    assert_refused(late, exit_code=5, holds=["E-REJ-010"])
    return str(record["id"])


def _check_audit_log(leader: Daemon, spent: str, relays: list[str]) -> None:
    """Check what the leader's audit log says after both of its lives, while it runs."""
    where = ("--state-dir", leader.state_dir)
    verified = run_decod("audit", "verify", *where)
    assert verified.returncode == 0, verified
    assert "opened without having been closed before: 1" in verified.stdout, "it was killed"
    shown = run_decod("audit", "show", "--json", *where)
    lines = [json.loads(line) for line in shown.stdout.splitlines()]

    def of(event: str) -> list[dict[str, Any]]:
        return [line for line in lines if line["event"] == event]

    for event in ("token.used", "member.admitted", "certificate.issued"):
        assert {line["node"] for line in of(event)} == set(relays), event
        assert {line["address"] for line in of(event)} == {"127.0.0.1"}
    assert [line["details"]["token"] for line in of("token.revoked")] == [spent]
    assert [line["details"]["token"] for line in of("token.refused")] == [spent]
    assert len(of("member.refused")) == 1
    assert len(of("token.created")) == 3, "one at each start, and one by command"
    assert [line["event"] for line in lines if line["event"].startswith("run.")] == [
        "run.started",
        "run.resumed",
    ]
    assert of("checkpoint.written")
    joins = leader.stdout + leader.state_dir.joinpath("node.log").read_text()
    secrets = [join.split("-")[3] for join in re.findall(r"decod1-[a-z0-9-]+", joins)]
    assert secrets, "the join string is printed"
    assert not [secret for secret in secrets if secret in shown.stdout]
