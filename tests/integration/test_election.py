"""A leader that is lost is replaced by the other data node, and training goes on as it should."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from decod.run.run_config import RunConfig
from tests.support import unhurried
from tests.support.cluster import Cluster, Daemon, assert_refused, run_decod
from tests.support.reference import train_reference
from tests.support.runs import Tokens, make_run, microbatches

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def start(tmp_path: Path, run: RunConfig, corpus: Path, *, relays: int) -> Cluster:
    """Returns a cluster of a leader, another data node and so many relays for each stage."""
    cluster = Cluster(tmp_path, run, corpus)
    cluster.start_leader(program=unhurried.PROGRAM)
    cluster.start_data_node("data-1", program=unhurried.PROGRAM)
    cluster.start_relays(relays)
    return cluster


def committed_batches(
    run: RunConfig, corpus: Path, daemon: Daemon, last: int
) -> tuple[list[list[Tokens]], dict[int, float]]:
    """Returns what each iteration was trained on, and its loss, by the log of a member.

    Of a lost data node's share nothing is in an iteration that is repeated without it.
    """
    share = run.batch.num_microbatches * run.batch.microbatch_size * run.batch.sequence_length
    batches, losses = [], {}
    for record in daemon.events("step.committed"):
        iteration = int(str(record["iteration"]).partition(".")[0])
        if iteration > last:
            break
        tokens = microbatches(run, corpus, iteration)
        if record["num_tokens"] == share:
            tokens = tokens[run.batch.num_microbatches :]
        else:
            assert record["num_tokens"] == 2 * share, record
        batches.append(tokens)
        losses[iteration] = record["loss"]
    assert sorted(losses) == list(range(1, last + 1))
    return batches, losses


def assert_begins_no_second_run(cluster: Cluster, leader: Daemon, status: dict[str, Any]) -> None:
    """Types the leader's command again at its host, while the run goes on elsewhere."""
    for resume in ((), ("--resume", "latest")):
        refused = run_decod(
            "leader", cluster.run_file, *resume, "--listen", "127.0.0.1:0", "--no-page",
            "--state-dir", leader.state_dir,
        )  # fmt: skip
        assert_refused(refused, exit_code=3, holds=["E-RUN-013", status["run_id"]])
        assert status["leader"]["address"] in refused.stderr
        assert "join string" not in refused.stdout


def test_a_killed_leader_is_replaced_and_the_run_goes_on(tmp_path: Path, corpus: Path) -> None:
    """The losses are those of one process that trains on the committed microbatches."""
    run = make_run(num_data_nodes=2)
    with start(tmp_path, run, corpus, relays=2) as cluster:
        leader, other = cluster.daemons[:2]
        cluster.wait_for_iteration(4)
        join_string = cluster.join_string(leader) or ""
        leader.send(signal.SIGKILL)
        killed_s = time.monotonic()
        cluster.wait_for(lambda: other.events("leader.elected"), "another leader", timeout_s=20)
        elected_s = time.monotonic() - killed_s
        before = other.iteration
        cluster.wait_for_iteration(before + 1, node=other)
        committed_s = time.monotonic() - killed_s
        print(f"another leader after {elected_s:.2f} s, a commit after {committed_s:.2f} s")
        assert elected_s < 5.0
        cluster.wait_for_iteration(before + 8, node=other)

        status = other.status()
        assert status["leader"]["name"] == "data-1"
        assert (status["leader"]["term"], status["leader"]["electing"]) == (2, False)
        assert cluster.daemons[2].status()["leader"]["name"] == "data-1"

        assert_begins_no_second_run(cluster, leader, status)

        # Whoever has got the new join string finds the run through any of its nodes.
        assert status["join_string"] != join_string
        cluster.start("late", "join", status["join_string"], "--stage", "1")
        cluster.wait_for(cluster.daemons[-1].is_ready, "the late relay", timeout_s=60)

        # A volunteer that was in the run before finds it with the old one, whose address is dead.
        cluster.daemons[3].send(signal.SIGTERM)
        assert cluster.daemons[3].wait(timeout_s=60) == 0
        cluster.daemons[3] = cluster.start("relay-1-1", "join", join_string, "--stage", "1")
        cluster.daemons.pop()
        cluster.wait_for(cluster.daemons[3].is_ready, "the relay that is back", timeout_s=60)

        other.send(signal.SIGTERM)
        codes = {d.name: d.wait(timeout_s=60) for d in cluster.daemons if d is not leader}
        assert set(codes.values()) == {0}, codes
        assert "model of iteration" in other.stdout, "the leader keeps the result"
        last = other.iteration
        batches, losses = committed_batches(run, corpus, other, last)
        expected, _ = train_reference(run.model, run.optimizer, run.seed, batches)
        worst = max(abs(losses[i] / expected[i - 1] - 1) for i in losses)
        print(f"{last} iterations, losses {worst:.1e}")
        assert worst < 1e-8
        for relay in (each for each in cluster.daemons if each.name.startswith("relay")):
            assert relay.losses().items() <= other.losses().items()


@pytest.mark.slow
def test_a_leader_that_stood_still_joins_the_run_of_its_successor(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(num_data_nodes=2, min_nodes_per_stage=1)
    with start(tmp_path, run, corpus, relays=1) as cluster:
        leader, other = cluster.daemons[:2]
        cluster.wait_for_iteration(3)
        leader.send(signal.SIGSTOP)
        stopped_s = time.monotonic()
        cluster.wait_for(lambda: other.events("leader.elected"), "another leader", timeout_s=20)
        elected_s = time.monotonic() - stopped_s
        print(f"another leader after {elected_s:.2f} s")
        assert elected_s < 5.0
        cluster.wait_for_iteration(other.iteration + 2, node=other)
        leader.send(signal.SIGCONT)

        def joined() -> bool:
            leader.refuse_death()
            status = leader.try_status()
            return status is not None and status["leader"]["term"] == 2 and leader.is_ready()

        cluster.wait_for(joined, "the old leader in the run", timeout_s=60)
        assert "leads the run in term 2" in leader.stdout
        both = cluster.wait_for(
            lambda: [r for r in other.events("step.committed") if r["num_tokens"] == 1024][-1:],
            "a commit of both",
        )
        cluster.wait_for(
            lambda: other.events("step.committed")[-1]["num_tokens"] == both[0]["num_tokens"],
            "both to train",
        )
