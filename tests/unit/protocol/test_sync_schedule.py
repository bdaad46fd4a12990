"""When averages are due, and what is counted as lost between them."""

from dataclasses import replace

import pytest

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core.messages import BeginAggregation, Ready
from decod.protocol.core.messages.averaging_messages import StageAverages
from decod.protocol.core.view import Member, Opening, Role, View
from decod.protocol.leadership.sync_schedule import SyncSchedule
from decod.run.model_config import StagesConfig
from tests.unit.protocol.cast import FACTS, LOCALLY, RUN

LAST = 7
VIEW = View(version=1, leader=NodeId("d0"), term=1, num_stages=2, members=())


ENDING = replace(RUN, num_iterations=LAST, stages=StagesConfig(num_relay_stages=1))


def schedule(
    *, every: int = 3, overlaps: bool = False, start: int = 0, fragments: int = 1
) -> SyncSchedule:
    sync = replace(LOCALLY, every=every, overlap=overlaps, fragments=fragments)
    return SyncSchedule(replace(ENDING, sync=sync), replace(FACTS, start_iteration=start))


def commit(made: SyncSchedule, number: int, *learnt: tuple[int, int]) -> dict[int, int]:
    """Let an iteration of ten microbatches be committed. Return what is lost so far, by stage."""
    iteration = Iteration(number, 1)
    averaging = AveragingId(iteration, 1)
    begun = BeginAggregation(averaging, num_committed=10, digest=0)
    averages = tuple(StageAverages(stage, num) for stage, num in learnt)
    made.committed(begun, Ready(averaging, (), averages=averages))
    return made.learning.num_lost


def test_every_third_iteration_and_the_last_end_with_an_average() -> None:
    made = schedule()
    local = []
    for number in range(1, LAST + 1):
        local.append(made.is_local(Iteration(number, 1)))
        commit(made, number)
    assert local == [True, True, False, True, True, False, False]


@pytest.mark.parametrize(("every", "overlaps", "first"), [(3, False, 1), (3, True, 2), (40, 0, 4)])
def test_an_average_may_come_early_but_not_too_often(
    every: int, first: int, *, overlaps: bool
) -> None:
    made = schedule(every=every, overlaps=overlaps)
    for number in range(1, first):
        assert not made.hasten(Iteration(number, 1))
        assert made.is_local(Iteration(number, 1))
        commit(made, number)
    assert made.hasten(Iteration(first, 1))
    assert not made.is_local(Iteration(first, 1))
    commit(made, first)
    assert made.anchor.number == first
    assert made.is_local(Iteration(first + 1, 1))


@pytest.mark.parametrize("every", [2, 40])
def test_somebody_who_leaves_gets_an_average_of_all_fragments(every: int) -> None:
    """Also if their averages come one upon the other."""
    made = schedule(every=every, fragments=2)
    number = 1
    while not made.hasten(Iteration(number, 1)):
        commit(made, number)
        number += 1
    assert number <= 4
    assert made.spec.fragment == 0
    commit(made, number)
    assert made.travelling.fragment == 0


RELAY = Member(NodeId("r1"), "host:1", Role.RELAY, 1, 4)


def travelled(made: SyncSchedule, number: int, *, attempt: int = 1, since: int = 0) -> object:
    """Return which averages an opening says all members have. A relay is there since `since`."""
    view = replace(VIEW, members=(replace(RELAY, since_iteration=since),))
    told = made.told(Iteration(number - 1, 1), Iteration(number, attempt), view)
    return told["travelled"]


def vote_locally(made: SyncSchedule, number: int, *travelled: tuple[int, int]) -> None:
    averaging = AveragingId(Iteration(number, 1), 1)
    begun = BeginAggregation(averaging, num_committed=10, digest=0)
    made.committed(begun, Ready(averaging, (), travelled=travelled))


def test_an_average_that_all_members_have_is_kept_until_it_is_used() -> None:
    made = schedule(overlaps=True)
    vote_locally(made, 1, (0, 5), (1, 6), (2, 0))
    assert travelled(made, 2) == travelled(made, 2, attempt=2) == ((0, 5), (1, 6))
    vote_locally(made, 2, (0, 5), (1, 6), (2, 7))
    assert travelled(made, 3) == ((0, 5), (1, 6), (2, 7))
    commit(made, 3)
    assert travelled(made, 4) == ()


