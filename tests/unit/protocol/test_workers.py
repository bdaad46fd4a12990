"""Whom a server gives the next microbatch."""

import pytest

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.server_messages import Offer
from decod.protocol.strategy.servers.workers import WorkerTable
from tests.unit.protocol.cast import B1A, C1A, C1B, F1A, ITERATION, context_of, mb, view_of

NOBODY: frozenset[NodeId] = frozenset()


class Table(WorkerTable):
    """The table of f1a, to which an activation takes so long from everybody else."""

    def __init__(self, *, transfer_s: float = 1.0) -> None:
        context = context_of(F1A, view_of("d0", "f1a", "b1a", "c1a", "c1b"))
        context.links = LinkTable(activation_size_bytes=1_000_000, compute_s=1.0)
        for node in (C1A, C1B, B1A):
            rate = 1_000_000 / transfer_s
            context.links.measured(node, latency_s=0.0, bandwidth_bytes_per_s=rate)
        super().__init__(context)

    def offer(
        self,
        node: NodeId,
        window: int,
        pass_s: float,
        *,
        idle: bool = False,
        num_servers: int = 1,
    ) -> None:
        self.offered(node, Offer(ITERATION, 1, window, pass_s, idle=idle), num_servers)


Waiting = list[tuple[MicrobatchId, frozenset[NodeId]]]


def waiting(num: int, barred: frozenset[NodeId] = NOBODY) -> Waiting:
    return [(mb(index), barred) for index in range(num)]


def chosen(workers: WorkerTable, num: int, barred: frozenset[NodeId] = NOBODY) -> list[NodeId]:
    return [node for _, node in workers.choose(waiting(num, barred))]


# --- who is first ---------------------------------------------------------------------------------


def test_a_worker_that_has_not_offered_itself_gets_nothing() -> None:
    workers = Table()
    assert chosen(workers, 3) == []
    workers.offer(C1A, 4, 1.0)
    assert (C1A in workers.records, C1B in workers.records) == (True, False)
    assert chosen(workers, 1) == [C1A]


def test_a_microbatch_goes_to_the_worker_that_would_have_it_done_first() -> None:
    workers = Table()
    workers.offer(C1A, 4, 5.0)
    workers.offer(C1B, 4, 2.0)
    assert chosen(workers, 1) == [C1B]


def test_work_is_shared_out_in_proportion_to_speed() -> None:
    workers = Table(transfer_s=0.1)
    workers.offer(C1A, 20, 3.0)
    workers.offer(C1B, 20, 1.0)
    found = chosen(workers, 12)
    assert (found.count(C1A), found.count(C1B)) == (3, 9)


def test_what_a_worker_has_already_counts() -> None:
    workers = Table()
    for node in (C1A, C1B):
        workers.offer(node, 4, 1.0)
    workers.gave(0.0, C1A, mb(8))
    assert chosen(workers, 1) == [C1B]


def test_a_worker_works_for_the_other_servers_too() -> None:
    workers = Table(transfer_s=0.1)
    workers.offer(C1A, 4, 1.0, num_servers=3)
    assert workers.expected_s(C1A) == pytest.approx(3.1, abs=0.01)


def test_a_link_that_is_slower_than_the_device_sets_the_pace() -> None:
    workers = Table(transfer_s=4.0)
    workers.offer(C1A, 4, 1.0)
    assert workers.expected_s(C1A, num_more=1) == pytest.approx(12.0, abs=0.01)


def test_the_way_to_a_worker_counts_except_for_the_server_itself() -> None:
    workers = Table(transfer_s=2.0)
    workers.offer(F1A, 4, 3.0)
    workers.offer(C1A, 4, 2.0)
    assert workers.expected_s(F1A) == 3.0
    assert workers.expected_s(C1A) == pytest.approx(4.0, abs=0.01)
    assert chosen(workers, 1) == [F1A]


def test_of_workers_alike_the_choice_is_the_same_each_time() -> None:
    workers = Table()
    for node in (C1B, C1A):
        workers.offer(node, 4, 1.0)
    assert chosen(workers, 1) == [C1A]


# --- who has enough -------------------------------------------------------------------------------


def test_a_microbatch_waits_for_a_full_worker_that_would_still_be_first() -> None:
    workers = Table()
    workers.offer(C1A, 1, 1.0)
    workers.offer(C1B, 4, 60.0)
    workers.gave(0.0, C1A, mb(8))
    assert chosen(workers, 1) == []


