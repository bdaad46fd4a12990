"""An operator pauses a node, resumes it, and has it leave; what is learnt stays the same."""

import signal
import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support import unhurried
from tests.support.cluster import Cluster, Daemon, assert_refused, run_decod, stage_nodes
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def node_of(cluster: Cluster, daemon: Daemon) -> dict[str, object]:
    """Returns what the leader's status says of a member; empty for a stranger."""
    nodes = stage_nodes(cluster.leader.status())
    return next((node for node in nodes if node["name"] == daemon.name), {})


def assert_all_are_told(drained: CompletedProcess[str], leader: Daemon) -> None:
    """Checks that operator and organiser know what it means that relay-2-0 leaves its stage."""
    said = drained.stderr
    assert "time was up" in drained.stdout, drained
    assert "relay-2-0 is the last member of stage 2: it waits until" in said
    assert "waiting for another member of stage 2: leaves in " in said
    assert "the last member of stage 2 is leaving" in leader.stdout


def test_a_relay_is_paused_resumed_and_drained_while_the_run_goes_on(
    tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        relays = [cluster.start_relay(f"relay-1-{k}", "--stage", "1") for k in range(2)]
        alone = cluster.start_relay("relay-2-0", "--stage", "2")
        relay = relays[1]
        # Neither may pause before the other is there.
        cluster.wait_for(
            lambda: node_of(cluster, relay).get("microbatches") and node_of(cluster, relays[0]),
            "its first work",
        )

        refused = run_decod("pause", "--state-dir", alone.state_dir)
        assert_refused(refused, exit_code=5, holds=["E-REJ-007", "stage 2 would stop"])

        paused = run_decod("pause", "--state-dir", relay.state_dir)
        assert paused.returncode == 0, paused
        cluster.wait_for(lambda: node_of(cluster, relay).get("state") == "paused", "its pause")
        assert node_of(cluster, relay)["capacity"] == 0
        # What it did in the iteration in hand is known when the leader has asked once more.
        cluster.wait_for(lambda: node_of(cluster, relay)["flows"] == 0, "the leader's question")
        before = node_of(cluster, relay)["microbatches"]
        cluster.wait_for_iteration(leader.iteration + 10)
        assert node_of(cluster, relay)["microbatches"] == before
        # It is as far as the others: it commits what it takes no part in.
        cluster.wait_for_iteration(leader.iteration, node=relay)

        resumed = run_decod("resume", "--state-dir", relay.state_dir)
        assert resumed.returncode == 0, resumed
        cluster.wait_for(lambda: node_of(cluster, relay)["microbatches"] != before, "its work")

        start_s = time.monotonic()
        drained = run_decod("drain", "--state-dir", relay.state_dir)
        print(f"left after {time.monotonic() - start_s:.1f} s")
        assert (drained.returncode, drained.stdout[:12]) == (0, "left the run"), drained
        assert relay.wait(timeout_s=10.0) == 0
        cluster.wait_for_iteration(leader.iteration + 3)
        assert not node_of(cluster, relay)
        assert not leader.events("member.lost")

        # The last node of a stage waits for a successor, but not for ever.
        hurried = run_decod("drain", "--timeout", "2s", "--state-dir", alone.state_dir)
        assert_all_are_told(hurried, leader)
        assert alone.wait(timeout_s=10.0) == 0
        # Nobody else can be spared: the run waits for a host, which takes over what others keep.
        cluster.wait_for(lambda: "waits for a host" in leader.status()["message"], "its word")
        cluster.start_relay("relay-2-1", "--stage", "2")
        cluster.wait_for(lambda: leader.events("stage.rebuilt"), "its successor's first work")
        leader.send(signal.SIGTERM)
        assert leader.wait() == 0
        found = leader.losses()
        expected, _ = reference(cluster.run, corpus, len(found))
        assert loss_error(found, expected) < 1e-8


@pytest.mark.slow
def test_a_second_signal_ends_a_node_that_waits_for_a_successor(
    tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        (relay, _) = cluster.start_relays(1)
        cluster.wait_for_iteration(2)
        relay.send(signal.SIGTERM)
        cluster.wait_for(lambda: relay.events("successor.awaited"), "that it waits")
        told = "the last member of stage 1 is leaving"
        cluster.wait_for(lambda: told in leader.status()["message"], "its word")
        cluster.wait_for_iteration(leader.iteration + 2)
        assert "another host must join there" in leader.status()["message"], "it is told all along"
        assert "is the last member of stage 1: it waits until" in relay.stdout
        assert "waiting for another member of stage 1: 60 s left" in relay.stdout
        assert relay.send_until_it_ends(signal.SIGTERM, timeout_s=5.0) == 130
        assert "stopped at once" in relay.stdout


@pytest.mark.slow
def test_a_pause_that_frees_the_device_ends_the_compute_process_and_loses_nothing(
    tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        relays = [cluster.start_relay(f"relay-1-{k}", "--stage", "1") for k in range(2)]
        alone = cluster.start_relay("relay-2-0", "--stage", "2")
        relay = relays[1]
        for each in relays:
            cluster.wait_for(
                lambda r=each: node_of(cluster, r).get("microbatches"), "its first work"
            )

        def freed() -> bool:
            relay.refuse_death()
            status = relay.try_status()
            return status is not None and bool(status["node"]["device_free"])

        refused = run_decod("pause", "--free-device", "--state-dir", alone.state_dir)
        assert_refused(refused, exit_code=5, holds=["E-REJ-007", "stage 2 would stop"])
        asked = run_decod("pause", "--free-device", "--state-dir", relay.state_dir)
        assert asked.returncode == 0, asked
        cluster.wait_for(freed, "its device to be free")
        assert relay.compute_pid() is None
        left = relay.iteration
        cluster.wait_for_iteration(left + 5)
        status = relay.status()
        assert (status["state"], status["node"]["capacity"]) == ("paused", 0)
        assert status["iteration"] >= left + 4, "the leader tells how the run goes"
        again = run_decod("pause", "--state-dir", relay.state_dir)
        assert "the device is free" in again.stdout, again
        exported = run_decod("export", tmp_path / "model", "--state-dir", relay.state_dir)
        assert_refused(exported, exit_code=3, holds=["E-RUN-008", "decod resume"])

        resumed = run_decod("resume", "--state-dir", relay.state_dir)
        assert resumed.returncode == 0, resumed
        cluster.wait_for(lambda: node_of(cluster, relay).get("microbatches"), "its work")
        assert relay.compute_pid() is not None
        assert not leader.events("member.lost")
        assert not leader.events("iteration.aborted")

        run_decod("pause", "--free-device", "--state-dir", relay.state_dir)
        cluster.wait_for(freed, "its device to be free again")
        relay.send(signal.SIGTERM)
        assert relay.wait(timeout_s=10.0) == 0
        leader.send(signal.SIGTERM)
        assert leader.wait() == 0
        found = leader.losses()
        expected, _ = reference(cluster.run, corpus, len(found))
        assert loss_error(found, expected) < 1e-8
        assert relay.losses().items() <= found.items()
