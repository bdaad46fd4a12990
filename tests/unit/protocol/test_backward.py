"""A backward server: outputs go on, and each backward pass is in one worker's sum."""

import pytest

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.server_messages import (
    Holding,
    Leg,
    Missing,
    Offer,
    Revoke,
    Settled,
    Taken,
    Unable,
)
from decod.protocol.strategy.servers.backward import BackwardServer
from decod.protocol.strategy.step import weight_of
from tests.unit.protocol.cast import (
    B1A,
    B1B,
    C1A,
    C1B,
    D0,
    F1A,
    F1B,
    F2A,
    ITERATION,
    configured,
    freed,
    mb,
    notes_of,
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
        self.server = BackwardServer(self.context, self.courier, self.kept)
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


def taken(maker: NodeId, version: int = 1) -> Taken:
    return Taken(ITERATION, version, M, maker)


def missing(version: int = 1, microbatch: MicrobatchId = M) -> Missing:
    return Missing(ITERATION, version, microbatch)


def task(
    worker: NodeId, attempt: int = 1, microbatch: MicrobatchId = M, version: int = 1
) -> list[tuple[NodeId, Message]]:
    """Return what is sent when a worker is given a backward pass."""
    return [(worker, gradient(microbatch, Leg.TASK, version, attempt))]


def settled(effects: list[Effect]) -> list[tuple[int, int]]:
    """Return what workers are told to be in their sums."""
    told = [m for _, m in sent(effects) if isinstance(m, Settled)]
    assert len({*told}) <= 1, "all hear the same"
    return [(m.num_microbatches, m.digest) for m in told[:1]]


def said(*microbatches: MicrobatchId) -> list[tuple[int, int]]:
    weight = weight_of(list(microbatches))
    return [(weight.num, weight.digest)]


# --- forward --------------------------------------------------------------------------------------


def test_an_output_goes_to_the_stage_behind_and_its_frontal_server_hears_of_it() -> None:
    bench = BackwardBench()
    assert sent(bench.made()) == [(F2A, activation(M, Leg.ONWARD)), (F1A, taken(C1A))]


def test_an_output_of_a_worker_that_is_not_known_to_have_been_given_it_waits() -> None:
    """As a rule the word that it was is on its way. Of a lost frontal server it is not."""
    bench = BackwardBench()
    assert sent(bench.make()) == []
    assert sent(bench.give()) == [(F2A, activation(M, Leg.ONWARD)), (F1A, taken(C1A))]


@pytest.mark.parametrize(
    ("lost", "notes"), [((), ["result.refused"]), (("f1b",), []), (("b1b",), [])]
)
def test_an_output_that_nobody_asked_for_is_named_in_the_end(
    lost: tuple[str, ...], notes: list[str]
) -> None:
    bench = BackwardBench()
    bench.make()
    bench.server.mend(bench.lose(*lost))
    assert notes_of(bench.server.reset()) == notes
    assert bench.num_held == 0


def test_of_two_outputs_that_wait_the_later_is_kept() -> None:
    bench = BackwardBench()
    bench.make()
    assert len(freed(bench.make())) == 1
    assert bench.num_held == 1


def test_the_first_output_counts_and_the_makers_of_others_hear_so() -> None:
    bench = BackwardBench()
    bench.give(C1B)
    assert sent(bench.made(C1A))[1:] == [(F1A, taken(C1A)), (C1B, taken(C1A))]
    late = bench.make(C1B)
    assert (sent(late), len(freed(late))) == ([(F1A, taken(C1A)), (C1B, taken(C1A))], 1)


def test_an_output_that_its_maker_sends_twice_goes_on_once() -> None:
    bench = BackwardBench()
    bench.made()
    again = bench.make()
    assert (sent(again), len(freed(again))) == ([], 1)


def test_an_output_that_is_not_kept_goes_on_as_well() -> None:
    bench = BackwardBench()
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    assert sent(bench.made())[0] == (F2A, activation(M, Leg.ONWARD))


def test_the_stage_behind_gets_an_output_again_that_it_lacks() -> None:
    bench = BackwardBench()
    bench.made()
    assert sent(bench.server.fetched(M)) == [(F2A, activation(M, Leg.ONWARD))]


def test_an_output_that_the_stage_behind_lacks_and_was_not_kept_is_made_again() -> None:
    bench = BackwardBench()
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.made(C1A)
    assert sent(bench.server.fetched(M)) == [(F1A, missing())]
    told = [(F1A, taken(C1B)), (C1A, taken(C1B))]
    assert sent(bench.made(C1B)) == [(F2A, activation(M, Leg.ONWARD)), *told]


# --- giving backward passes -----------------------------------------------------------------------


def test_a_gradient_goes_to_the_worker_that_made_the_output() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.offer(C1B, 0.1)
    assert sent(bench.assigned(C1A)) == task(C1A)
    assert bench.server.awaited == {C1A}


def test_a_gradient_that_comes_twice_is_given_out_once() -> None:
    bench = BackwardBench(C1A)
    bench.assigned()
    again = bench.come_back()
    assert (sent(again), len(freed(again))) == ([], 1)


def test_without_its_maker_a_backward_pass_goes_to_who_would_have_it_done_first() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.offer(C1B, 0.1)
    assert sent(bench.come_back()) == task(C1B)


def test_without_a_worker_a_gradient_waits_for_the_first() -> None:
    bench = BackwardBench()
    bench.come_back()
    assert sent(bench.offer(C1B)) == task(C1B)


def test_a_gradient_for_which_there_is_no_room_has_the_iteration_repeated() -> None:
    bench = BackwardBench(C1A)
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    effects = bench.come_back()
    assert sent(effects) == [(D0, unable("there is no room to keep a gradient"))]
    assert bench.num_held == 0


def test_a_gradient_of_a_share_that_nobody_reads_is_told_to_nobody() -> None:
    bench = BackwardBench(C1A)
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    assert sent(bench.come_back(mb(0, data_node_index=7))) == []


# --- each in one sum ------------------------------------------------------------------------------


def test_what_a_worker_has_is_given_to_no_other() -> None:
    bench = BackwardBench(C1A)
    bench.assigned()
    assert sent(bench.offer(C1B)) == []


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


def test_what_is_not_late_yet_is_not_asked_for() -> None:
    bench = BackwardBench(C1A)
    bench.assigned(microbatch=M)
    due_s = bench.server.deadline_s
    assert due_s is not None
    bench.context.now_s = 5.0
    bench.assigned(microbatch=N)
    effects = bench.server.overdue(due_s)
    assert sent(effects) == [(C1A, Revoke(ITERATION, 1, M, 1))]
    assert bench.server.deadline_s == due_s + 5.0


def test_what_is_folded_in_is_not_late() -> None:
    bench = BackwardBench(C1A)
    bench.assigned()
    bench.fold()
    due_s = bench.server.deadline_s
    assert due_s is not None
    assert bench.server.overdue(due_s) == []
    assert bench.server.deadline_s is None


def test_what_a_worker_gives_up_goes_to_another() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned(C1A)
    effects = bench.decline(C1A)
    assert notes_of(effects) == ["task.given_up"]
    assert sent(effects) == task(C1B, attempt=2)


def test_what_the_only_worker_gives_up_it_gets_again() -> None:
    bench = BackwardBench(C1A)
    bench.assigned(C1A)
    assert sent(bench.decline(C1A)) == task(C1A, attempt=2)


def test_what_all_have_given_up_begins_again_with_all() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned(C1A)
    bench.decline(C1A)
    assert len(sent(bench.decline(C1B, attempt=2))) == 1


@pytest.mark.parametrize(("worker", "attempt"), [(C1B, 1), (C1A, 2), (C1A, 0)])
def test_a_refusal_of_another_worker_or_attempt_counts_nothing(
    worker: NodeId, attempt: int
) -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned(C1A)
    assert bench.decline(worker, attempt) == []
    assert bench.server.awaited == {C1A}


def test_a_refusal_of_what_is_folded_in_counts_nothing() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned(C1A)
    bench.fold(C1A)
    assert bench.decline(C1A) == []


def test_a_refusal_of_one_that_did_not_make_the_output_leaves_its_maker_known() -> None:
    """The maker was not there when the gradient came; it gets the pass when the other can't."""
    bench = BackwardBench(C1B)
    bench.assigned(C1A)
    bench.offer(C1A)
    assert sent(bench.decline(C1B)) == task(C1A, attempt=2)


def test_a_pass_that_did_not_arrive_is_revoked_first_since_it_may_have_arrived() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned(C1A)
    effects = bench.server.undelivered(C1A, M)
    assert sent(effects) == [(C1A, Revoke(ITERATION, 1, M, 1))]


def test_a_pass_that_did_not_arrive_at_one_that_has_it_no_more_is_forgotten() -> None:
    bench = BackwardBench(C1A, C1B)
    assert bench.server.undelivered(C1A, M) == []
    bench.assigned(C1A)
    assert bench.server.undelivered(C1B, M) == []
    bench.fold(C1A)
    assert bench.server.undelivered(C1A, M) == []


def test_only_who_has_a_pass_can_fold_it_in() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned(C1A)
    bench.fold(C1B)
    assert bench.server.work() == {}
    bench.fold(C1A)
    bench.fold(C1A)
    assert bench.server.work() == {C1A: 1}
    assert bench.server.awaited == set()


def test_an_idle_worker_has_what_another_has_not_begun_revoked_once() -> None:
    bench = BackwardBench()
    bench.offer(C1A, 30.0)
    bench.assigned(C1A)
    idle = Offer(ITERATION, 1, 4, 1.0, idle=True)
    assert sent(bench.server.offered(C1B, idle)) == [(C1A, Revoke(ITERATION, 1, M, 1))]
    assert sent(bench.server.offered(C1B, idle)) == []


def test_an_idle_worker_leaves_another_what_that_would_have_done_before() -> None:
    bench = BackwardBench(C1A)
    bench.assigned(C1A)
    idle = Offer(ITERATION, 1, 4, 30.0, idle=True)
    assert sent(bench.server.offered(C1B, idle)) == []


# --- the end of the batch -------------------------------------------------------------------------


def test_all_workers_hear_what_is_folded_in_once_nothing_is_left() -> None:
    bench = BackwardBench(C1A)
    bench.assigned(microbatch=M)
    bench.assigned(microbatch=N)
    bench.fold(microbatch=M)
    assert bench.server.begun() == [], "one is left"
    effects = bench.fold(microbatch=N)
    assert settled(effects) == said(M, N)
    assert [to for to, _ in sent(effects)] == [B1A, B1B, F1A, F1B, C1A, C1B]


def test_before_the_batch_is_home_nobody_hears_that_nothing_is_left() -> None:
    bench = BackwardBench(C1A)
    bench.assigned()
    assert bench.fold() == []
    assert settled(bench.server.begun()) == said(M)


def test_workers_hear_it_once() -> None:
    bench = BackwardBench(C1A)
    bench.assigned()
    bench.fold()
    bench.server.begun()
    assert bench.server.begun() == []


def test_a_server_that_had_nothing_says_so() -> None:
    assert settled(BackwardBench().server.begun()) == said()


def test_a_gradient_that_comes_later_is_told_later() -> None:
    """It is sent again to the place of a lost server, and the word of the batch is faster."""
    bench = BackwardBench(C1A)
    assert settled(bench.server.begun()) == said()
    bench.come_back()
    assert settled(bench.fold()) == said(M)


# --- a lost worker --------------------------------------------------------------------------------


def test_what_is_lost_with_a_worker_is_given_to_another() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned(C1A, M)
    bench.assigned(C1A, N)
    bench.fold(C1A, M)
    effects = bench.server.mend(bench.lose("c1a"))
    both = [*task(C1B, 2, M, 2), *task(C1B, 2, N, 2)]
    assert sent(effects) == both, "what was in its sum too"
    assert bench.server.work() == {}


def test_what_is_lost_with_a_worker_is_given_to_one_that_had_given_it_up() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned(C1A)
    assert sent(bench.decline(C1A)) == task(C1B, attempt=2)
    assert sent(bench.server.mend(bench.lose("c1b"))) == task(C1A, 3, M, 2)


def test_what_is_in_the_sum_of_a_living_worker_stays_there() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned(C1A)
    bench.fold(C1A)
    assert sent(bench.server.mend(bench.lose("c1b"))) == []
    assert bench.server.work() == {C1A: 1}


def test_after_a_loss_workers_hear_again_that_nothing_is_left() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.assigned(C1A)
    bench.fold(C1A)
    bench.server.begun()
    bench.server.mend(bench.lose("c1b"))
    assert settled(bench.server.begun()) == said(M)


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


def test_an_output_that_is_needed_again_and_was_not_kept_is_made_again() -> None:
    bench = BackwardBench(C1A)
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.made()
    effects = bench.server.mend(bench.lose("f2a"))
    assert sent(effects) == [(F1A, missing(2))]


def test_the_place_of_a_lost_frontal_server_hears_what_is_still_missing() -> None:
    bench = BackwardBench()
    bench.server.fetched(M)
    assert sent(bench.server.mend(bench.lose("f1a"))) == [(F1B, missing(2))]


def test_an_output_that_was_not_made_yet_is_not_needed_again() -> None:
    bench = BackwardBench(C1A)
    bench.give()
    assert sent(bench.server.mend(bench.lose("f2a"))) == []


def test_the_place_of_a_lost_frontal_server_hears_what_is_done() -> None:
    bench = BackwardBench(C1A)
    bench.made(C1A, M)
    bench.give(C1A, N)
    effects = bench.server.mend(bench.lose("f1a"))
    assert sent(effects) == [(F1B, taken(C1A, 2))]


def test_the_place_of_a_lost_backward_server_waits_for_the_word_of_all_workers() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.inherit(*EVERYBODY[:-1])
    assert bench.server.awaited == {C1B}
    assert sent(bench.come_back(LOST)) == [], "c1b may have it in its sum"
    assert sent(bench.hear(C1B)) == task(C1A, 1, LOST, 2)


def test_what_a_worker_has_folded_in_is_not_given_again() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.inherit(*EVERYBODY[:-1])
    bench.server.begun()
    bench.come_back(LOST)
    effects = bench.hear(C1B, folded=(LOST,))
    assert settled(effects) == said(LOST)
    assert bench.server.work() == {C1B: 1}


def test_what_a_worker_will_fold_in_is_waited_for() -> None:
    bench = BackwardBench(C1A, C1B)
    bench.inherit(*EVERYBODY[:-1])
    bench.server.begun()
    bench.come_back(LOST)
    assert sent(bench.hear(C1B, folding=(LOST,))) == []
    assert settled(bench.fold(C1B, LOST)) == said(LOST)


def test_an_output_of_whoever_holds_the_gradient_is_told_to_the_frontal_server() -> None:
    """That counts on the worker, too, if it has had the output made again."""
    bench = BackwardBench(C1A, C1B)
    bench.inherit(*EVERYBODY[:-1])
    bench.hear(C1B, folding=(LOST,))
    told = {type(message) for _, message in sent(bench.made(C1B, LOST))}
    assert Taken in told


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


def test_nobody_hears_that_nothing_is_left_before_all_have_said_what_they_have() -> None:
    bench = BackwardBench(C1A)
    bench.inherit(*EVERYBODY[:-1])
    assert bench.server.begun() == []
    assert settled(bench.hear(C1B)) == said()


def test_an_output_that_a_lost_server_had_may_come_from_who_says_it_has_made_it() -> None:
    bench = BackwardBench(C1A)
    bench.inherit()
    assert sent(bench.make(C1A, LOST)) == []
    effects = bench.hear(C1A, made=(LOST,))
    assert [to for to, _ in sent(effects)] == [F2A, F1B]


def test_the_last_server_of_a_stage_takes_both_kinds_of_places() -> None:
    bench = BackwardBench(C1A, node=F1A)
    bench.server.mend(bench.lose("f1b", "b1a", "b1b"))
    for worker in (F1A, C1A, C1B):
        bench.hear(worker)
    assert sent(bench.come_back()) == task(C1A, 1, M, 2)


def test_with_the_iteration_all_is_let_go_of() -> None:
    bench = BackwardBench(C1A)
    bench.make(C1B, N)
    bench.assigned()
    bench.server.reset()
    assert bench.num_held == 2, "an output and a gradient on their way"
    assert (bench.server.outputs, bench.server.awaited, bench.room.used_bytes) == ({}, set(), 0)
    assert bench.server.deadline_s is None