def test_those_that_wait_for_a_full_worker_stand_in_line_for_it() -> None:
    """So that at some length of the line the slow one is first."""
    workers = Table(transfer_s=0.1)
    workers.offer(C1A, 1, 1.0)
    workers.offer(C1B, 4, 2.9)
    workers.gave(0.0, C1A, mb(8))
    assert workers.choose(waiting(3)) == [(mb(1), C1B)]


def test_nobody_gets_more_than_its_window() -> None:
    workers = Table()
    for node in (C1A, C1B):
        workers.offer(node, 2, 1.0)
    workers.gave(0.0, C1A, mb(8))
    found = chosen(workers, 9)
    assert (found.count(C1A), found.count(C1B)) == (1, 2)


def test_who_is_barred_from_a_microbatch_does_not_get_it() -> None:
    workers = Table()
    for node in (C1A, C1B):
        workers.offer(node, 4, 1.0)
    assert chosen(workers, 1, frozenset({C1A})) == [C1B]
    assert chosen(workers, 1, frozenset({C1A, C1B})) == []


def test_a_microbatch_that_nobody_may_have_does_not_hold_up_the_next() -> None:
    workers = Table()
    workers.offer(C1A, 4, 1.0)
    assert workers.choose([(mb(0), {C1A}), (mb(1), set())]) == [(mb(1), C1A)]


@pytest.mark.parametrize("by_itself", [True, False])
def test_what_is_done_makes_room(*, by_itself: bool) -> None:
    workers = Table()
    workers.offer(C1A, 1, 1.0)
    workers.gave(0.0, C1A, mb(8))
    if by_itself:
        workers.done(C1A, mb(8))
    else:
        workers.made(C1B, mb(8))
    assert chosen(workers, 1) == [C1A]


def test_the_result_of_a_worker_that_is_gone_changes_nothing() -> None:
    workers = Table()
    workers.done(C1B, mb(0))
    assert C1B not in workers.records


def test_a_later_offer_counts_and_what_was_given_stays() -> None:
    workers = Table()
    workers.offer(C1A, 4, 9.0)
    workers.gave(0.0, C1A, mb(0))
    workers.offer(C1A, 1, 3.0)
    assert chosen(workers, 1) == []
    assert workers.records[C1A].each_s == 3.0


def test_offers_end_with_an_iteration_and_with_membership() -> None:
    workers = Table()
    workers.offer(C1A, 4, 1.0)
    workers.keep({C1B: None})
    assert C1A not in workers.records
    workers.offer(C1A, 4, 1.0)
    workers.reset()
    assert C1A not in workers.records


# --- the beginning and the end of a batch ---------------------------------------------------------


def test_those_that_are_expected_to_offer_themselves_are_waited_for() -> None:
    workers = Table()
    workers.expect([C1A, C1B], 1.0)
    workers.offer(C1B, 4, 60.0)
    assert chosen(workers, 1) == []
    workers.forget_silent()
    assert (C1A in workers.records, chosen(workers, 1)) == (False, [C1B])


def test_who_has_nothing_to_do_gets_what_another_would_have_done_last() -> None:
    workers = Table()
    workers.offer(C1A, 4, 10.0)
    for index in range(2):
        workers.gave(0.0, C1A, mb(index))
    having = {mb(index): {C1A} for index in range(2)}
    assert workers.spare(having) is None
    workers.offer(C1B, 4, 1.0, idle=True)
    assert workers.spare(having) == (mb(1), C1B)
    workers.gave(0.0, C1B, mb(1))
    assert workers.spare(having) is None, "it has something to do now"


def test_who_would_not_be_earlier_gets_nothing() -> None:
    workers = Table()
    workers.offer(C1A, 4, 1.0)
    workers.gave(0.0, C1A, mb(0))
    workers.offer(C1B, 4, 10.0, idle=True)
    assert workers.spare({mb(0): {C1A}}) is None
    assert not workers.records[C1B].idle, "it asks again when it has done something"


def test_who_has_a_microbatch_already_does_not_get_it_again() -> None:
    workers = Table()
    workers.offer(C1A, 4, 10.0, idle=True)
    assert workers.spare({mb(0): {C1A}}) is None


def test_what_nobody_living_has_is_not_a_matter_of_spare_time() -> None:
    workers = Table()
    workers.offer(C1B, 4, 1.0, idle=True)
    assert workers.spare({mb(0): {C1A}}) is None
