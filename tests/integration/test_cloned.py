"""Hosts with one identity, as a cloned virtual machine makes them: the later one is refused."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import elsewhere, unhurried
from tests.support.cluster import Cluster, Daemon, takes_part
from tests.support.quick import first_of
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

LOSS_ERROR_MAX = 1e-8
"""Sums are taken in another order than in one process: rounding differs, nothing else may."""

ANOTHER_HOST = ("--listen", "127.0.0.2:0")


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens, and nobody else will."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield closed.getsockname()[1]


def copy_identity(cluster: Cluster, original: Daemon, name: str) -> None:
    """Gives a daemon that is yet to be started what a copied disk holds."""
    state_dir = cluster.folder / name / "state"
    state_dir.mkdir(parents=True, mode=0o700)
    shutil.copy(original.state_dir / "identity.key", state_dir)
    shutil.copytree(original.state_dir / "memberships", state_dir / "memberships")


def wait_told(cluster: Cluster, node: Daemon, *, known_at: str) -> None:
    """Waits until a node names the two hosts in its log, its terminal and its status."""
    cluster.wait_for(lambda: node.events("identity.shared"), f"a word of {node.name}")
    (told,) = node.events("identity.shared")
    assert told["known_at"] == known_at
    assert "TWO HOSTS HAVE ONE IDENTITY" in node.stderr
    status = node.status()
    assert "identity.shared" in [event["event"] for event in status["recent"]]


@pytest.mark.parametrize("dialled", first_of([True, False]))
def test_a_clone_of_a_volunteer_is_refused_and_the_original_trains_on(
    tmp_path: Path, corpus: Path, closed_port: int, dialled: bool
) -> None:
    run = make_run(min_nodes_per_stage=1)
    where = () if dialled else ("--advertise", f"127.0.0.1:{closed_port}")
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        original = cluster.start_relay("original", "--stage", "1", *where)
        cluster.start_relay("relay-2-0", "--stage", "2")
        cluster.wait_for(lambda: takes_part(cluster, original), "the original")
        cluster.wait_for_iteration(1)
        address = original.status()["node"]["address"]

        copy_identity(cluster, original, "clone")
        clone = cluster.start_relay("clone", *ANOTHER_HOST, program=elsewhere.PROGRAM)
        assert clone.wait() == 5
        assert f"E-REJ-022 another host, at {address}, has this node's identity" in clone.stderr
        assert "delete identity.key" in clone.stderr

        for node in (leader, original):
            wait_told(cluster, node, known_at=address)
        before = leader.iteration
        cluster.wait_for_iteration(before + 3, node=original)
        assert not leader.events("member.lost")
        assert {commit.attempt for commit in leader.commits()} == {1}, "no iteration was repeated"
        losses = leader.losses()
        expected, _ = reference(run, corpus, len(losses))
        assert loss_error(losses, expected) < LOSS_ERROR_MAX


def test_a_clone_of_the_leader_is_refused_and_the_leader_names_it(
    tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        copy_identity(cluster, leader, "clone")
        clone = cluster.start_relay("clone", *ANOTHER_HOST, program=elsewhere.PROGRAM)
        assert clone.wait() == 3
        assert "E-CFG-045" in clone.stderr
        wait_told(cluster, leader, known_at=leader.status()["node"]["address"])
        leader.refuse_death()
