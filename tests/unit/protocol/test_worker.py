"""What a worker does with the forward and backward passes that servers give it."""

import pytest

from decod.protocol.core.jobs import Backward, Drop, Embed, Forward
from decod.protocol.core.messages.server_messages import Leg, Unable
from tests.unit.protocol.cast import B1A, B1B, F1A, configured, freed, jobs_of, sent, settle
from tests.unit.protocol.servers_cast import activation
from tests.unit.protocol.worker_cast import M, N, WorkerBench, refusal

# --- forward --------------------------------------------------------------------------------------


def test_the_output_of_another_does_not_take_a_backward_pass_away() -> None:
    """The server has given it the gradient: it counts on this worker."""
    bench = WorkerBench()
    bench.give()
    bench.give_back()
    assert bench.taken() == []
    assert jobs_of(bench.end(Forward(M))) == [Backward(M)]
    assert bench.taken() == [], "nor when it has begun"


# --- backward -------------------------------------------------------------------------------------


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


# --- revocation -----------------------------------------------------------------------------------


def test_what_is_being_fetched_is_given_up() -> None:
    bench = WorkerBench()
    bench.give_back()
    effects = bench.revoke()
    assert (sent(effects), len(freed(effects))) == ([(B1A, refusal())], 1)
    assert (bench.phase(), bench.num_held) == (None, 0)


# --- a device that refuses ------------------------------------------------------------------------


def test_a_refusal_makes_room() -> None:
    bench = WorkerBench(capacity=1)
    bench.give(M)
    bench.give(N)
    assert jobs_of(bench.refuse(Forward(M))) == [Drop(M), Forward(N)][1:]


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
