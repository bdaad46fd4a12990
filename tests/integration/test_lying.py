"""Relays that lie, between real processes: they are named and done without."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from decod.run.protocol_config import AuditConfig
from tests.support import accusing, slowed
from tests.support.cluster import Cluster, Daemon
from tests.support.lying import LIES, MEAN, PASSES
from tests.support.quick import first_of
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

NUM_ITERATIONS, LIES_FROM = 12, 5


@pytest.mark.parametrize("lie", first_of([MEAN, *LIES]))
def test_a_liar_is_named_and_nothing_of_its_lies_is_learnt(
    tmp_path: Path, corpus: Path, lie: str
) -> None:
    """All work is audited here, so the first lie is found before it enters the model."""
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=3)
    run = replace(run, audits=AuditConfig(share=1.0, share_in_probation=1.0))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        program = (sys.executable, "-u", "-m", "tests.support.lying", str(LIES_FROM), lie)
        join_string = cluster.join_string(leader) or ""
        liar = cluster.start("liar", "join", join_string, "--stage", "1", program=program)
        for name, stage in [("one", 1), ("two", 1), ("three", 2), ("four", 2), ("five", 2)]:
            cluster.start_relay(name, "--stage", str(stage))
        leader.wait(timeout_s=90.0)
        (found,) = leader.events("relay.lied")
        assert found["peer"] == liar.membership().node_id
        assert [ban["peer"] for ban in leader.events("member.banned")] == [found["peer"]]
        assert liar.wait(timeout_s=30.0) == 5
        assert "banned" in liar.stderr, liar.stderr
        why = "part of the average" if lie == MEAN else "contribution"
        assert why in liar.stderr, "it is told why"
        losses, _ = reference(cluster.run, corpus, NUM_ITERATIONS)
        assert loss_error(leader.losses(), losses) < 1e-8


@pytest.mark.parametrize(
    ("lie", "num_behind"),
    [
        ("activations-stale", 1),
        *[
            pytest.param(lie, num, marks=pytest.mark.slow)
            for lie in PASSES
            for num in (1, 2)
            if (lie, num) != ("activations-stale", 1)
        ],
    ],
)
def test_a_liar_between_stages_costs_nobody_else_its_place(
    tmp_path: Path, corpus: Path, lie: str, num_behind: int
) -> None:
    """Also if one member alone could say what it was given, and is the last of its stage."""
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    run = replace(run, audits=AuditConfig(share=1.0, share_in_probation=1.0))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        program = (sys.executable, "-u", "-m", "tests.support.lying", str(LIES_FROM), lie)
        join_string = cluster.join_string(leader) or ""
        relays = [cluster.start_relay(name, "--stage", "1") for name in ("one", "two")]
        liar = cluster.start("liar", "join", join_string, "--stage", "1", program=program)
        wait_for_stages(cluster, liar, *relays)
        for index in range(num_behind):
            cluster.start_relay(f"behind-{index}", "--stage", "2")
        leader.wait(timeout_s=150.0)
        liar_id = liar.membership().node_id
        assert {event["peer"] for event in leader.events("relay.lied")} == {liar_id}
        assert {event["peer"] for event in leader.events("member.lost")} <= {liar_id}
        assert not leader.events("member.aside")
        losses, _ = reference(cluster.run, corpus, NUM_ITERATIONS)
        if lie.endswith("nan"):
            # What a data node could not use is read again in the next iteration, with its share.
            commits = leader.events("iteration.committed")
            num_microbatches = sum(commit["num_microbatches"] for commit in commits)
            assert num_microbatches == NUM_ITERATIONS * commits[0]["num_microbatches"]
            assert leader.losses()[NUM_ITERATIONS] == pytest.approx(losses[-1], abs=0.01)
        else:
            assert loss_error(leader.losses(), losses) < 1e-8


def wait_for_stages(cluster: Cluster, *nodes: Daemon) -> None:
    """Wait until nodes have their stages: the run must not begin without them."""
    for node in nodes:
        cluster.wait_for(lambda node=node: node.events("stage.assigned"), f"{node.name}'s stage")


def test_a_sender_of_nan_that_one_relay_alone_has_met_is_banned(
    tmp_path: Path, corpus: Path
) -> None:
    """It shows the leader what it got, and nobody else can have signed that."""
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    run = replace(run, audits=AuditConfig())
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        program = (sys.executable, "-u", "-m", "tests.support.lying", "5", "activations-nan")
        liar = cluster.start_relay("liar", "--stage", "1", program=program)
        one = cluster.start_relay("one", "--stage", "1")
        wait_for_stages(cluster, liar, one)
        cluster.start_relay("behind", "--stage", "2")
        leader.wait(timeout_s=150.0)
        liar_id = liar.membership().node_id
        assert [event["peer"] for event in leader.events("relay.lied")] == [liar_id]
        assert [event["peer"] for event in leader.events("member.banned")] == [liar_id]
        assert {event["peer"] for event in leader.events("member.lost")} <= {liar_id}
        losses, _ = reference(cluster.run, corpus, NUM_ITERATIONS)
        assert loss_error(leader.losses(), losses) < 1e-8


@pytest.mark.parametrize(
    "lie", ["activations-stale", "flipped", "scaled", "stale", "activations", "gradients"]
)
@pytest.mark.slow
def test_between_the_only_two_of_a_stage_the_leader_judges(
    tmp_path: Path, corpus: Path, lie: str
) -> None:
    """It has nothing of the stage before. The honest one goes on alone."""
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=2)
    run = replace(run, audits=AuditConfig(share=1.0, share_in_probation=1.0))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        program = (sys.executable, "-u", "-m", "tests.support.lying", str(LIES_FROM), lie)
        liar = cluster.start_relay("liar", "--stage", "1", program=program)
        for name, stage in [("one", 1), ("two", 2), ("three", 2)]:
            cluster.start_relay(name, "--stage", str(stage))
        leader.wait(timeout_s=150.0)
        liar_id = liar.membership().node_id
        assert [event["peer"] for event in leader.events("relay.lied")] == [liar_id]
        assert {event["peer"] for event in leader.events("member.lost")} <= {liar_id}
        for event in ("member.aside", "audit.disputed"):
            assert not leader.events(event)
        # What it has not sent before it can't send again: then only its contribution is false.
        assert lie == "stale" or not leader.events("audit.unsettled")
        losses, _ = reference(cluster.run, corpus, NUM_ITERATIONS)
        assert loss_error(leader.losses(), losses) < 1e-8


@pytest.mark.slow
def test_of_the_only_two_of_a_stage_both_are_named_if_nobody_can_tell_who_lies(
    tmp_path: Path, corpus: Path
) -> None:
    """One averages falsely. It is said, after the iteration was repeated in vain. Nobody leaves."""
    run = make_run(num_iterations=LIES_FROM + 1, min_nodes_per_stage=2)
    run = replace(run, audits=AuditConfig(share=1.0, share_in_probation=1.0))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        program = (sys.executable, "-u", "-m", "tests.support.lying", str(LIES_FROM), MEAN)
        liar = cluster.start_relay("liar", "--stage", "1", program=program)
        one = cluster.start_relay("one", "--stage", "1")
        for name in ("two", "three"):
            cluster.start_relay(name, "--stage", "2")
        leader.wait(timeout_s=150.0)
        liar_id, honest_id = (node.membership().node_id for node in (liar, one))
        unsettled = leader.events("audit.unsettled")
        assert {event["peer"] for event in unsettled} == {liar_id}
        assert all(f"says {honest_id[:8]}" in event["reason"] for event in unsettled)
        assert len(leader.events("iteration.aborted")) == 3
        assert "used all the same" in unsettled[-1]["reason"]
        for event in ("relay.lied", "member.banned", "member.aside", "member.lost"):
            assert not leader.events(event)


@pytest.mark.slow
def test_a_relay_that_lies_to_auditors_is_banned_and_nobody_else_is(
    tmp_path: Path, corpus: Path
) -> None:
    """It has signed what it gave the relay that it accuses."""
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=3)
    run = replace(run, audits=AuditConfig(share=1.0, share_in_probation=1.0))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        program = (sys.executable, "-u", "-m", "tests.support.misinforming", "")
        liar = cluster.start_relay("liar", "--stage", "1", program=program)
        for name, stage in [("one", 1), ("two", 1), ("three", 2), ("four", 2), ("five", 2)]:
            cluster.start_relay(name, "--stage", str(stage))
        leader.wait(timeout_s=200.0)
        liar_id = liar.membership().node_id
        assert [event["peer"] for event in leader.events("relay.lied")] == [liar_id]
        assert {event["peer"] for event in leader.events("member.lost")} <= {liar_id}
        assert not leader.events("member.aside")
        losses, _ = reference(cluster.run, corpus, NUM_ITERATIONS)
        assert loss_error(leader.losses(), losses) < 1e-8


@pytest.mark.slow
def test_the_only_member_of_a_stage_that_frames_a_relay_is_named_and_nobody_leaves(
    tmp_path: Path, corpus: Path
) -> None:
    """It says falsely, in each iteration, what it gave the same honest relay."""
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    run = replace(run, audits=AuditConfig(share=1.0, share_in_probation=1.0))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        relays = [cluster.start_relay(name, "--stage", "1") for name in ("one", "two", "three")]
        wait_for_stages(cluster, *relays)
        framed = relays[0].membership().node_id
        program = (sys.executable, "-u", "-m", "tests.support.misinforming", framed)
        liar = cluster.start_relay("liar", "--stage", "2", program=program)
        leader.wait(timeout_s=150.0)
        named = [event["peer"] for event in leader.events("audit.disputed")]
        assert len(named) >= 3
        assert {*named} == {liar.membership().node_id}
        for event in ("relay.lied", "member.banned", "member.aside", "member.lost"):
            assert not leader.events(event)
        assert not leader.events("iteration.aborted")
        losses, _ = reference(cluster.run, corpus, NUM_ITERATIONS)
        assert loss_error(leader.losses(), losses) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("num_accused", [1, 2], ids=["one", "two"])
def test_a_false_accuser_is_named_and_gets_nobody_removed(
    tmp_path: Path, corpus: Path, num_accused: int
) -> None:
    """It is alone in its stage. Each iteration lasts longer than the leader's patience."""
    run = make_run(num_iterations=4, min_nodes_per_stage=1)
    run = replace(run, protocol=replace(run.protocol, probe_timeout_s=1.0))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        liar = cluster.start_relay("liar", "--stage", "2", program=accusing.program(stage=1))
        slow = slowed.program("passes", 0.15 * num_accused)
        for index in range(num_accused):
            cluster.start_relay(f"honest-{index}", "--stage", "1", program=slow)
        leader.wait(timeout_s=90.0)
        doubted = {event["peer"] for event in leader.events("member.doubted")}
        assert doubted == {liar.membership().node_id}
        for event in ("member.aside", "member.lost", "iteration.aborted"):
            assert not leader.events(event)
        losses, _ = reference(cluster.run, corpus, 4)
        assert loss_error(leader.losses(), losses) < 1e-8
