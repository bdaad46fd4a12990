"""A client's part in its stage's step."""

from decod.ids import AveragingId
from decod.protocol.averaging.averager import Weight
from decod.protocol.core.effects import Stop
from decod.protocol.core.messages.averaging_messages import BeginAggregation, ReducedPart
from decod.protocol.core.messages.membership_messages import Leave
from decod.protocol.strategy.servers.servers import Contribution
from decod.protocol.strategy.step import weight_of
from tests.unit.protocol.cast import (
    C1A,
    D0,
    F1A,
    ITERATION,
    Heard,
    freed,
    jobs_of,
    mb,
    received,
    sent,
    tensor,
)
from tests.unit.protocol.servers_cast import Bench, stage

AVERAGING = AveragingId(ITERATION, 1)
BEGUN = BeginAggregation(AVERAGING, 3, weight_of([mb(0), mb(1), mb(2)]).digest)


class ClientBench(Bench):
    """c1a, which has folded two microbatches in."""

    def __init__(self) -> None:
        super().__init__(C1A, stage())
        self.contribution = Heard(Contribution(self.context))


def test_a_client_is_a_leaf_and_hears_once_which_microbatches_count() -> None:
    bench = ClientBench()
    assert bench.contribution.received(received(D0, BEGUN)) == []
    other = BeginAggregation(AVERAGING, 9, 9)
    assert bench.contribution.received(received(D0, other)) == []
    assert bench.contribution.begun == BEGUN


def test_a_client_reads_no_average() -> None:
    bench = ClientBench()
    part = received(F1A, ReducedPart(AVERAGING, 0, 0.5), tensor(1))
    assert freed(bench.contribution.received(part)) == [1]
    assert bench.contribution.begun is None
    contribution = bench.contribution
    assert contribution.averaged() == contribution.lacking(Weight(1, 1)) == []


def test_a_client_that_has_lost_its_sum_leaves_so_that_others_do_its_work_again() -> None:
    bench = ClientBench()
    bench.contribution.received(received(D0, BEGUN))
    (gather,) = jobs_of(bench.contribution.contribute([mb(0)]))
    effects = bench.refuse(gather)
    ((to, leave),) = sent(effects)
    assert (to, isinstance(leave, Leave) and leave.at_once) == (D0, True)
    assert any(isinstance(effect, Stop) for effect in effects)


def test_what_is_held_for_an_average_is_released_with_it() -> None:
    bench = ClientBench()
    bench.contribution.received(received(D0, BEGUN))
    bench.contribution.contribute([mb(0)])
    bench.contribution.abandon()
    assert bench.num_held == 0
