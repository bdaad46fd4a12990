"""What a worker does with the forward and backward passes that servers give it."""

import pytest

from decod.protocol.core.effects import Effect
from decod.protocol.core.jobs import Backward, Drop, Embed, Forward
from decod.protocol.core.messages.server_messages import (
    Fetch,
    Folded,
    Leg,
    Offer,
    StageActivation,
    StageGradient,
    Unable,
)
from decod.protocol.strategy.servers.worker import TaskPhase
from tests.unit.protocol.cast import (
    B1A,
    B1B,
    C1A,
    D0,
    F1A,
    F1B,
    ITERATION,
    configured,
    freed,
    jobs_of,
    mb,
    notes_of,
    sent,
    settle,
)
from tests.unit.protocol.servers_cast import activation, gradient, kinds
from tests.unit.protocol.worker_cast import M, N, WorkerBench, refusal

# --- what it offers -------------------------------------------------------------------------------


def test_a_worker_offers_itself_to_all_servers_of_its_stage() -> None:
    """Two frontal servers share what it takes beyond what fits on its device."""
    effects = WorkerBench(capacity=3).worker.offer()
    assert sent(effects) == [(s, Offer(ITERATION, 1, 3, 2.0)) for s in (B1A, B1B, F1A, F1B)]


def test_a_paused_worker_offers_nothing() -> None:
    assert WorkerBench(capacity=0).worker.offer() == []


def test_a_stage_that_has_lost_all_its_servers_is_offered_nothing() -> None:
    bench = WorkerBench()
    bench.lose("f1a", "f1b", "b1a", "b1b")
    assert bench.worker.offer() == []


def offers(effects: list[Effect]) -> list[Offer]:
    """Return what b1a is told of this worker."""
    return [m for to, m in sent(effects) if to == B1A and isinstance(m, Offer)]


def test_a_worker_with_nothing_left_to_do_asks_for_more_once() -> None:
    bench = WorkerBench()
    bench.worker.offer()
    bench.give(M)
    bench.give(N)
    assert offers(bench.end(Forward(M))) == [], "the other is left"
    (offer,) = offers(bench.end(Forward(N)))
    assert offer.idle
    bench.give_back(M)
    assert [offer.idle for offer in offers(bench.end(Backward(M)))] == [], "they know"


def test_a_worker_that_has_got_more_asks_again_when_that_is_done() -> None:
    bench = WorkerBench()
    bench.worker.offer()
    bench.made(M)
    bench.give(N)
    assert [offer.idle for offer in offers(bench.end(Forward(N)))] == [True]


def test_a_worker_that_has_not_offered_itself_asks_for_nothing() -> None:
    assert offers(WorkerBench().made()) == []


# --- forward --------------------------------------------------------------------------------------


def test_an_output_goes_to_the_backward_server_of_its_microbatch() -> None:
    bench = WorkerBench()
    assert jobs_of(bench.give(N)) == [Forward(N)]
    assert sent(bench.end(Forward(N))) == [(B1B, activation(N, Leg.RESULT))]
    assert bench.phase(N) is TaskPhase.MADE


def test_what_does_not_fit_on_the_device_waits() -> None:
    bench = WorkerBench(capacity=1)
    bench.give(M)
    assert jobs_of(bench.give(N)) == []
    assert bench.phase(N) is TaskPhase.QUEUED


def test_an_activation_that_comes_twice_is_computed_once() -> None:
    bench = WorkerBench()
    bench.give()
    again = bench.give()
    assert (jobs_of(again), len(freed(again))) == ([], 1)


def test_a_full_worker_sheds_the_latest_output_for_the_next_forward_pass() -> None:
    bench = WorkerBench(capacity=1)
    bench.made()
    assert jobs_of(bench.give(N)) == [Drop(M), Forward(N)]


def test_nothing_is_shed_while_the_device_is_busy() -> None:
    bench = WorkerBench(capacity=2)
    bench.made(M)
    bench.give(N)
    assert jobs_of(bench.give(mb(1))) == []


