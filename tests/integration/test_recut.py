"""The model is cut anew while it trains: nothing of what is learnt changes, whoever is lost.

The reference trains the same in one process, where nothing is cut.
"""

import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from decod.run.run_config import RunConfig
from tests.support.cluster import DECOD, Cluster, Daemon, assert_refused, run_decod
from tests.support.doomed import OF_RECUT
from tests.support.runs import loss_error, make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NUM_ITERATIONS = 60
FIRST = 5
"""The model is cut anew after this iteration."""


def recut(leader: Daemon, *options: str) -> str:
    found = run_decod("run", "recut", *options, "--state-dir", leader.state_dir)
    assert found.returncode == 0, found
    return found.stdout


def check(cluster: Cluster, leader: Daemon, run: RunConfig, corpus: Path) -> None:
    """Compare all losses and the model with those of one undisturbed process."""
    losses, weights = reference(run, corpus, NUM_ITERATIONS)
    first_time = {c.iteration: c.loss for c in reversed(leader.commits())}
    error = max(loss_error(found, losses) for found in (first_time, leader.losses()))
    model_error = weight_error(cluster.folder / "model", weights)
    print(f"losses differ by {error:.1e}, weights by {model_error:.1e}", end="; ")
    assert max(error, model_error) < 1e-12


def test_a_model_is_cut_anew_while_it_trains(tmp_path: Path, corpus: Path) -> None:
    """Three times; relays keep their processes, and fetch the blocks that are new to them."""
    run = make_run(num_iterations=NUM_ITERATIONS)
    run = replace(run, stages=replace(run.stages, blocks="1, 3"))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        relays = cluster.start_relays(2)
        cluster.wait_for_iteration(FIRST)
        assert "stages of 1, 3 blocks become stages of 3, 1" in recut(leader, "--blocks", "3,1")
        cluster.wait_for(lambda: leader.events("run.recut"), "another cut")
        assert leader.status()["cut"]["blocks"] == [3, 1]
        recut(leader, "--blocks", "4")
        cluster.wait_for(lambda: len(leader.events("run.recut")) == 2, "one stage of four")
        recut(leader, "--blocks", "2,1,1")
        assert set(cluster.wait_for_end().values()) == {0}
        cuts = leader.events("run.recut")
        assert [cut["blocks"] for cut in cuts] == ["3, 1", "4", "2, 1, 1"]
        told = [
            [(event["stage"], event["blocks"]) for event in relay.events("stage.recut")]
            for relay in relays
        ]
        assert sorted(stages[0] for stages in told) == 2 * [(1, "0 to 2")] + 2 * [(2, "3 to 3")]
        assert [stages[1] for stages in told] == 4 * [(1, "0 to 3")]
        assert {stages[2] for stages in told} == {(1, "0 to 1"), (2, "2 to 2"), (3, "3 to 3")}
        assert not leader.events("run.returned"), "nothing is computed again"
        print(", ".join(f"{cut['duration_s']:.2f} s" for cut in cuts), end="; ")
        check(cluster, leader, run, corpus)


@pytest.mark.slow
@pytest.mark.parametrize("moment", OF_RECUT)
def test_a_relay_is_killed_meanwhile(moment: str, tmp_path: Path, corpus: Path) -> None:
    run = make_run(num_iterations=NUM_ITERATIONS)
    program = (sys.executable, "-u", "-m", "tests.support.doomed", "kill", moment, str(FIRST))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        join_string = cluster.join_string(leader) or ""
        for name, stage in (("one", "1"), ("doomed", "1"), ("two", "2"), ("three", "2")):
            runs = program if name == "doomed" else DECOD
            cluster.start(name, "join", join_string, "--stage", stage, program=runs)
        cluster.wait_for_iteration(FIRST)
        recut(leader, "--blocks", "3,1")
        codes = cluster.wait_for_end()
        assert codes.pop("doomed") == -signal.SIGKILL
        assert set(codes.values()) == {0}, codes
        assert leader.events("run.recut") or leader.events("recut.failed")
        check(cluster, leader, run, corpus)


@pytest.mark.slow
def test_a_run_begins_with_fewer_volunteers_than_it_has_stages(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        cluster.start_relay("only", "--stage", "auto")
        cluster.wait_for(lambda: leader.status()["candidates"], "the volunteer")
        assert "stages of 2, 2 blocks become stages of 4" in recut(leader)
        assert set(cluster.wait_for_end().values()) == {0}
        check(cluster, leader, run, corpus)


@pytest.mark.slow
def test_a_run_is_resumed_with_fewer_volunteers(tmp_path: Path, corpus: Path) -> None:
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    with Cluster(tmp_path / "before", run, corpus) as before:
        first = before.start_leader()
        before.start_relays(1)
        before.wait_for_iteration(FIRST)
        first.end_run()
        assert set(before.wait_for_end().values()) == {0}
        losses = first.losses()
    folder = tmp_path / "after" / "leader" / "state"
    shutil.copytree(first.state_dir / "runs", folder / "runs")
    with Cluster(tmp_path / "after", run, corpus) as after:
        leader = after.start_leader("--resume", "latest", "--export", tmp_path / "after" / "model")
        after.start_relay("only")
        after.wait_for(lambda: leader.status()["candidates"], "the volunteer")
        recut(leader)
        assert set(after.wait_for_end().values()) == {0}
        expected, weights = reference(run, corpus, NUM_ITERATIONS)
        assert loss_error(losses | leader.losses(), expected) < 1e-12
        assert weight_error(tmp_path / "after" / "model", weights) < 1e-12


def test_others_take_the_blocks_of_a_stage_that_is_lost(tmp_path: Path, corpus: Path) -> None:
    """A leader and one volunteer go on with a model that was cut for two volunteers."""
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    run = replace(run, protocol=replace(run.protocol, snapshot_every_iterations=5))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        (_, last) = cluster.start_relays(1)
        cluster.wait_for_iteration(12)
        last.send(signal.SIGKILL)
        cluster.wait_for(lambda: leader.events("stage.waiting"), "the loss")
        assert "`decod run recut` has the others" in leader.status()["message"]
        assert "stages of 2, 2 blocks become stages of 4" in recut(leader)
        codes = cluster.wait_for_end()
        assert codes.pop(last.name) == -signal.SIGKILL
        assert set(codes.values()) == {0}, codes
        (rebuilt,) = leader.events("stage.rebuilt")
        assert (rebuilt["source"], rebuilt["stage"]) == ("kept", "2")
        check(cluster, leader, run, corpus)


def test_what_can_not_be_is_refused(tmp_path: Path, corpus: Path) -> None:
    run = make_run(min_nodes_per_stage=1)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        (relay, _) = cluster.start_relays(1)
        cluster.wait_for_iteration(1)

        def refused(*options: str, of: Daemon = leader) -> object:
            return run_decod("run", "recut", *options, "--state-dir", of.state_dir)

        assert_refused(refused("--blocks", "3,2"), exit_code=3, holds=["E-CFG", "sum is 4"])
        assert_refused(refused("--blocks", "x"), exit_code=3, holds=["E-CFG", "sum is 4"])
        assert_refused(refused(of=relay), exit_code=5, holds=["E-REJ-016", "does not lead"])
        assert "have 2, 2 blocks already" in recut(leader, "--blocks", "2,2")
