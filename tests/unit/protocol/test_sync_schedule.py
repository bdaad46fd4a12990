"""When averages are due, and what is counted as lost between them."""

from dataclasses import replace

import pytest

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core.average_spec import WHOLE
from decod.protocol.core.effects import EffectSink
from decod.protocol.core.messages.averaging_messages import (
    BeginAggregation,
    Ready,
    StageAverages,
    StageVersions,
)
from decod.protocol.core.view import Member, Opening, Role, View
from decod.protocol.leadership.sync_schedule import SyncSchedule
from decod.run.stages_config import StagesConfig
from tests.unit.protocol.cast import FACTS, LOCALLY, RUN

LAST = 7
VIEW = View(version=1, leader=NodeId("d0"), term=1, num_stages=2, members=())


ENDING = replace(RUN, num_iterations=LAST, stages=StagesConfig(num_relay_stages=1))


def schedule(
    *,
    every: int = 3,
    overlaps: bool = False,
    start: int = 0,
    fragments: int = 1,
    last: int = LAST,
) -> SyncSchedule:
    sync = replace(LOCALLY, every=every, overlap=overlaps, fragments=fragments)
    facts = replace(FACTS, start_iteration=start)
    return SyncSchedule(replace(ENDING, sync=sync, num_iterations=last), facts, EffectSink())


def commit(
    made: SyncSchedule,
    number: int,
    *learnt: tuple[int, int],
    travelled: StageVersions = (),
    attempt: int = 1,
) -> dict[int, int]:
    """Let an iteration of ten microbatches be committed. Return what is lost so far, by stage."""
    iteration = Iteration(number, attempt)
    averaging = AveragingId(iteration, 1)
    begun = BeginAggregation(averaging, num_committed=10, digest=0)
    averages = tuple(StageAverages(stage, num) for stage, num in learnt)
    made.committed(begun, Ready(averaging, (), averages=averages, travelled=travelled))
    return made.learning.num_lost


def opened(made: SyncSchedule, number: int, *, attempt: int = 1) -> Opening:
    """Open an iteration."""
    committed, iteration = Iteration(number - 1, 1), Iteration(number, attempt)
    opening = Opening(iteration, committed, VIEW, **made.told(committed, iteration, VIEW))
    made.opened(opening)
    return opening


HERE = ((0, 5), (1, 6))
"""The average of both stages has travelled."""


def test_an_average_counts_once_all_stages_have_it() -> None:
    made = schedule(every=6, overlaps=True)
    for number in range(1, 7):
        assert not opened(made, number).arrival
        commit(made, number)
    assert (made.travelling, made.due) == (WHOLE, LAST)
    made = schedule(every=3, overlaps=True, last=20)
    for number in range(1, 4):
        commit(made, number)
    assert made.travelling == WHOLE
    commit(made, 4, travelled=HERE[:1])
    assert not opened(made, 5).arrival
    commit(made, 5, travelled=HERE)
    assert not opened(made, 6).arrival, "its phase ends there"
    assert opened(made, 6).travelled == HERE
    commit(made, 6, (0, 30), (1, 30))
    assert made.average_delay == 3
    commit(made, 7, travelled=HERE)
    opening = opened(made, 8)
    assert (opening.arrival, opening.local, opening.due) == (True, True, 9)
    assert not commit(made, 8, (0, 30), (1, 30))
    assert (made.anchor, made.travelling, made.average_delay, made.due) == (
        Iteration(8, 1),
        None,
        2,
        9,
    )
    assert made.learning.apart, "what was learnt since the phase began"
    assert not commit(made, 9, (0, 0), (1, 0)), "nothing was used, so nothing lacks"
    assert not made.learning.apart, "it travels"
    assert made.travelling == WHOLE


def test_somebody_new_gets_the_average_before_it_counts() -> None:
    """Parts may lie with somebody who is lost, so the newcomer's stage averages anew."""
    made = schedule(every=6, overlaps=True, last=20)
    for number in range(1, 7):
        commit(made, number)
    commit(made, 7, travelled=HERE)
    view = replace(VIEW, members=(replace(RELAY, since_iteration=7),))
    told = made.told(Iteration(7, 1), Iteration(8, 1), view)
    assert told["travelled"] == HERE[:1]
    assert not opened(made, 8).arrival
    commit(made, 8, travelled=HERE)
    assert opened(made, 9).arrival


def test_what_an_average_lacks_is_counted_when_it_arrives() -> None:
    made = schedule(every=4, overlaps=True, last=20)
    for number in range(1, 5):
        commit(made, number)
    commit(made, 5, travelled=HERE)
    assert opened(made, 6).arrival
    assert commit(made, 6, (0, 40), (1, 25)) == {1: 15}


def test_another_leader_commits_an_arrival_that_was_opened_as_one() -> None:
    """Members have used the average by then."""
    first, successor = (schedule(every=4, overlaps=True, last=20) for _ in range(2))
    for number in range(1, 5):
        commit(first, number)
    commit(first, 5, travelled=HERE)
    opening = opened(first, 6)
    assert opening.arrival
    successor.resume(opening)
    commit(successor, 6, (0, 40), (1, 40))
    assert (successor.anchor, successor.travelling) == (Iteration(6, 1), None)
    assert (successor.average_delay, successor.due) == (2, 8)
    assert not successor.learning.apart, "it can't know"
    again = schedule(every=4, overlaps=True, last=20)
    again.resume(opening)
    assert not opened(again, 6, attempt=2).arrival


def test_an_arrival_that_failed_waits_for_the_end_of_the_phase() -> None:
    """Whatever made it fail may have been in the average."""
    made = schedule(every=4, overlaps=True, last=20)
    for number in range(1, 5):
        commit(made, number)
    commit(made, 5, travelled=HERE)
    assert opened(made, 6).arrival
    again = opened(made, 6, attempt=2)
    assert not again.arrival
    assert not again.travelled
    commit(made, 6, travelled=HERE, attempt=2)
    assert not opened(made, 7).arrival
    commit(made, 7, travelled=HERE)
    assert not opened(made, 8).travelled
    assert not commit(made, 8, (0, 40), (1, 40))
    assert made.average_delay == 4
    commit(made, 9, travelled=HERE)
    assert opened(made, 10).arrival


@pytest.mark.parametrize("every", [2, 40])
def test_somebody_who_leaves_gets_an_average_of_all_fragments(every: int) -> None:
    """Also if their averages come one upon the other."""
    made = schedule(every=every, overlaps=True, fragments=2)
    number = 1
    while not made.hasten(Iteration(number, 1)):
        commit(made, number)
        number += 1
    assert number <= 4
    assert made.spec.fragment == 0
    commit(made, number)
    assert made.travelling == WHOLE


RELAY = Member(NodeId("r1"), "host:1", Role.RELAY, 1, 4)


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
    assert not SyncSchedule(ENDING, FACTS, EffectSink()).failure(begun, vote)