def test_what_was_shed_is_computed_again_for_its_backward_pass() -> None:
    bench = WorkerBench(capacity=1)
    bench.made(M)
    bench.give(N)
    assert jobs_of(bench.give_back(M)) == []
    bench.end(Drop(M), num_outputs=0)
    effects = bench.end(Forward(N))
    assert kinds(sent(effects)) == [(B1B, StageActivation)]
    assert jobs_of(effects) == [Drop(N), Forward(M)]
    again = bench.end(Forward(M))
    assert (sent(again), jobs_of(again)) == ([], [Backward(M)]), "its output was sent before"


def test_the_output_of_another_frees_what_waits() -> None:
    bench = WorkerBench(capacity=1)
    bench.give(M)
    bench.give(N)
    effects = bench.taken(N)
    assert len(freed(effects)) == 1
    assert bench.phase(N) is None
    assert jobs_of(bench.end(Forward(M))) == [], "it is not in the queue any more"


def test_the_output_of_another_frees_what_was_made() -> None:
    bench = WorkerBench()
    bench.made()
    assert jobs_of(bench.taken()) == [Drop(M)]
    assert (bench.phase(), bench.num_held) == (None, 1), "the output is on its way"


def test_what_was_made_and_shed_is_not_dropped_again() -> None:
    bench = WorkerBench(capacity=1)
    bench.made(M)
    bench.give(N)
    assert jobs_of(bench.taken(M)) == []


def test_the_output_of_another_makes_the_one_in_hand_superfluous() -> None:
    bench = WorkerBench()
    bench.give()
    assert bench.taken() == []
    effects = bench.end(Forward(M))
    assert (sent(effects), jobs_of(effects)) == ([], [Drop(M)])
    assert bench.phase() is None


def test_a_forward_pass_that_is_given_again_is_wanted_again() -> None:
    bench = WorkerBench()
    bench.give()
    bench.taken()
    bench.give()
    assert kinds(sent(bench.end(Forward(M)))) == [(B1A, StageActivation)]


def test_a_workers_own_output_that_counts_changes_nothing() -> None:
    bench = WorkerBench()
    bench.made()
    assert bench.taken(by=C1A) == []
    assert bench.phase() is TaskPhase.MADE


def test_the_output_of_another_does_not_take_a_backward_pass_away() -> None:
    """The server has given it the gradient: it counts on this worker."""
    bench = WorkerBench()
    bench.give()
    bench.give_back()
    assert bench.taken() == []
    assert jobs_of(bench.end(Forward(M))) == [Backward(M)]
    assert bench.taken() == [], "nor when it has begun"


def test_news_of_what_it_never_had_changes_nothing() -> None:
    assert WorkerBench().taken() == []


# --- backward -------------------------------------------------------------------------------------


def test_a_backward_pass_is_told_to_its_backward_server_and_sent_to_its_frontal_server() -> None:
    bench = WorkerBench()
    effects = bench.folded(N)
    assert sent(effects) == [(B1B, Folded(ITERATION, 1, N)), (F1B, gradient(N, Leg.RESULT))]
    assert bench.worker.folded == [N]


def test_an_output_is_sent_even_if_its_gradient_has_come_with_anothers() -> None:
    """Whoever had the other one may be lost, and the stage behind lack the output."""
    bench = WorkerBench()
    bench.give()
    bench.give_back()
    effects = bench.end(Forward(M))
    assert sent(effects) == [(B1A, activation(M, Leg.RESULT))]
    assert jobs_of(effects) == [Backward(M)]


def test_a_gradient_without_a_forward_pass_has_the_activation_fetched() -> None:
    bench = WorkerBench()
    assert sent(bench.give_back()) == [(F1A, Fetch(ITERATION, 1, M))]
    assert (bench.phase(), bench.worker.awaited) == (TaskPhase.FETCHING, {F1A})
    assert not bench.worker.all_done
    assert jobs_of(bench.give()) == [Forward(M)]
    assert bench.worker.awaited == set()
    again = bench.end(Forward(M))
    assert (sent(again), jobs_of(again)) == ([], [Backward(M)]), "the output is another's"
    assert kinds(sent(bench.end(Backward(M)))) == [(B1A, Folded), (F1A, StageGradient)]
    assert bench.worker.all_done


