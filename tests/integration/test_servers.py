"""Stages whose reliable members share their work out among clients: daemons over sockets."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from decod.config.schema import RunConfig
from decod.protocol.core.identity import Organisation
from decod.train.params import ServersConfig
from tests.support.cluster import Cluster, Daemon
from tests.support.runs import loss_error, make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

NUM_ITERATIONS = 12


def servers_run(num_iterations: int = NUM_ITERATIONS) -> RunConfig:
    """Return a run of two stages, each of which begins with two servers."""
    run = make_run(num_iterations=num_iterations)
    return replace(run, organisation=Organisation.SERVERS)


def start_servers(cluster: Cluster) -> list[Daemon]:
    """Start two servers for each of two stages."""
    return [
        cluster.start_relay(f"server-{stage}-{k}", "--stage", str(stage), "--server")
        for stage in (1, 2)
        for k in (0, 1)
    ]


def check(cluster: Cluster, corpus: Path, model: Path) -> None:
    """All that was learnt is what one process would have learnt."""
    losses, weights = reference(cluster.run, corpus, cluster.run.num_iterations)
    found = cluster.leader.losses()
    assert sorted(found) == list(range(1, cluster.run.num_iterations + 1))
    print(f"losses differ by {loss_error(found, losses):.1e}", end=", ")
    print(f"weights by {weight_error(model, weights):.1e}", end="; ")
    assert loss_error(found, losses) < 1e-8
    assert weight_error(model, weights) < 1e-8


def worked(daemon: Daemon) -> int:
    """Return how many passes a node has computed in committed iterations."""
    return max((c["num_passes"] for c in daemon.events("step.committed")), default=0)


@pytest.mark.parametrize("delay", [0, 1])
def test_servers_and_clients_learn_what_one_process_learns(
    delay: int, tmp_path: Path, corpus: Path
) -> None:
    run = replace(servers_run(0), servers=ServersConfig(delay=delay))
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
