"""A backward server: outputs go on, and each backward pass is in one worker's sum."""

import pytest

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages.scopes import Message
from decod.protocol.core.messages.server_messages import (
    Holding,
    Leg,
    Missing,
    Offer,
    Revoke,
    Unable,
)
from decod.protocol.strategy.servers.backward import BackwardServer
from tests.unit.protocol.cast import (
    B1A,
    C1A,
    C1B,
    F1A,
    F1B,
    ITERATION,
    Heard,
    configured,
    freed,
    mb,
    sent,
    settle,
)
from tests.unit.protocol.servers_cast import Bench, activation, gradient, stage

M, N = mb(0), mb(1)
LOST = mb(2)
"""Of b1b."""


class BackwardBench(Bench):
    """b1a, with workers of which each takes a second for a microbatch."""

    def __init__(self, *workers: NodeId, node: NodeId = B1A) -> None:
        super().__init__(node, stage())
        self.server = Heard(BackwardServer(self.context, self.courier, self.kept))
        self.server.open(self.placement)
        for worker in workers:
            self.offer(worker)

    def offer(self, worker: NodeId, pass_s: float = 1.0) -> list[Effect]:
        return self.server.offered(worker, Offer(ITERATION, 1, 4, pass_s))

    def give(self, worker: NodeId = C1A, microbatch: MicrobatchId = M) -> list[Effect]:
        return self.server.given(microbatch, worker)

    def make(self, worker: NodeId = C1A, microbatch: MicrobatchId = M) -> list[Effect]:
        return self.server.made(worker, microbatch, self.new())

    def made(self, worker: NodeId = C1A, microbatch: MicrobatchId = M) -> list[Effect]:
        return self.give(worker, microbatch) + self.make(worker, microbatch)

    def come_back(self, microbatch: MicrobatchId = M) -> list[Effect]:
        return self.server.gradient(microbatch, self.new())

    def assigned(self, worker: NodeId = C1A, microbatch: MicrobatchId = M) -> list[Effect]:
        """Have a worker make the output and be given the gradient."""
        self.made(worker, microbatch)
        return self.come_back(microbatch)

    def fold(self, worker: NodeId = C1A, microbatch: MicrobatchId = M) -> list[Effect]:
        return self.server.folded(worker, microbatch)

    def decline(self, worker: NodeId = C1A, attempt: int = 1) -> list[Effect]:
        return self.server.unable(worker, unable("it was asked to give it up", attempt=attempt))

    def hear(self, worker: NodeId, **held: tuple[MicrobatchId, ...]) -> list[Effect]:
        """Have a worker say what it has of a lost server's microbatches."""
        what = {"made": (), "folding": (), "folded": ()} | held
        return self.server.stood(worker, Holding(self.context.averaging, **what))

    def inherit(self, *loud: NodeId) -> None:
        """Lose b1b. These have said that they have nothing of it."""
        self.server.mend(self.lose("b1b"))
        for worker in loud:
            self.hear(worker)


EVERYBODY = (F1A, F1B, B1A, C1A, C1B)
"""Who has to say what it has of b1b's."""


def unable(reason: str, version: int = 1, attempt: int = 0) -> Unable:
    return Unable(ITERATION, version, M, reason, attempt)


def missing(version: int = 1, microbatch: MicrobatchId = M) -> Missing:
    return Missing(ITERATION, version, microbatch)


def task(
    worker: NodeId, attempt: int = 1, microbatch: MicrobatchId = M, version: int = 1
) -> list[tuple[NodeId, Message]]:
    """Return what is sent when a worker is given a backward pass."""
    return [(worker, gradient(microbatch, Leg.TASK, version, attempt))]


# --- giving backward passes -----------------------------------------------------------------------


def test_without_a_worker_a_gradient_waits_for_the_first() -> None:
    bench = BackwardBench()
    bench.come_back()
    assert sent(bench.offer(C1B)) == task(C1B)


def test_a_gradient_of_a_share_that_nobody_reads_is_told_to_nobody() -> None:
    bench = BackwardBench(C1A)
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    assert sent(bench.come_back(mb(0, data_node_index=7))) == []


# --- each in one sum ------------------------------------------------------------------------------


def test_a_late_worker_is_asked_to_give_up_and_nobody_else_is_given_anything() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned()
    due_s = bench.server.deadline_s
    assert due_s == bench.context.run.protocol.complete_timeout_s
    assert bench.server.overdue(due_s - 1) == []
    effects = bench.server.overdue(due_s)
    assert sent(effects) == [(C1A, Revoke(ITERATION, 1, M, 1))]
    assert bench.server.deadline_s == due_s + bench.context.run.protocol.complete_timeout_s


def test_a_slow_worker_has_as_long_as_it_needs() -> None:
    bench = BackwardBench()
    bench.offer(C1A, 100.0)
    bench.assigned()
    assert bench.server.deadline_s == pytest.approx(400.0, rel=0.01)


def test_a_refusal_of_what_is_folded_in_counts_nothing() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned(C1A)
    bench.fold(C1A)
    assert bench.decline(C1A) == []


def test_a_pass_that_did_not_arrive_at_one_that_has_it_no_more_is_forgotten() -> None:
    bench = BackwardBench(C1A, C1B)
    assert bench.server.undelivered(C1A, M) == []
    bench.assigned(C1A)
    assert bench.server.undelivered(C1B, M) == []
    bench.fold(C1A)
    assert bench.server.undelivered(C1A, M) == []


# --- the end of the batch -------------------------------------------------------------------------


def test_workers_hear_it_once() -> None:
    bench = BackwardBench(C1A)
    bench.assigned()
    bench.fold()
    bench.server.begun()
    assert bench.server.begun() == []


# --- a lost worker --------------------------------------------------------------------------------


def test_an_output_that_waits_is_lost_with_its_maker() -> None:
    bench = BackwardBench(C1B)
    bench.make(C1A)
    bench.make(C1B, N)
    effects = bench.server.mend(bench.lose("c1a"))
    assert (len(freed(effects)), bench.num_held) == (1, 1)
    assert sent(bench.give(C1A)) == []


# --- lost servers ---------------------------------------------------------------------------------


def test_the_place_of_a_lost_frontal_server_behind_gets_the_output_again() -> None:
    bench = BackwardBench(C1A)
    bench.made()
    effects = bench.server.mend(bench.lose("f2a"))
    assert sent(effects) == [(NodeId("b2a"), activation(M, Leg.ONWARD, 2))]


def test_the_place_of_a_lost_frontal_server_hears_what_is_still_missing() -> None:
    bench = BackwardBench()
    bench.server.fetched(M)
    assert sent(bench.server.mend(bench.lose("f1a"))) == [(F1B, missing(2))]


def test_what_a_worker_says_again_does_not_undo_what_it_has_given_back() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.inherit(*EVERYBODY[:-1])
    bench.hear(C1B, folding=(LOST,))
    assert bench.hear(C1B, folded=(LOST,)) == []
    assert bench.server.work() == {}


def test_what_is_folded_in_before_a_worker_says_what_it_has_counts_once() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.inherit(*EVERYBODY[:-1])
    bench.fold(C1B, LOST)
    bench.hear(C1B, folding=(LOST,))
    assert bench.server.work() == {C1B: 1}
