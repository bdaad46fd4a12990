"""Stages whose reliable members share their work out among clients: daemons over sockets."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.protocol.core.view import Duty
from decod.run.run_config import Organisation, RunConfig
from decod.run.training_config import ActivationCompression, ActivationsConfig, ServersConfig
from tests.support import slowed
from tests.support.cluster import Cluster, Daemon
from tests.support.quick import first_of
from tests.support.runs import loss_error, make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SLOW = slowed.program("passes", 0.25)
"""Of servers: so there is work for clients, on however busy a machine."""


def servers_run() -> RunConfig:
    """Return a run of two stages that goes on until it is ended."""
    return replace(make_run(num_iterations=0), organisation=Organisation.SERVERS)


def start_servers(cluster: Cluster) -> list[Daemon]:
    """Start two servers for each of two stages."""
    return [
        cluster.start_relay(f"server-{stage}-{k}", "--stage", str(stage), "--server", program=SLOW)
        for stage in (1, 2)
        for k in (0, 1)
    ]


def worked(daemon: Daemon) -> int:
    """Return how many passes a node has computed in committed iterations."""
    return max((c["num_passes"] for c in daemon.events("step.committed")), default=0)


@pytest.mark.parametrize("delay", first_of([1, 0]))
def test_servers_and_clients_learn_what_one_process_learns(
    delay: int, tmp_path: Path, corpus: Path
) -> None:
    run = replace(servers_run(), servers=ServersConfig(delay=delay))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        start_servers(cluster)
        clients = [cluster.start_relay(f"client-{k}") for k in range(2)]
        cluster.wait_for(lambda: all(map(worked, clients)), "work of both clients")
        cluster.wait_for_iteration(leader.iteration + 5)
        leader.send(signal.SIGTERM)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        losses, weights = reference(cluster.run, corpus, len(leader.losses()))
        assert loss_error(leader.losses(), losses) < 1e-8
    assert weight_error(tmp_path / "model", weights) < 1e-8


def doomed(moment: str) -> tuple[str, ...]:
    """Return the program of a daemon that dies at this moment of the fifth iteration or later."""
    return (sys.executable, "-u", "-m", "tests.support.doomed", "kill", moment, "5")


def finish(cluster: Cluster, corpus: Path, model: Path, lost: Daemon) -> None:
    """Wait until a daemon is dead and the run has gone on, end it, and compare what was learnt."""
    leader = cluster.leader
    cluster.wait_for(lambda: lost.process.poll() is not None, "the end of the doomed")
    cluster.wait_for_iteration(leader.iteration + 3)
    leader.send(signal.SIGTERM)
    codes = cluster.wait_for_end()
    assert codes.pop(lost.name) == -signal.SIGKILL
    assert set(codes.values()) == {0}, codes
    losses, weights = reference(cluster.run, corpus, len(leader.losses()))
    assert loss_error(leader.losses(), losses) < 1e-8
    assert weight_error(model, weights) < 1e-8


CLIENT_MOMENTS = ("before_forward", "after_forward", "in_backward", "after_backward")


@pytest.mark.parametrize("moment", first_of(["at_aggregation", "after_forward", *CLIENT_MOMENTS]))
def test_what_a_killed_client_had_done_is_done_again(
    moment: str, tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, servers_run(), corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        start_servers(cluster)
        cluster.start_relay("client")
        lost = cluster.start_relay("doomed", program=doomed(moment))
        finish(cluster, corpus, tmp_path / "model", lost)
        assert leader.events("iteration.mended")
        assert not leader.events("iteration.aborted")


@pytest.mark.slow
@pytest.mark.parametrize("duty", first_of([Duty.FRONTAL, Duty.BACKWARD]))
@pytest.mark.parametrize("moment", first_of(["with_result", "in_aggregation"]))
def test_a_killed_servers_microbatches_go_on_at_others(
    moment: str, duty: Duty, tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, servers_run(), corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        servers = [(1, "frontal"), (1, "backward"), (2, "frontal"), (2, "backward")]
        for stage, other in servers:
            arguments = ("--stage", str(stage), "--duty", other)
            cluster.start_relay(f"{other}-{stage}", *arguments)
        arguments = ("--stage", "1", "--duty", duty.value)
        lost = cluster.start_relay("doomed", *arguments, program=doomed(moment))
        cluster.start_relay("client", "--stage", "1")
        finish(cluster, corpus, tmp_path / "model", lost)
        assert leader.events("iteration.mended")
        assert not leader.events("iteration.aborted")


@pytest.mark.slow
@pytest.mark.parametrize("what", first_of(["activation", "gradient"]))
def test_a_client_that_returns_nan_is_removed_and_others_do_its_work(
    what: str, tmp_path: Path, corpus: Path
) -> None:
    program = (sys.executable, "-u", "-m", "tests.support.spoiling", what, "5")
    coded = ActivationsConfig(compression=ActivationCompression.INT8)
    run = replace(servers_run(), activations=coded)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        servers = start_servers(cluster)
        spoiling = cluster.start_relay("spoiling", "--stage", "1", program=program)
        cluster.wait_for(lambda: refusals(servers), "a refused result")
        cluster.wait_for_iteration(leader.iteration + 3)
        spoiling.send(signal.SIGKILL)  # It may be joining again, or waiting to.
        leader.send(signal.SIGTERM)
        codes = cluster.wait_for_end()
        assert {codes[daemon.name] for daemon in (leader, *servers)} == {0}, codes
        first = spoiling.events("node.started")[0]  # It joins again.
        assert {event["peer"] for event in refusals(servers)} == {first["node_id"]}
        losses, _ = reference(cluster.run, corpus, len(leader.losses()))
        assert loss_error(leader.losses(), losses) < 1e-8


def refusals(servers: list[Daemon]) -> list[dict[str, Any]]:
    """Return what servers did not take from clients."""
    return [event for server in servers for event in server.events("result.refused")]