def test_what_is_fetched_comes_before_forward_passes_that_wait() -> None:
    bench = WorkerBench(capacity=1)
    bench.give(M)
    bench.give(mb(1))
    bench.give_back(N)
    bench.give(N)
    assert jobs_of(bench.end(Forward(M))) == [Drop(M), Forward(N)]


@pytest.mark.parametrize("when", ["fetching", "before", "returning", "folded"])
def test_a_gradient_that_comes_twice_is_folded_in_once(when: str) -> None:
    bench = WorkerBench()
    if when == "fetching":
        bench.give_back()
    elif when == "before":
        bench.give()
        bench.give_back()
    elif when == "returning":
        bench.made()
        bench.give_back()
    else:
        bench.folded()
    again = bench.give_back()
    assert (sent(again), jobs_of(again), len(freed(again))) == ([], [], 1)


def test_with_the_iteration_all_is_let_go_of() -> None:
    bench = WorkerBench()
    bench.folded(mb(1))
    bench.made(M)
    bench.give(N)
    bench.give_back(N)
    bench.give_back(mb(2))
    bench.context.compute.reset()
    bench.worker.reset()
    assert bench.num_held == 4, "two outputs and a gradient that leave, and what the device reads"
    assert (bench.worker.tasks, bench.room.used_bytes) == ({}, 0)


# --- revocation -----------------------------------------------------------------------------------


def test_what_has_not_come_yet_is_given_up_beforehand() -> None:
    bench = WorkerBench()
    assert sent(bench.revoke()) == [(B1A, refusal())]
    late = bench.give_back()
    assert (sent(late), len(freed(late))) == ([], 1), "nobody counts on it any more"


def test_a_later_attempt_counts_again() -> None:
    bench = WorkerBench()
    bench.revoke()
    assert kinds(sent(bench.give_back(attempt=2))) == [(F1A, Fetch)]


def test_an_attempt_of_a_later_view_counts_again() -> None:
    """Whoever takes a lost server's place begins to count anew."""
    bench = WorkerBench()
    bench.revoke(attempt=3)
    assert kinds(sent(bench.give_back(version=2, attempt=1))) == [(F1A, Fetch)]


def test_what_is_being_fetched_is_given_up() -> None:
    bench = WorkerBench()
    bench.give_back()
    effects = bench.revoke()
    assert (sent(effects), len(freed(effects))) == ([(B1A, refusal())], 1)
    assert (bench.phase(), bench.num_held) == (None, 0)


def test_what_waits_for_the_device_is_given_up_and_can_be_given_again() -> None:
    bench, three = WorkerBench(capacity=3), (N, mb(1), M)
    for do in (bench.made, bench.give_back):
        for microbatch in three:
            do(microbatch)
    effects = bench.revoke()
    assert (sent(effects), len(freed(effects))) == ([(B1A, refusal())], 1)
    assert bench.phase() is TaskPhase.MADE
    assert sent(bench.revoke(N)) == [], "the device has it"
    bench.give_back(attempt=2)
    assert [jobs_of(bench.end(Backward(m))) for m in three] == [[Backward(M)], [], []]


def test_what_waits_for_its_forward_pass_is_given_up_and_the_output_still_counts() -> None:
    bench = WorkerBench(capacity=1)
    bench.give(N)
    bench.give(M)
    bench.give_back(M)
    assert sent(bench.revoke()) == [(B1A, refusal())]
    assert bench.phase() is TaskPhase.QUEUED
    bench.end(Forward(N))
    bench.end(Drop(N), num_outputs=0)
    effects = bench.end(Forward(M))
    assert (kinds(sent(effects)), jobs_of(effects)) == ([(B1A, StageActivation)], [])


def test_what_waits_to_be_computed_again_is_given_up() -> None:
    bench = WorkerBench(capacity=1)
    bench.made(M)
    bench.give(N)
    bench.give_back(M)
    assert sent(bench.revoke()) == [(B1A, refusal())]
    assert bench.phase() is TaskPhase.MADE
    assert jobs_of(bench.end(Forward(N))) == [], "and is not computed again"


def test_what_is_being_computed_again_is_given_up() -> None:
    bench = WorkerBench()
    bench.give_back()
    bench.give()
    assert sent(bench.revoke()) == [(B1A, refusal())]
    effects = bench.end(Forward(M))
    assert (sent(effects), jobs_of(effects)) == ([], [Drop(M)])
    assert bench.phase() is None


