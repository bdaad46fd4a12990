"""States of stages between real processes: the others put right a member whose memory errs."""

import itertools
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support import unhurried
from tests.support.cluster import Cluster
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

NUM_ITERATIONS = 12
FLIP_AFTER = 5


def test_a_flipped_bit_is_found_named_and_healed(tmp_path: Path, corpus: Path) -> None:
    """What it had computed with wrong weights is forgotten: losses are those of one process."""
    # All of them: one that is late to enter would find so short a run over.
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=3)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        program = (sys.executable, "-u", "-m", "tests.support.flipped", str(FLIP_AFTER))
        join_string = cluster.join_string(leader) or ""
        victim = cluster.start("victim", "join", join_string, "--stage", "1", program=program)
        for name, stage in [
            ("one", 1),
            ("two", 1),
            *((name, 2) for name in ("three", "four", "five")),
        ]:
            cluster.start_relay(name, "--stage", str(stage))
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        (differed,) = victim.events("state.differs")
        assert differed["iteration"] == FLIP_AFTER
        (fetched,) = victim.events("state.fetched")
        assert fetched["num_bytes"] - fetched["num_local"] < fetched["num_bytes"] / 4
        print(f"{fetched['num_bytes'] - fetched['num_local']} of {fetched['num_bytes']} bytes")
        assert len(leader.events("iteration.aborted")) == 1
        losses, _ = reference(cluster.run, corpus, NUM_ITERATIONS)
        assert loss_error(leader.losses(), losses) < 1e-8


DONOR_BYTES_PER_S = 60_000


@pytest.mark.slow
def test_nobody_waits_while_a_newcomer_loads(tmp_path: Path, corpus: Path) -> None:
    """One relay serves stage 1 alone, and gives its state slowly; another comes and takes part.

    The newcomer steps through what was trained meanwhile: its parameters are the donor's, to the
    last bit.
    """
    run = make_run(min_nodes_per_stage=1)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader(program=unhurried.PROGRAM)
        join_string = cluster.join_string(leader) or ""
        slow = (sys.executable, "-u", "-m", "tests.support.slow_donor", str(DONOR_BYTES_PER_S))
        donor = cluster.start("donor", "join", join_string, "--stage", "1", program=slow)
        cluster.start_relay("other", "--stage", "2")
        cluster.wait_for_iteration(3)
        newcomer = cluster.start_relay("newcomer", "--stage", "1")
        cluster.wait_for(lambda: newcomer.iteration, "the newcomer to take part", timeout_s=90.0)
        cluster.wait_for_iteration(leader.iteration + 5)
        leader.send(signal.SIGTERM)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        (fetched,) = newcomer.events("state.fetched")
        assert not newcomer.events("replay.failed")
        end_s, begin_s = at_s(fetched), at_s(fetched) - fetched["duration_s"]
        commits_s = [at_s(commit) for commit in leader.events("step.committed")]
        while_s = [commit_s for commit_s in commits_s if begin_s < commit_s < end_s]
        longest_s = max(b - a for a, b in itertools.pairwise(while_s))
        entered_s = at_s(newcomer.events("iteration.opened")[0]) - end_s
        print(f"{len(while_s)} iterations in {fetched['duration_s']} s of loading,", end=" ")
        print(f"the longest took {longest_s:.2f} s; entered {entered_s:.2f} s later")
        assert fetched["duration_s"] > 5.0
        assert len(while_s) >= 4
        assert longest_s < fetched["duration_s"] / 2
        assert not leader.events("iteration.aborted")
        voted, taken = (
            {
                v["iteration"]: v["parameter_hash"]
                for v in node.events("step.committed")
                if "stage" in v
            }
            for node in (donor, newcomer)
        )
        assert len(taken) >= 3
        assert taken.items() <= voted.items()


def at_s(record: dict[str, Any]) -> float:
    """Return when a record was logged. All are of one host."""
    return datetime.fromisoformat(record["time"]).timestamp()
