"""Which shares of the data each data node reads, and what is counted as skipped."""

from itertools import combinations

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core.messages.averaging_messages import BeginAggregation
from decod.protocol.strategy.data_share import Positions, shares_of
from tests.unit.protocol.cast import member, view_of

NUM_SHARES = 5


def test_every_share_is_read_once_whoever_is_there() -> None:
    for num in range(1, NUM_SHARES + 1):
        for there in combinations(range(NUM_SHARES), num):
            view = view_of(*(f"d{index}" for index in there), "r1a")
            shares = {
                member.data_node_index: shares_of(view, member.node_id, num_shares=NUM_SHARES)
                for member in view.data_nodes
            }
            assert sorted(s for each in shares.values() for s in each) == [*range(NUM_SHARES)]
            assert all(each[0] == index for index, each in shares.items())
            sizes = [len(each) for each in shares.values()]
            assert max(sizes) - min(sizes) <= 1, "nobody reads for all the others"


def test_a_data_node_that_is_alone_reads_everything() -> None:
    assert shares_of(view_of("d1", "r1a"), NodeId("d1"), num_shares=3) == (1, 0, 2)


def test_a_data_node_that_is_about_to_leave_reads_nothing() -> None:
    view = view_of(member("d0", capacity=0), "d1", "r1a")
    assert shares_of(view, NodeId("d0"), num_shares=2) == ()
    assert shares_of(view, NodeId("d1"), num_shares=2) == (1, 0)


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


def test_what_is_put_off_and_trained_on_later_is_not_skipped() -> None:
    positions = Positions(batch=8)
    positions.begin()
    for message in (begun(8), begun(6, 2), begun(9, 1), begun(9)):
        positions.committed(message)
    assert (positions.num_skipped, positions.num_deferred, positions.whole) == (0, 0, True)


def test_what_a_lost_data_node_had_put_off_is_skipped() -> None:
    positions = Positions(batch=8)
    positions.begin()
    for message in (begun(5, 3), begun(8, 1), begun(9)):
        positions.committed(message)
    assert (positions.num_skipped, positions.num_deferred) == (2, 0)


def test_what_is_trained_on_again_makes_up_for_nothing() -> None:
    positions = Positions(batch=8)
    positions.begin()
    for message in (begun(8), begun(11, 1, 4), begun(9), begun(9, 0, 1)):
        positions.committed(message)
    assert (positions.num_skipped, positions.num_deferred, positions.num_reread) == (0, 0, 5)
    positions.go_back(1)
    assert positions.num_reread == 5, "all these messages are of iteration 1"


def test_who_comes_later_counts_from_the_first_commit_that_it_sees() -> None:
    positions = Positions(batch=8)
    for message in (begun(8, 3), begun(8, 1), begun(9)):
        positions.committed(message)
    assert (positions.num_skipped, positions.whole) == (2, False)
