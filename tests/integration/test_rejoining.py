"""Nodes that fell out of their run are back in it without a person, with what they were."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from decod.run.run_config import RunConfig
from tests.support import unhurried
from tests.support.cluster import Cluster, Daemon, is_removed, run_decod, takes_part
from tests.support.network import Network, missing
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


BACK_WITHIN_S = 10.0
FORGOTTEN_S = 35.0
"""Addresses of former members were forgotten after 30 s once."""


def impatient(run: RunConfig) -> RunConfig:
    """Returns a run whose members notice soon that they are cut off."""
    return replace(run, protocol=replace(run.protocol, leader_timeout_s=8.0))


def node_id(daemon: Daemon) -> str:
    return str(daemon.status()["node"]["id"])


def wait_until_back(cluster: Cluster, daemon: Daemon) -> float:
    """Waits until a daemon that has left is a member again, and works; returns how long it took."""

    start_s = time.monotonic()
    cluster.wait_for(lambda: takes_part(cluster, daemon), f"the return of {daemon.name}")
    took_s = time.monotonic() - start_s
    print(f"{daemon.name} is back after {took_s:.1f} s")
    before = cluster.leader.iteration
    cluster.wait_for_iteration(before + 3)
    cluster.wait_for_iteration(before + 3, node=daemon)
    return took_s


def check_losses(cluster: Cluster, corpus: Path) -> None:
    found = cluster.leader.losses()
    expected, _ = reference(cluster.run, corpus, len(found))
    assert loss_error(found, expected) < 1e-8


def says_reconnecting(daemon: Daemon) -> bool:
    daemon.refuse_death()
    status = daemon.try_status()
    return status is not None and status["state"] == "reconnecting"


def loading_s(daemon: Daemon) -> float:
    """Returns how long the latest compute process of a daemon took to start."""
    begun, ready = (
        datetime.fromisoformat(daemon.events(event)[-1]["time"])
        for event in ("node.introduced", "worker.started")
    )
    return (ready - begun).total_seconds()


@pytest.mark.slow
def test_a_relay_looks_early_for_a_leader_whose_port_refuses(tmp_path: Path, corpus: Path) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        relays = cluster.start_relays(1)
        cluster.wait_for_iteration(2)
        leader.send(signal.SIGKILL)
        for relay in relays:
            cluster.wait_for(lambda r=relay: says_reconnecting(r), "its word", timeout_s=25.0)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_relays_that_slept_or_lost_their_device_are_back_by_themselves(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(min_nodes_per_stage=1)
    # A process that hangs is given a quarter of it.
    run = replace(run, protocol=replace(run.protocol, iteration_timeout_s=30.0))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        relays = [cluster.start_relay(f"relay-1-{k}", "--stage", "1") for k in range(2)]
        cluster.start_relay("relay-2-0", "--stage", "2")
        sleeper = relays[1]
        cluster.wait_for(lambda: takes_part(cluster, sleeper), "all members")
        was = node_id(sleeper)

        # A laptop that sleeps for longer than the others wait, and a node process that stands
        # still for longer than that.
        for whole_host in (True, False):
            compute = sleeper.compute_pid() if whole_host else None
            stopped = [sleeper.process.pid] + ([compute] if compute else [])
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            cluster.wait_for(lambda: is_removed(cluster, sleeper), "its removal")
            gone_s = time.monotonic()
            cluster.wait_for(lambda at_s=gone_s: time.monotonic() > at_s + FORGOTTEN_S, "a while")
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            took_s = wait_until_back(cluster, sleeper)
            # Torch is loaded anew, which may take long on a busy machine.
            assert took_s - loading_s(sleeper) < BACK_WITHIN_S
        assert node_id(sleeper) == was
        assert sleeper.events("node.reconnecting")

        # Its compute process dies, and hangs: it has another one each time.
        for number in (signal.SIGKILL, signal.SIGSTOP):
            pid = sleeper.compute_pid()
            assert pid is not None
            os.kill(pid, number)
            cluster.wait_for(lambda: says_reconnecting(sleeper), "its word")
            wait_until_back(cluster, sleeper)
            assert sleeper.compute_pid() not in (None, pid)
        assert node_id(sleeper) == was

        leader.send(signal.SIGTERM)
        assert [daemon.wait() for daemon in cluster.daemons] == [0] * 4
        check_losses(cluster, corpus)


def test_who_may_not_rejoin_ends_with_a_code_that_says_try_again(
    tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        cluster.start_leader(program=unhurried.PROGRAM)
        relay = cluster.start_relay("relay-1-0", "--stage", "1", "--no-rejoin")
        cluster.start_relay("relay-1-1", "--stage", "1")
        cluster.start_relay("relay-2-0", "--stage", "2")
        cluster.wait_for(lambda: takes_part(cluster, relay), "all members")
        relay.send(signal.SIGSTOP)
        cluster.wait_for(lambda: is_removed(cluster, relay), "its removal")
        relay.send(signal.SIGCONT)
        assert relay.wait() == 75


@pytest.mark.slow
def test_volunteers_wait_for_a_leader_that_is_gone_and_hear_when_another_run_began(
    tmp_path: Path, corpus: Path
) -> None:
    """It has another root, so it is not theirs, whatever it calls itself."""
    run = impatient(make_run(min_nodes_per_stage=1))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        relays = cluster.start_relays(1)
        cluster.wait_for_iteration(3)
        address = leader.status()["node"]["address"]
        exported = run_decod("export", tmp_path / "model", "--state-dir", leader.state_dir)
        assert exported.returncode == 0, exported
        leader.send(signal.SIGKILL)
        for relay in relays:
            cluster.wait_for(lambda r=relay: says_reconnecting(r), "its word")
            cluster.wait_for(lambda r=relay: "no answer from" in r.stdout, "its first look")
        drained = run_decod("drain", "--state-dir", relays[0].state_dir)
        assert drained.returncode == 0, drained
        assert relays[0].wait(timeout_s=15.0) == 0

        again = cluster.start(
            "again", "leader", cluster.run_file, "--listen", address, "--init", tmp_path / "model"
        )
        cluster.wait_for(lambda: cluster.join_string(again), "another run there")
        assert relays[1].wait(timeout_s=120.0) == 5
        assert "E-REJ-005" in relays[1].stderr
        assert "ask for a new join string" in relays[1].stderr
        again.send(signal.SIGTERM)
        assert again.wait() == 0


@pytest.mark.slow
def test_data_nodes_come_back_and_take_the_place_of_one_that_died_seconds_ago(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(num_data_nodes=2, min_nodes_per_stage=1)
    with Cluster(tmp_path, run, corpus) as cluster:
        cluster.start_leader(program=unhurried.PROGRAM)
        other = cluster.start_data_node("data-1", program=unhurried.PROGRAM)
        cluster.start_relays(1)
        cluster.wait_for(lambda: takes_part(cluster, other), "both data nodes")
        cluster.wait_for_iteration(2)
        other.send(signal.SIGSTOP)
        cluster.wait_for(lambda: is_removed(cluster, other), "its removal")
        other.send(signal.SIGCONT)
        wait_until_back(cluster, other)
        assert other.status()["node"]["role"] == "data"

        other.send(signal.SIGSTOP)
        heir = cluster.start_data_node("data-2", program=unhurried.PROGRAM)
        cluster.wait_for(lambda: heir.events("candidate.refused"), "a refusal that passes")
        wait_until_back(cluster, heir)
        other.send(signal.SIGKILL)


# --- hosts with addresses of their own ------------------------------------------------------------


@pytest.fixture
def network() -> Iterator[Network]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    hosts = ("leader", "relay-1", "relay-2", "mover")
    rates = {(a, b): 200.0 for a in hosts for b in hosts if a != b}
    with Network(hosts, rates) as network:
        yield network


@pytest.mark.slow
@pytest.mark.netns
def test_a_link_heals_and_an_address_changes(
    tmp_path: Path, corpus: Path, network: Network
) -> None:
    run = impatient(make_run(min_nodes_per_stage=1))
    with Cluster(tmp_path, run, corpus, network) as cluster:
        cluster.start_leader(program=unhurried.PROGRAM)
        cluster.start_relay("relay-1", "--stage", "1")
        cluster.start_relay("relay-2", "--stage", "2")
        mover = cluster.start_relay("mover", "--stage", "1", "--listen", "0.0.0.0:7700")
        cluster.wait_for(lambda: takes_part(cluster, mover), "all members")
        was, address = node_id(mover), mover.status()["node"]["address"]
        assert address == f"{network.address('mover')}:7700"

        others = [host for host in network.hosts if host != "mover"]
        for host in others:
            network.cut("mover", host)
            network.cut(host, "mover")
        cluster.wait_for(lambda: is_removed(cluster, mover), "its removal")
        cluster.wait_for(lambda: says_reconnecting(mover), "its word")
        for host in others:
            network.heal("mover", host)
            network.heal(host, "mover")
        wait_until_back(cluster, mover)

        network.move("mover", "10.99.0.77")
        cluster.wait_for(lambda: is_removed(cluster, mover), "its removal")
        wait_until_back(cluster, mover)
        assert mover.status()["node"]["address"] == "10.99.0.77:7700"
        assert node_id(mover) == was
        check_losses(cluster, corpus)


@pytest.mark.slow
def test_a_run_whose_leader_was_gone_for_a_while_goes_on(tmp_path: Path, corpus: Path) -> None:
    """All volunteers have left it by then: what they keep on their disks brings the run back."""
    run = impatient(make_run(min_nodes_per_stage=1))
    run = replace(run, protocol=replace(run.protocol, snapshot_every_iterations=3))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        relays = cluster.start_relays(1)
        cluster.wait_for_iteration(7)
        leader.send(signal.SIGSTOP)
        for relay in relays:
            cluster.wait_for(lambda r=relay: says_reconnecting(r), "its word")
            cluster.wait_for(lambda r=relay: r.events("node.reconnecting"), "its leaving")
        leader.send(signal.SIGCONT)
        for relay in relays:
            wait_until_back(cluster, relay)
        check_losses(cluster, corpus)
