"""What a worker does when servers of its stage are lost."""

from decod.protocol.core.jobs import Backward, Drop, Forward
from decod.protocol.core.messages.server_messages import Holding
from tests.unit.protocol.cast import configured, jobs_of, mb, sent, settle
from tests.unit.protocol.worker_cast import M, N, WorkerBench


def test_an_output_that_was_not_kept_is_made_again() -> None:
    bench = WorkerBench(capacity=1)
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.made()
    assert jobs_of(bench.worker.mend(bench.lose("b1a"))) == [Drop(M), Forward(M)]


def test_a_gradient_whose_forward_pass_is_still_to_come_will_be_folded_in() -> None:
    bench = WorkerBench()
    bench.give_back()
    effects = bench.worker.mend(bench.lose("b1a"))
    (holding,) = (message for _, message in sent(effects) if isinstance(message, Holding))
    assert (holding.made, holding.folding) == ((), (M,))


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
