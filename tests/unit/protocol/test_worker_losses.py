"""What a worker does when servers of its stage are lost."""

from decod.protocol.core.jobs import Backward, Drop, Forward
from decod.protocol.core.messages.server_messages import (
    Fetch,
    Holding,
    Leg,
    Unable,
)
from decod.protocol.strategy.servers.worker import TaskPhase
from tests.unit.protocol.cast import (
    B1B,
    D0,
    F1A,
    F1B,
    ITERATION,
    configured,
    jobs_of,
    mb,
    sent,
    settle,
)
from tests.unit.protocol.servers_cast import activation, gradient
from tests.unit.protocol.worker_cast import M, N, WorkerBench


def test_the_place_of_a_lost_backward_server_gets_the_output_again() -> None:
    bench = WorkerBench()
    bench.made(M)
    bench.made(N)
    effects = bench.worker.mend(bench.lose("b1a"))
    again = [(to, m) for to, m in sent(effects) if not isinstance(m, Holding)]
    assert again == [(B1B, activation(M, Leg.RESULT, 2))]


def test_an_output_that_was_not_kept_is_made_again() -> None:
    bench = WorkerBench(capacity=1)
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.made()
    assert jobs_of(bench.worker.mend(bench.lose("b1a"))) == [Drop(M), Forward(M)]


def test_an_output_that_was_shed_and_not_kept_is_made_again() -> None:
    bench = WorkerBench(capacity=1)
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.made(M)
    bench.made(mb(1))
    bench.end(Drop(M), num_outputs=0)
    effects = bench.worker.mend(bench.lose("b1a"))
    assert bench.phase(M) is TaskPhase.FORWARD
    assert jobs_of(effects).count(Drop(M)) == 0


def test_the_place_of_a_lost_backward_server_hears_what_this_worker_has() -> None:
    bench = WorkerBench(capacity=4)
    bench.folded(mb(0))
    bench.made(mb(1))
    bench.give_back(mb(1))
    bench.made(mb(2))
    effects = bench.worker.mend(bench.lose("b1b"))
    told = [message for _, message in sent(effects) if isinstance(message, Holding)]
    averaging = bench.context.averaging
    assert told == [Holding(averaging, made=(mb(2),), folding=(mb(1),), folded=(mb(0),))]


def test_a_gradient_whose_forward_pass_is_still_to_come_will_be_folded_in() -> None:
    bench = WorkerBench()
    bench.give_back()
    effects = bench.worker.mend(bench.lose("b1a"))
    (holding,) = (message for _, message in sent(effects) if isinstance(message, Holding))
    assert (holding.made, holding.folding) == ((), (M,))


def test_all_that_take_a_place_hear_from_a_worker_that_has_nothing() -> None:
    """They wait for its word."""
    bench = WorkerBench()
    effects = bench.worker.mend(bench.lose("b1a", "b1b"))
    averaging = bench.context.averaging
    assert sent(effects) == [(node, Holding(averaging, (), (), ())) for node in (F1A, F1B)]


def test_the_place_of_a_lost_frontal_server_gets_the_gradient_again() -> None:
    bench = WorkerBench()
    bench.folded(M)
    bench.made(mb(1))
    effects = bench.worker.mend(bench.lose("f1a"))
    assert sent(effects) == [(F1B, gradient(M, Leg.RESULT, 2))]


def test_an_activation_is_fetched_from_the_place_of_a_lost_frontal_server() -> None:
    bench = WorkerBench()
    bench.give_back(M)
    assert sent(bench.worker.mend(bench.lose("f1a"))) == [(F1B, Fetch(ITERATION, 2, M))]


def test_a_gradient_that_was_not_kept_has_the_iteration_repeated() -> None:
    bench = WorkerBench()
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.folded(M)
    effects = bench.worker.mend(bench.lose("f1a"))
    reason = "a frontal server is lost, and what was sent to it was not kept"
    assert sent(effects) == [(D0, Unable(ITERATION, 2, M, reason))]


def test_a_gradient_of_a_share_that_nobody_reads_is_not_asked_for_again() -> None:
    bench = WorkerBench()
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.folded(mb(0, data_node_index=7))
    assert sent(bench.worker.mend(bench.lose("f1a"))) == []


def test_a_stage_that_has_lost_all_its_servers_is_told_nothing() -> None:
    bench = WorkerBench()
    bench.give_back(M)
    bench.made(N)
    effects = bench.worker.mend(bench.lose("f1a", "f1b", "b1a", "b1b"))
    effects += bench.give(M)
    effects += bench.end(Forward(M))
    effects += bench.end(Backward(M))
    assert sent(effects) == []
    assert bench.worker.awaited == set()


def test_after_a_loss_forward_passes_are_begun_again() -> None:
    bench = WorkerBench()
    bench.worker.close()
    bench.worker.reopen()
    assert jobs_of(bench.give()) == [Forward(M)]
