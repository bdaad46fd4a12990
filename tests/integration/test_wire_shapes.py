"""Whatever shape a stranger's messages have, a leader's event loop goes on, and so does the run.

`scripts/fuzz_wire.py` throws everything, many times over; here it is a part of it.
"""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from decod.ids import RunId
from decod.net.net_limits import MIB
from tests.support import ticking
from tests.support.cluster import Cluster
from tests.support.runs import make_run
from tests.support.throwing import sample, throw_all
from tests.support.wire_shapes import REQUESTS, TENSORS, Throw, throws

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

PAUSE_MAX_S = 0.2
"""Processor time of the event loop's thread without a pause: others' load does not count. It takes
0.02 s; the worst shapes once took 12 s, and 37 s where three came at once."""

NUM_THROWS = 60

ALWAYS = (
    "DeliverRequest: envelopes again and again",
    "envelope: a true Claims",
    "envelope: a true Open",
    "too long a batch",
    "a batch of dear messages",
    "many batches of nothing",
    "many full batches",
    "datagrams: introduction of nobody, 448 bytes",
)
"""The worst that is known."""


@pytest.fixture
def leading(corpus: Path, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as living:
        living.start_leader(program=ticking.PROGRAM)
        living.start_relays(1)
        living.wait_for_iteration(1)
        yield living


def chosen(run_id: RunId) -> Iterator[Throw]:
    rng = random.Random(5)
    yield from (each for each in throws(rng, run_id) if each.name in ALWAYS)
    yield from sample(rng, throws(rng, run_id, size_bytes=MIB), NUM_THROWS)


@pytest.mark.slow
def test_no_shape_of_message_holds_the_event_loop_of_a_leader(leading: Cluster) -> None:
    leader = leading.leader
    status = leader.status()
    host, _, port = status["node"]["address"].rpartition(":")
    run_id = RunId(status["run_id"])

    pauses = partial(ticking.pauses_of, leader.state_dir)
    outcome = throw_all((host, int(port)), run_id, leading.admit("liar"), chosen(run_id), pauses)
    assert outcome.num_throws >= NUM_THROWS
    assert outcome.longest["processor_s"] < PAUSE_MAX_S, (outcome.longest, outcome.worst)
    leading.wait_for_iteration(leader.iteration + 2)
    assert not leader.events("member.lost")
    assert leader.status()["counters"]["peer.dropped"] > 0


def test_what_is_always_thrown_exists() -> None:
    everything = list(throws(random.Random(1), RunId("r" * 26), size_bytes=8192))
    assert set(ALWAYS) <= {each.name for each in everything}
    assert {each.method for each in everything} == {"", TENSORS, *REQUESTS}
