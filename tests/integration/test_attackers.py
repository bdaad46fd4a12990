"""Attempts to get into a run that trains: all are refused, and it learns what it would have."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from decod.ids import NodeId, RunId
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from tests.support import unhurried
from tests.support.attackers import REFUSALS, Target, attack
from tests.support.cluster import Cluster, run_decod
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

NUM_ITERATIONS = 16
NUM_ROUNDS = 3
LOSS_ERROR_MAX = 1e-8
"""Sums are taken in another order than in one process: rounding differs, nothing else may."""


def target_of(cluster: Cluster) -> Target:
    status = cluster.leader.status()
    where = ("--state-dir", cluster.leader.state_dir)
    stolen = JoinString.parse(cluster.invite(Role.RELAY)).token
    assert stolen is not None
    tokens = json.loads(run_decod("token", "list", "--json", *where).stdout)
    assert stolen.id in {token["id"] for token in tokens}
    assert run_decod("token", "revoke", stolen.id, *where).returncode == 0
    return Target(
        status["node"]["address"],
        RunId(status["run_id"]),
        NodeId(status["node"]["id"]),
        cluster.admit("attacker"),
        stolen,
    )


def test_attackers_change_nothing_in_what_a_run_learns(tmp_path: Path, corpus: Path) -> None:
    run = make_run(num_iterations=NUM_ITERATIONS)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        target = target_of(cluster)
        cluster.start_relays(2)
        cluster.wait_for_iteration(1)
        rng = random.Random(3)
        for _ in range(NUM_ROUNDS):
            assert asyncio.run(attack(target, rng)) == REFUSALS
        assert leader.iteration < NUM_ITERATIONS, "it trained all the while"
        counters = leader.status()["counters"]
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        assert counters["message.forged"] == 2 * NUM_ROUNDS
        losses, _ = reference(run, corpus, NUM_ITERATIONS)
        assert loss_error(leader.losses(), losses) < LOSS_ERROR_MAX
        assert all(daemon.losses() == leader.losses() for daemon in cluster.daemons)
        assert not leader.events("member.lost")
        assert not leader.events("member.banned")
