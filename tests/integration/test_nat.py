"""Volunteers behind routers that translate addresses, in network namespaces."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from decod.run.run_config import RunConfig
from tests.support.cluster import Cluster, Daemon, stage_nodes
from tests.support.nat import Nat, NatNetwork, missing
from tests.support.runs import loss_error, make_run, reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.netns,
    pytest.mark.processes,
    pytest.mark.timeout(400),
]

ANYWHERE = ("--listen", "0.0.0.0:0")
START_TIMEOUT_S = 120.0
LOSS_ERROR_MAX = 1e-8
"""Sums are taken in another order than in one process: rounding differs, nothing else may."""


@pytest.fixture(autouse=True)
def _possible() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)


def patient_run(num_iterations: int = 0, *, min_nodes_per_stage: int = 2) -> RunConfig:
    """Returns a run that loses nobody because the machine is busy with other tests."""
    run = make_run(num_iterations=num_iterations, min_nodes_per_stage=min_nodes_per_stage)
    return replace(run, protocol=replace(run.protocol, heartbeat_timeout_s=15.0))


def reach_of(leader: Daemon) -> dict[str, str]:
    return {node["name"]: node["reach"] for node in stage_nodes(leader.status())}


def passed_bytes(daemon: Daemon) -> int:
    found: int = daemon.status()["connections"]["passed_bytes"]
    return found


def test_half_of_the_volunteers_behind_routers_learn_what_one_process_learns(
    tmp_path: Path, corpus: Path
) -> None:
    """Both members of stage 2 are behind routers: they average by way of a host in between."""
    num_iterations = 10
    run = patient_run(num_iterations)
    hosts = ("leader", "open-1", "open-2", "symmetric", "carrier")
    behind = {"symmetric": Nat.SYMMETRIC, "carrier": Nat.CARRIER}
    with NatNetwork(hosts, behind) as network, Cluster(tmp_path, run, corpus, network) as cluster:
        leader = cluster.start_leader()
        for name in hosts[1:]:
            cluster.start_relay(name, "--stage", "2" if name in behind else "1", *ANYWHERE)
        cluster.wait_for_iteration(num_iterations - 2, timeout_s=START_TIMEOUT_S)
        reach = reach_of(leader)
        passed = passed_bytes(leader)
        sent = sum(network.sent_bytes(host) for host in hosts)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        losses, _ = reference(run, corpus, num_iterations)
        worst = loss_error(leader.losses(), losses)
        assert worst < LOSS_ERROR_MAX
        assert all(daemon.losses() == leader.losses() for daemon in cluster.daemons)
        assert reach == {
            "leader": "passes_on",
            "open-1": "dialled",
            "open-2": "dialled",
            "symmetric": "outbound",
            "carrier": "outbound",
        }
        share = passed / sent
        print(f"losses off by {worst:.1e}; {100 * share:.1f} % of the bytes passed another host")
        assert 0 < share < 0.5


@pytest.mark.parametrize(
    ("kind", "reach"),
    [
        (Nat.FULL_CONE, "dialled"),
        (Nat.RESTRICTED, "outbound"),
        (Nat.SYMMETRIC, "outbound"),
        (Nat.CARRIER, "outbound"),
    ],
)
def test_each_kind_of_router_is_told_apart(
    tmp_path: Path, corpus: Path, kind: Nat, reach: str
) -> None:
    run = patient_run(min_nodes_per_stage=1)
    network = NatNetwork(("leader", "open", "host"), {"host": kind})
    with network, Cluster(tmp_path, run, corpus, network) as cluster:
        leader = cluster.start_leader()
        cluster.start_relay("open", "--stage", "1", *ANYWHERE)
        host = cluster.start_relay("host", "--stage", "2", *ANYWHERE)
        cluster.wait_for_iteration(2, timeout_s=START_TIMEOUT_S)
        assert reach_of(leader) == {"leader": "passes_on", "open": "dialled", "host": reach}
        assert host.status()["node"]["reach"] == reach
        assert passed_bytes(leader) == 0, "a leader that can be dialled is no third host"


def test_the_loss_of_the_host_in_between_costs_no_iteration(tmp_path: Path, corpus: Path) -> None:
    num_iterations = 24
    run = patient_run(num_iterations)
    hosts = ("leader", "between-1", "between-2", "hidden-1", "hidden-2")
    behind = {"hidden-1": Nat.RESTRICTED, "hidden-2": Nat.SYMMETRIC}
    with NatNetwork(hosts, behind) as network, Cluster(tmp_path, run, corpus, network) as cluster:
        leader = cluster.start_leader("--no-pass-on")
        between = [
            cluster.start_relay(name, "--stage", "1", "--pass-on", *ANYWHERE) for name in hosts[1:3]
        ]
        for name in behind:
            cluster.start_relay(name, "--stage", "2", *ANYWHERE)
        cluster.wait_for_iteration(5, timeout_s=START_TIMEOUT_S)
        passed = {daemon.name: passed_bytes(daemon) for daemon in between}
        lost = max(between, key=lambda daemon: passed[daemon.name])
        assert passed[lost.name] > 0
        lost.send(signal.SIGKILL)
        codes = cluster.wait_for_end(timeout_s=200.0)
        assert all(code == 0 for name, code in codes.items() if name != lost.name), codes
        losses, _ = reference(run, corpus, num_iterations)
        assert loss_error(leader.losses(), losses) < LOSS_ERROR_MAX
        commits = leader.commits()
        assert [commit.iteration for commit in commits] == list(range(1, num_iterations + 1))
        assert {commit.attempt for commit in commits} == {1}, "no iteration was repeated"