def test_a_backward_pass_that_is_under_way_is_not_given_up() -> None:
    bench = WorkerBench()
    bench.made()
    bench.give_back()
    assert bench.revoke() == []
    assert kinds(sent(bench.end(Backward(M)))) == [(B1A, Folded), (F1A, StageGradient)]


def test_who_revokes_what_is_folded_in_hears_so() -> None:
    bench = WorkerBench()
    bench.folded()
    assert sent(bench.revoke()) == [(B1A, Folded(ITERATION, 1, M))]


# --- a device that refuses ------------------------------------------------------------------------


def test_a_refused_forward_pass_is_given_to_another() -> None:
    bench = WorkerBench()
    bench.give()
    effects = bench.refuse(Forward(M))
    assert sent(effects) == [(F1A, Unable(ITERATION, 1, M, "a value is nan"))]
    assert "microbatch.refused" in notes_of(effects)
    assert (bench.phase(), bench.num_held) == (None, 0)


def test_after_a_refused_backward_pass_the_iteration_can_not_be_ended() -> None:
    """The sum may hold a part of it."""
    bench = WorkerBench()
    bench.made()
    bench.give_back()
    effects = bench.refuse(Backward(M))
    assert sent(effects) == [(D0, Unable(ITERATION, 1, M, "a value is nan"))]
    assert not bench.worker.all_done


def test_a_refusal_makes_room() -> None:
    bench = WorkerBench(capacity=1)
    bench.give(M)
    bench.give(N)
    assert jobs_of(bench.refuse(Forward(M))) == [Drop(M), Forward(N)][1:]


def test_a_refusal_that_concerns_nobody_is_told_to_nobody() -> None:
    bench = WorkerBench()
    foreign = mb(0, data_node_index=7)
    bench.made(foreign)
    bench.give_back(foreign)
    assert sent(bench.refuse(Backward(foreign))) == []


def test_other_jobs_are_none_of_a_workers() -> None:
    bench = WorkerBench()
    bench.context.compute.submit(Embed(M), bench.worker)
    with pytest.raises(AssertionError, match="no pass"):
        bench.end(Embed(M))


# --- the end of the batch -------------------------------------------------------------------------


def test_when_the_batch_is_home_forward_passes_are_given_up() -> None:
    bench = WorkerBench(capacity=1)
    bench.give(M)
    bench.give(N)
    effects = bench.worker.close()
    assert len(freed(effects)) == 1, "the device still reads the other"
    assert bench.worker.tasks == {}
    effects = bench.end(Forward(M))
    assert (sent(effects), bench.num_held) == ([], 0)


def test_what_is_given_after_the_batch_is_home_is_needed_again() -> None:
    bench = WorkerBench()
    bench.worker.close()
    assert jobs_of(bench.give()) == [Forward(M)]
    assert bench.worker.close() == [], "once is enough"
    assert sent(bench.end(Forward(M))) == [(B1A, activation(M, Leg.RESULT))]


def test_a_server_whose_step_may_have_begun_computes_no_more() -> None:
    bench = WorkerBench(node=F1A)
    bench.worker.close()
    effects = bench.give()
    assert (jobs_of(effects), len(freed(effects))) == ([], 1)
    assert [type(message) for _, message in sent(effects)] == [Unable]


def test_an_output_that_is_needed_again_is_sent_again() -> None:
    bench = WorkerBench()
    bench.made(M)
    assert sent(bench.give()) == [], "it may be on its way"
    bench.lose("b1a")
    assert sent(bench.give()) == [(B1B, activation(M, Leg.RESULT, 2))]


def test_an_output_that_is_needed_again_and_was_not_kept_is_left_to_others() -> None:
    bench = WorkerBench()
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.made(M)
    bench.lose("b1a")
    assert [type(message) for _, message in sent(bench.give())] == [Unable]


def test_a_worker_that_still_owes_something_does_not_close() -> None:
    bench = WorkerBench()
    bench.give_back()
    with pytest.raises(AssertionError, match="missing"):
        bench.worker.close()
