"""Whom a server gives the next microbatch."""

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.link_table import LinkTable
from decod.protocol.strategy.servers.workers import WorkerTable
from tests.unit.protocol.cast import B1A, C1A, C1B, F1A, context_of, mb, view_of

NOBODY: frozenset[NodeId] = frozenset()


def table(*, transfer_s: float = 1.0) -> WorkerTable:
    """Return the table of f1a, to which an activation takes so long from everybody else."""
    context = context_of(F1A, view_of("d0", "f1a", "b1a", "c1a", "c1b"))
    context.links = LinkTable(activation_size_bytes=1_000_000, compute_s=1.0)
    for node in (C1A, C1B, B1A):
        rate = 1_000_000 / transfer_s
        context.links.measured(node, latency_s=0.0, bandwidth_bytes_per_s=rate)
    return WorkerTable(context)


def waiting(
    num: int, barred: frozenset[NodeId] = NOBODY
) -> list[tuple[MicrobatchId, frozenset[NodeId]]]:
    return [(mb(index), barred) for index in range(num)]


def chosen(workers: WorkerTable, num: int, barred: frozenset[NodeId] = NOBODY) -> list[NodeId]:
    return [node for _, node in workers.choose(waiting(num, barred))]


def test_a_worker_that_has_not_offered_itself_gets_nothing() -> None:
    workers = table()
    assert chosen(workers, 3) == []
    workers.offered(C1A, 4, 1.0)
    assert (C1A in workers, C1B in workers) == (True, False)
    assert chosen(workers, 1) == [C1A]


def test_a_microbatch_goes_to_the_worker_that_would_have_it_done_first() -> None:
    workers = table()
    workers.offered(C1A, 4, 5.0)
    workers.offered(C1B, 4, 2.0)
    assert chosen(workers, 1) == [C1B]


def test_work_is_shared_out_in_proportion_to_speed() -> None:
    workers = table(transfer_s=0.1)
    workers.offered(C1A, 20, 3.0)
    workers.offered(C1B, 20, 1.0)
    found = chosen(workers, 12)
    assert (found.count(C1A), found.count(C1B)) == (3, 9)


def test_what_a_worker_has_already_counts() -> None:
    workers = table()
    for node in (C1A, C1B):
        workers.offered(node, 4, 1.0)
    workers.gave(0.0, C1A, mb(8))
    assert chosen(workers, 1) == [C1B]


def test_the_way_to_a_worker_counts_except_for_the_server_itself() -> None:
    workers = table(transfer_s=2.0)
    workers.offered(F1A, 4, 3.0)
    workers.offered(C1A, 4, 2.0)
    assert workers.expected_s(F1A) == 3.0
    assert workers.expected_s(C1A) >= 4.0
    assert chosen(workers, 1) == [F1A]


def test_of_workers_alike_the_choice_is_the_same_each_time() -> None:
    workers = table()
    for node in (C1B, C1A):
        workers.offered(node, 4, 1.0)
    assert chosen(workers, 1) == [C1A]


def test_a_microbatch_waits_for_a_full_worker_that_would_still_be_first() -> None:
    workers = table()
    workers.offered(C1A, 1, 1.0)
    workers.offered(C1B, 4, 60.0)
    workers.gave(0.0, C1A, mb(8))
    assert chosen(workers, 1) == []


def test_those_that_wait_for_a_full_worker_stand_in_line_for_it() -> None:
    """So that at some length of the line the slow one is first."""
    workers = table(transfer_s=0.1)
    workers.offered(C1A, 1, 1.0)
    workers.offered(C1B, 4, 2.9)
    workers.gave(0.0, C1A, mb(8))
    assert workers.choose(waiting(3)) == [(mb(1), C1B)]


def test_nobody_gets_more_than_its_window() -> None:
    workers = table()
    for node in (C1A, C1B):
        workers.offered(node, 2, 1.0)
    workers.gave(0.0, C1A, mb(8))
    found = chosen(workers, 9)
    assert (found.count(C1A), found.count(C1B)) == (1, 2)


def test_who_is_barred_from_a_microbatch_does_not_get_it() -> None:
    workers = table()
    for node in (C1A, C1B):
        workers.offered(node, 4, 1.0)
    assert chosen(workers, 1, frozenset({C1A})) == [C1B]
    assert chosen(workers, 1, frozenset({C1A, C1B})) == []


def test_a_microbatch_that_nobody_may_have_does_not_hold_up_the_next() -> None:
    workers = table()
    workers.offered(C1A, 4, 1.0)
    assert workers.choose([(mb(0), {C1A}), (mb(1), set())]) == [(mb(1), C1A)]


def test_a_workers_speed_shows_in_the_times_between_its_results() -> None:
    workers = table()
    workers.offered(C1A, 4, 9.0)
    for index in range(2):
        workers.gave(10.0, C1A, mb(index))
    workers.done(12.0, C1A, mb(0))
    assert workers.records[C1A].each_s == 2.0, "since it was given"
    workers.done(13.0, C1A, mb(1))
    workers.gave(20.0, C1A, mb(2))
    workers.done(21.0, C1A, mb(2))
    assert workers.records[C1A].each_s == 1.0, "since the last result, or since it was given"


def test_a_result_that_was_not_asked_for_says_nothing_of_speed() -> None:
    workers = table()
    workers.offered(C1A, 4, 9.0)
    workers.done(5.0, C1A, mb(0))
    workers.done(5.0, C1B, mb(0))
    assert workers.records[C1A].each_s == 9.0


def test_what_is_done_makes_room() -> None:
    workers = table()
    workers.offered(C1A, 1, 1.0)
    workers.gave(0.0, C1A, mb(8))
    assert workers.records[C1A].full
    workers.done(1.0, C1A, mb(8))
    assert chosen(workers, 1) == [C1A]


def test_what_another_has_done_makes_room_and_says_nothing_of_speed() -> None:
    workers = table()
    workers.offered(C1A, 1, 7.0)
    workers.gave(0.0, C1A, mb(8))
    workers.dropped(mb(8))
    assert workers.records[C1A].each_s == 7.0
    assert chosen(workers, 1) == [C1A]


def test_speeds_outlive_an_iteration_and_offers_do_not() -> None:
    workers = table()
    workers.offered(C1A, 4, 9.0)
    workers.gave(0.0, C1A, mb(0))
    workers.done(2.0, C1A, mb(0))
    workers.reset()
    assert C1A not in workers
    workers.offered(C1A, 4, 9.0)
    assert workers.records[C1A].each_s == 2.0


def test_a_second_offer_changes_the_window_and_keeps_what_was_given() -> None:
    workers = table()
    workers.offered(C1A, 4, 9.0)
    workers.gave(0.0, C1A, mb(0))
    workers.offered(C1A, 1, 3.0)
    record = workers.records[C1A]
    assert (record.full, record.each_s) == (True, 3.0)


def test_those_that_are_gone_are_forgotten_with_their_speed() -> None:
    workers = table()
    workers.offered(C1A, 4, 9.0)
    workers.gave(0.0, C1A, mb(0))
    workers.done(2.0, C1A, mb(0))
    workers.keep({C1B: None})
    assert C1A not in workers
    workers.offered(C1A, 4, 9.0)
    assert workers.records[C1A].each_s == 9.0
