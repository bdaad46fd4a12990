"""Both relays of a stage are killed at once, and the run goes on by itself.

A relay of the other stage takes the lost one over. Where its state is kept on other hosts, all go
back to the last such iteration, and learn what one undisturbed process would have learnt.
"""

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster import DECOD, Cluster, Daemon
from tests.support.runs import loss_error, make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NUM_ITERATIONS = 16
KILLED_IN = 13
EVERY = 5


def start(folder: Path, corpus: Path, *, every: int) -> Cluster:
    run = make_run(num_iterations=NUM_ITERATIONS)
    protocol = replace(run.protocol, snapshot_every_iterations=every)
    return Cluster(folder, replace(run, protocol=protocol), corpus)


ALTERING = (sys.executable, "-u", "-m", "tests.support.altered", str(2 * EVERY))
"""A host whose disk alters what it keeps from an iteration on."""


def lose_stage(
    cluster: Cluster, moment: str, *, leads: Sequence[str] = DECOD, runs: Sequence[str] = DECOD
) -> Daemon:
    """Start all nodes of a run, two of which die in the same iteration; wait for its end."""
    leader = cluster.start_leader("--export", cluster.folder / "model", program=leads)
    join_string = cluster.join_string(leader) or ""
    for name in ("one", "two"):
        cluster.start(name, "join", join_string, "--stage", "1", program=runs)
    program = (sys.executable, "-u", "-m", "tests.support.doomed", "kill", moment, str(KILLED_IN))
    for name in ("doomed-1", "doomed-2"):
        cluster.start(name, "join", join_string, "--stage", "2", program=program)
    codes = cluster.wait_for_end(timeout_s=280.0)
    assert {codes.pop(name) for name in ("doomed-1", "doomed-2")} == {-signal.SIGKILL}
    assert set(codes.values()) == {0}, codes
    return leader


def check(cluster: Cluster, leader: Daemon, corpus: Path) -> None:
    """All that was learnt, the first time and again, is what one process would have learnt."""
    losses, weights = reference(cluster.run, corpus, NUM_ITERATIONS)
    assert sorted(leader.losses()) == list(range(1, NUM_ITERATIONS + 1))
    first_time = {c.iteration: c.loss for c in reversed(leader.commits())}
    error = max(loss_error(found, losses) for found in (first_time, leader.losses()))
    model_error = weight_error(cluster.folder / "model", weights)
    print(f"losses differ by {error:.1e}, weights by {model_error:.1e}", end="; ")
    assert max(error, model_error) < 1e-8


def rebuilt(leader: Daemon, source: str) -> int:
    """Return how many iterations were repeated."""
    (lost,) = leader.events("stage.lost")
    (event,) = leader.events("stage.rebuilt")
    assert (lost["stage"], event["source"]) == (2, source), event
    print(f"{event['num_repeated']} iterations repeated, {event['duration_s']:.1f} s", end="; ")
    return int(event["num_repeated"])


@pytest.mark.parametrize(
    "moment", ["before_forward", pytest.param("at_aggregation", marks=pytest.mark.slow)]
)
def test_a_lost_stage_is_rebuilt_from_what_other_hosts_keep(
    moment: str, tmp_path: Path, corpus: Path
) -> None:
    """A loss at the aggregation is rebuilt from the neighbours below; so from disks with `slow`."""
    with start(tmp_path, corpus, every=EVERY) as cluster:
        leader = lose_stage(cluster, moment)
        assert rebuilt(leader, "kept") in (KILLED_IN - 1 - 2 * EVERY, KILLED_IN - 1 - EVERY)
        check(cluster, leader, corpus)


@pytest.mark.slow
def test_where_all_copies_of_the_newest_states_were_altered_those_before_serve(
    tmp_path: Path, corpus: Path
) -> None:
    """Each host reads its own before anybody goes back to them: nobody leaves, and all are told."""
    with start(tmp_path, corpus, every=EVERY) as cluster:
        leader = lose_stage(cluster, "before_forward", leads=ALTERING, runs=ALTERING)
        assert rebuilt(leader, "kept") == KILLED_IN - 1 - EVERY
        for node in cluster.daemons[:3]:
            assert 2 * EVERY in {event["iteration"] for event in node.events("state.damaged")}
            (back,) = node.events("run.returned")
            assert f"after iteration {2 * EVERY} is left" in back["reason"]
        check(cluster, leader, corpus)


@pytest.mark.slow
def test_without_kept_states_the_leaders_checkpoint_serves(tmp_path: Path, corpus: Path) -> None:
    """The newest, 10, has been altered on the disk: nobody goes back to that."""
    with start(tmp_path, corpus, every=0) as cluster:
        text = cluster.run_file.read_text(encoding="utf-8")
        cluster.run_file.write_text(
            text.replace("every_iterations = 100", f"every_iterations = {EVERY}"), encoding="utf-8"
        )
        leader = lose_stage(cluster, "before_forward", leads=ALTERING)
        assert rebuilt(leader, "checkpoint") == KILLED_IN - 1 - EVERY
        (lost,) = leader.events("stage.lost")
        written = [e for e in leader.events("checkpoint.written") if e["time"] < lost["time"]]
        damaged = {event["iteration"] for event in leader.events("checkpoint.damaged")}
        # It may have been written only after the loss.
        assert {e["iteration"] for e in written} - {EVERY} <= damaged <= {2 * EVERY}
        check(cluster, leader, corpus)


def test_with_nothing_kept_the_neighbours_stand_in_and_that_is_said(
    tmp_path: Path, corpus: Path
) -> None:
    with start(tmp_path, corpus, every=0) as cluster:
        leader = lose_stage(cluster, "at_aggregation")
        assert rebuilt(leader, "neighbours") == 0
        losses = leader.losses()
        assert sorted(losses) == list(range(1, NUM_ITERATIONS + 1))
        before, after = losses[KILLED_IN - 1], losses[NUM_ITERATIONS]
        print(
            f"loss {before:.3f} before, {losses[KILLED_IN]:.3f} with the mix, {after:.3f} at last"
        )
        assert after < losses[1]
