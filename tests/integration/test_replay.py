"""Every control message of a run is sent once more, to whom it was sent: nothing changes."""

import json
import random
import sys
from pathlib import Path

import pytest

from decod.ids import RunId
from decod.membership.papers import Membership
from decod.net.channel import CONTROL_SERVICE, run_metadata
from decod.wire.v1 import control_pb2
from tests.support.cluster import Cluster, Daemon
from tests.support.history import check, read_lives
from tests.support.members import channel_to
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

KINDS_LEAST = 15

_CALLS_AT_ONCE = 8
"""As many as may go over one connection, and more than a node needs."""


def start(cluster: Cluster, name: str, *arguments: str) -> Daemon:
    """Returns a daemon whose messages are written to `sent` in its folder."""
    program = (sys.executable, "-u", "-m", "tests.support.recording")
    return cluster.start(name, *arguments, program=(*program, str(cluster.folder / f"{name}.sent")))


def recorded(folder: Path) -> list[tuple[str, bytes]]:
    """Returns all messages of all nodes, with the address that each went to."""
    lines = [
        line
        for path in folder.glob("*.sent")
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return [(address, bytes.fromhex(sent)) for address, sent in map(json.loads, lines)]


def send_again(messages: list[tuple[str, bytes]], members: dict[str, Membership]) -> None:
    """Sends messages once more, each in its sender's name: a replay cannot do better."""
    ways = {(address, sender_of(sent)) for address, sent in messages}
    channels = {way: channel_to(way[0], members[way[1]]) for way in ways}
    try:
        for first in range(0, len(messages), _CALLS_AT_ONCE):
            calls = [
                channels[address, sender_of(sent)]
                .unary_unary(f"/{CONTROL_SERVICE}/Deliver", bytes, bytes)
                .future(sent, timeout=20.0, metadata=run_of(sent))
                for address, sent in messages[first : first + _CALLS_AT_ONCE]
            ]
            for call in calls:
                call.result()
    finally:
        for channel in channels.values():
            channel.close()


def sender_of(sent: bytes) -> str:
    return control_pb2.DeliverRequest.FromString(sent).envelopes[0].sender_id


def run_of(sent: bytes) -> tuple[tuple[str, str]]:
    return run_metadata(RunId(control_pb2.DeliverRequest.FromString(sent).envelopes[0].run_id))


def kinds_of(messages: list[tuple[str, bytes]]) -> set[str]:
    return {
        str(envelope.WhichOneof("body"))
        for _, sent in messages
        for envelope in control_pb2.DeliverRequest.FromString(sent).envelopes
    }


@pytest.mark.slow
def test_old_messages_that_come_again_change_nothing(tmp_path: Path, corpus: Path) -> None:
    run = make_run()
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = start(cluster, "leader", "leader", str(cluster.run_file))
        join = cluster.wait_for(lambda: cluster.join_string(leader), "the join string")
        for name, stage in (("a1", "1"), ("b1", "1"), ("a2", "2"), ("b2", "2")):
            start(cluster, name, "join", join, "--stage", stage)
        cluster.wait_for_iteration(6)
        messages = recorded(tmp_path)
        kinds = kinds_of(messages)
        assert len(kinds) >= KINDS_LEAST, kinds
        members = {m.node_id: m for m in (daemon.membership() for daemon in cluster.daemons)}
        rng = random.Random(1)
        for _ in range(2):
            rng.shuffle(messages)
            send_again(messages, members)
        print(f"{len(messages)} requests with {len(kinds)} kinds of messages, twice")
        cluster.wait_for_iteration(leader.iteration + 3)
        for daemon in cluster.daemons:
            daemon.refuse_death()
        for event in ("member.lost", "iteration.aborted", "iteration.mended", "member.leaving"):
            assert not leader.events(event), event
        lives = [life for d in cluster.daemons for life in read_lives(d.name, d.state_dir)]
        found = check(lives)
        assert not found.violations
        losses = leader.losses()
        expected, _ = reference(run, corpus, max(losses))
        assert loss_error(losses, expected) < 1e-8
