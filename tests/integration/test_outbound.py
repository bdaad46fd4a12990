"""Volunteers that nobody can dial train like all others."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import unhurried
from tests.support.cluster import Cluster, stage_nodes, takes_part
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

NUM_ITERATIONS = 8
LOSS_ERROR_MAX = 1e-8
"""Sums are taken in another order than in one process: rounding differs, nothing else may."""


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens, and nobody else will."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield closed.getsockname()[1]


def test_a_run_where_half_of_the_volunteers_can_not_be_dialled_learns_the_same(
    tmp_path: Path, corpus: Path, closed_port: int
) -> None:
    """Both of stage 2 can't be dialled: they average by way of a host in between."""
    run = make_run(num_iterations=NUM_ITERATIONS)
    nowhere = ("--advertise", f"127.0.0.1:{closed_port}")
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        for stage, index, options in ((1, 0, ()), (1, 1, ()), (2, 0, nowhere), (2, 1, nowhere)):
            cluster.start_relay(f"relay-{stage}-{index}", "--stage", str(stage), *options)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        losses, _ = reference(run, corpus, NUM_ITERATIONS)
        assert loss_error(leader.losses(), losses) < LOSS_ERROR_MAX
        assert all(daemon.losses() == leader.losses() for daemon in cluster.daemons)
        for daemon in cluster.daemons:
            expected = 1 if daemon.name.startswith("relay-2") else 0
            assert len(daemon.events("node.outbound")) == expected, daemon.name


@pytest.mark.slow
def test_a_volunteer_fetches_its_state_from_members_that_nobody_can_dial_either(
    tmp_path: Path, corpus: Path, closed_port: int
) -> None:
    """The state comes by way of a host in between, and so do the averages that it replays."""
    run = make_run()
    nowhere = ("--stage", "2", "--advertise", f"127.0.0.1:{closed_port}")
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        for index in (0, 1):
            cluster.start_relay(f"relay-1-{index}", "--stage", "1")
            cluster.start_relay(f"relay-2-{index}", *nowhere)
        cluster.wait_for_iteration(3)
        late = cluster.start_relay("late", *nowhere)
        cluster.wait_for(lambda: takes_part(cluster, late), "the late volunteer")
        entered = late.iteration
        cluster.wait_for_iteration(entered + 2, node=late)
        leader.end_run()
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        losses, _ = reference(run, corpus, len(leader.losses()))
        assert loss_error(leader.losses(), losses) < LOSS_ERROR_MAX
        assert len(late.losses()) >= 2


@pytest.mark.slow
def test_members_that_nobody_can_dial_follow_another_leader(
    tmp_path: Path, corpus: Path, closed_port: int
) -> None:
    """The leader was also the host in between: the other data node takes over both."""
    run = make_run(num_data_nodes=2)
    nowhere = ("--stage", "2", "--advertise", f"127.0.0.1:{closed_port}")
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        other = cluster.start_data_node("data-1", program=unhurried.PROGRAM)
        for index in (0, 1):
            cluster.start_relay(f"relay-1-{index}", "--stage", "1")
        hidden = [cluster.start_relay(f"relay-2-{index}", *nowhere) for index in (0, 1)]
        cluster.wait_for_iteration(4)
        leader.send(signal.SIGKILL)
        cluster.wait_for(lambda: other.events("leader.elected"), "another leader", timeout_s=30)
        before = other.iteration
        for node in (other, *hidden):
            cluster.wait_for_iteration(before + 3, node=node)
        reach = {node["name"]: node["reach"] for node in stage_nodes(other.status())}
        assert reach["data-1"] == "passes_on"
        assert (reach["relay-2-0"], reach["relay-2-1"]) == ("outbound", "outbound")
        assert all(not node.events("node.reconnecting") for node in hidden), "none fell out"
        assert other.status()["connections"]["passed_bytes"] > 0
