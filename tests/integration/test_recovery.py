"""Relays vanish at every moment of an iteration, and it costs no iteration and nothing learnt.

What a lost relay had done is done again by another, from what its neighbours kept; so the run's
losses and weights equal those of one undisturbed process, and no iteration is repeated.
"""

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support import unhurried
from tests.support.cluster import Cluster, Daemon, stage_nodes
from tests.support.doomed import MOMENTS
from tests.support.quick import first_of
from tests.support.runs import loss_error, make_run, reference, weight_error

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

NUM_ITERATIONS = 12
FREEZE_S = 8.0


def start_doomed(
    cluster: Cluster, name: str, stage: int, *, how: str, moment: str, iteration: int
) -> Daemon:
    program = (sys.executable, "-u", "-m", "tests.support.doomed", how, moment, str(iteration))
    join_string = cluster.join_string(cluster.leader) or ""
    return cluster.start(name, "join", join_string, "--stage", str(stage), program=program)


def check(cluster: Cluster, corpus: Path, model: Path) -> None:
    """All that was learnt is what one process would have learnt."""
    losses, weights = reference(cluster.run, corpus, NUM_ITERATIONS)
    found = cluster.leader.losses()
    assert sorted(found) == list(range(1, NUM_ITERATIONS + 1))
    print(f"losses differ by {loss_error(found, losses):.1e}", end=", ")
    print(f"weights by {weight_error(model, weights):.1e}", end="; ")
    assert loss_error(found, losses) < 1e-8
    assert weight_error(model, weights) < 1e-8


@pytest.mark.parametrize("moment", first_of(sorted(MOMENTS, reverse=True)))
def test_a_relay_that_dies_costs_no_iteration(moment: str, tmp_path: Path, corpus: Path) -> None:
    with Cluster(tmp_path, make_run(num_iterations=NUM_ITERATIONS), corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        for name, stage in (("one", 1), ("two", 1), ("three", 2)):
            cluster.start_relay(name, "--stage", str(stage))
        doomed = start_doomed(cluster, "doomed", 2, how="kill", moment=moment, iteration=5)
        codes = cluster.wait_for_end()
        assert codes.pop(doomed.name) == -signal.SIGKILL
        assert set(codes.values()) == {0}, codes
        check(cluster, corpus, tmp_path / "model")
        assert len(leader.events("member.lost")) == 1
        assert len(leader.events("iteration.mended")) == 1
        assert not leader.events("iteration.aborted")
        durations_s = [event["duration_s"] for event in leader.events("iteration.committed")]
        print(
            f"the longest iteration took {max(durations_s):.1f} s, others {min(durations_s):.1f} s"
        )


def test_relays_of_two_adjacent_stages_vanish_at_once(tmp_path: Path, corpus: Path) -> None:
    with Cluster(tmp_path, make_run(num_iterations=NUM_ITERATIONS), corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        cluster.start_relay("one", "--stage", "1")
        cluster.start_relay("two", "--stage", "2")
        for stage in (1, 2):
            name = f"doomed-{stage}"
            start_doomed(cluster, name, stage, how="kill", moment="in_backward", iteration=5)
        cluster.wait_for_end()
        check(cluster, corpus, tmp_path / "model")
        assert leader.events("iteration.mended")
        assert not leader.events("iteration.aborted")


@pytest.mark.slow
def test_a_relay_that_freezes_is_done_without_and_comes_back(tmp_path: Path, corpus: Path) -> None:
    """Woken after 8 s it finds itself given up, and enters again by itself, as who it was."""
    with Cluster(tmp_path, make_run(), corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        for name, stage in (("one", 1), ("two", 1), ("three", 2)):
            cluster.start_relay(name, "--stage", str(stage))
        frozen = start_doomed(cluster, "frozen", 2, how="stop", moment="in_backward", iteration=5)
        cluster.wait_for(lambda: is_stopped(frozen), "its freeze")
        frozen_s = time.monotonic()
        cluster.wait_for(lambda: told(leader, "frozen"), "the loss in the status")
        print(f"the status tells of it after {time.monotonic() - frozen_s:.1f} s")
        assert any("others do its part again" in text for text in happenings(leader))
        iteration = leader.iteration
        cluster.wait_for(lambda: time.monotonic() > frozen_s + FREEZE_S, "its time in the cold")
        cluster.wait_for_iteration(iteration + 3)
        frozen.send(signal.SIGCONT)
        cluster.wait_for(lambda: state_of(cluster, "frozen") == "training", "its return")
        cluster.wait_for_iteration(leader.iteration + 2)
        leader.send(signal.SIGTERM)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        assert not leader.events("iteration.aborted")
        losses, _ = reference(cluster.run, corpus, len(leader.losses()))
        assert loss_error(leader.losses(), losses) < 1e-8


def happenings(leader: Daemon) -> list[str]:
    return [one["text"] for one in leader.status()["recent"]]


def told(leader: Daemon, name: str) -> bool:
    return any(f"{name} (" in text and "is gone" in text for text in happenings(leader))


def is_stopped(daemon: Daemon) -> bool:
    state = Path(f"/proc/{daemon.process.pid}/stat").read_text(encoding="ascii")
    return state.rpartition(")")[2].split()[0] == "T"


def state_of(cluster: Cluster, name: str) -> str:
    found = [node for node in stage_nodes(cluster.leader.status()) if node["name"] == name]
    return str(found[0]["state"]) if found else ""
