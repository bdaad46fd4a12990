"""Which shares of the data each data node reads, and what is counted as skipped."""

from decod.ids import AveragingId, Iteration
from decod.protocol.core.messages.averaging_messages import BeginAggregation
from decod.protocol.strategy.data_share import Positions


def begun(num_committed: int, num_deferred: int = 0, num_reread: int = 0) -> BeginAggregation:
    return BeginAggregation(
        AveragingId(Iteration(1, 1), 1),
        num_committed=num_committed,
        digest=0,
        loss_sum=0.0,
        num_tokens=0,
        num_deferred=num_deferred,
        num_reread=num_reread,
    )


def test_who_comes_later_counts_from_the_first_commit_that_it_sees() -> None:
    positions = Positions(batch=8)
    for message in (begun(8, 3), begun(8, 1), begun(9)):
        positions.committed(message)
    assert (positions.num_skipped, positions.whole) == (2, False)
