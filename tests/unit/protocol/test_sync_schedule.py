"""When averages are due, and what is counted as lost between them."""

from dataclasses import replace

import pytest

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core.effects import EffectSink
from decod.protocol.core.messages.averaging_messages import BeginAggregation, Ready, StageAverages
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
    facts = replace(FACTS, start_iteration=start)
    return SyncSchedule(replace(ENDING, sync=sync), facts, EffectSink())


def commit(made: SyncSchedule, number: int, *learnt: tuple[int, int]) -> dict[int, int]:
    """Let an iteration of ten microbatches be committed. Return what is lost so far, by stage."""
    iteration = Iteration(number, 1)
    averaging = AveragingId(iteration, 1)
    begun = BeginAggregation(averaging, num_committed=10, digest=0)
    averages = tuple(StageAverages(stage, num) for stage, num in learnt)
    made.committed(begun, Ready(averaging, (), averages=averages))
    return made.learning.num_lost


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