def test_an_average_is_not_kept_for_newcomers_nor_in_a_repeated_outer_step() -> None:
    made = schedule(overlaps=True)
    vote_locally(made, 1, (0, 5), (1, 6))
    assert travelled(made, 2, since=1) == ((0, 5),)
    assert travelled(made, 2) == ((0, 5),), "members may have begun anew"
    vote_locally(made, 2, (0, 5), (1, 6))
    assert travelled(made, 3, since=1) == ((0, 5), (1, 6)), "the newcomer has it by now"
    assert travelled(made, 3, attempt=2) == ()


def test_a_new_leader_does_not_know_what_has_travelled() -> None:
    made = schedule(overlaps=True)
    opening = Opening(Iteration(2, 1), Iteration(1, 1), VIEW, averaged=Iteration(0, 0), due=3)
    made.resume(replace(opening, travelled=((0, 5),)))
    assert travelled(made, 2) == ()


def test_an_average_that_is_due_anyway_is_not_early() -> None:
    made = schedule()
    commit(made, 1)
    commit(made, 2)
    assert not made.hasten(Iteration(3, 1))
    assert not made.is_local(Iteration(3, 1))


def test_a_new_leader_knows_that_an_average_comes_early() -> None:
    made = schedule()
    made.resume(Opening(Iteration(2, 1), Iteration(1, 1), VIEW, averaged=Iteration(0, 0)))
    assert not made.is_local(Iteration(2, 1))


def test_a_resumed_run_counts_from_its_first_iteration() -> None:
    made = schedule(start=4)
    assert made.is_local(Iteration(6, 1))
    assert not made.is_local(Iteration(7, 1))


def test_what_an_average_lacks_is_lost() -> None:
    made = schedule()
    assert commit(made, 1) == commit(made, 2) == {}
    assert commit(made, 3, (0, 30), (1, 22)) == {1: 8}
    commit(made, 4)
    commit(made, 5)
    assert commit(made, 6, (0, 30), (1, 29)) == {1: 9}


def test_an_average_that_travels_is_counted_one_outer_step_later() -> None:
    made = schedule(overlaps=True)
    commit(made, 1)
    commit(made, 2)
    assert commit(made, 3, (0, 0), (1, 0)) == {}, "nothing has travelled yet"
    commit(made, 4)
    commit(made, 5)
    assert commit(made, 6, (0, 30), (1, 20)) == {1: 10}
    assert commit(made, 7, (0, 40), (1, 35)) == {1: 15}, "the last step uses both averages"


@pytest.mark.parametrize(("overlaps", "first_known"), [(False, 6), (True, 7)])
def test_a_new_leader_counts_what_it_has_seen_from_the_beginning(
    first_known: int, *, overlaps: bool
) -> None:
    made = schedule(overlaps=overlaps)
    zero = Iteration(0, 0)
    made.resume(Opening(Iteration(2, 1), Iteration(1, 1), VIEW, averaged=zero, due=3))
    for number in range(2, first_known):
        assert not commit(made, number, (1, 0))
    assert commit(made, first_known, (1, 0))


@pytest.mark.parametrize(
    ("shares", "fault"),
    [
        (((0, 10, 7), (1, 10, 7)), ""),
        (((0, 10, 7), (1, 9, 7)), "stage 1 folded 9 microbatches, not the 10 committed"),
        (((0, 10, 8), (1, 10, 7)), "stage 0 folded 10 microbatches, not the 10 committed"),
        (((0, 10, 7),), "stage 1 folded 0 microbatches, not the 10 committed"),
    ],
)
def test_each_stage_must_have_trained_on_exactly_the_batch(
    shares: tuple[tuple[int, int, int], ...], fault: str
) -> None:
    averaging = AveragingId(Iteration(1, 1), 1)
    begun = BeginAggregation(averaging, num_committed=10, digest=7)
    vote = Ready(averaging, ((0, "a"), (1, "b")), folded=shares)
    assert schedule().failure(begun, vote) == fault
    assert not SyncSchedule(ENDING, FACTS).failure(begun, vote)
