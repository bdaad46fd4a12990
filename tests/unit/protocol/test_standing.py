"""What an operator wants of a node: said until a view shows it, and told once how it ended."""

import math

import pytest

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send, Stop
from decod.protocol.core.messages.membership_messages import Capacity, CapacityAnswer, Leave
from decod.protocol.core.view import View
from decod.protocol.leadership.availability import Availability
from tests.unit.protocol.cast import (
    D0,
    R1A,
    STRANGER,
    Heard,
    context_of,
    member,
    notes_of,
    sent,
    view_of,
)

BOTH = view_of("d0", "r1a", "r1b")
PAUSED = view_of("d0", member("r1a", capacity=0), "r1b", version=2)
LEAVE = Leave("drained by its operator")


def leadership_part_of(view: View = BOTH, node: NodeId = R1A) -> tuple[Heard, Context]:
    context = context_of(node, view)
    return Heard(Availability(context, 2)), context


def said(effects: list[Effect]) -> list[object]:
    assert all(to == D0 for to, _ in sent(effects))
    return [message for _, message in sent(effects)]


def stop_of(effects: list[Effect]) -> Stop:
    (stop,) = (effect for effect in effects if isinstance(effect, Stop))
    return stop


# --- pausing --------------------------------------------------------------------------------------


def test_a_wish_is_said_until_a_view_shows_it() -> None:
    standing, context = leadership_part_of()
    assert said(standing.pause(0.0, paused=True)) == [Capacity(1, 0)]
    assert standing.deadline_s == 5.0
    assert standing.overdue(4.9) == []
    assert said(standing.overdue(5.0)) == [Capacity(1, 0)]
    assert notes_of(standing.answered(D0, CapacityAnswer(1, ""))) == ["capacity.agreed"]
    assert said(standing.overdue(10.0)) == [Capacity(1, 0)], "agreed, but in no view yet"
    context.adopt(PAUSED)
    assert notes_of(standing.opened(11.0)) == ["node.paused"]
    assert standing.overdue(15.0) == []
    assert standing.deadline_s is None
    assert standing.capacity == 0


def test_a_view_that_shows_it_answers_nothing_the_leader_has_to() -> None:
    """An earlier wish may be on its way to the leader, who must hear that this one came later."""
    standing, _ = leadership_part_of(PAUSED)
    standing.opened(0.0)
    standing.pause(0.0, paused=False)
    assert said(standing.pause(1.0, paused=True)) == [Capacity(2, 0)]
    assert said(standing.overdue(6.0)) == [Capacity(2, 0)]


def test_an_answer_is_told_once_and_only_to_the_last_wish() -> None:
    standing, _ = leadership_part_of()
    standing.pause(0.0, paused=True)
    standing.pause(1.0, paused=False)
    assert standing.answered(D0, CapacityAnswer(1, "no")) == []
    assert standing.answered(STRANGER, CapacityAnswer(2, "no")) == []
    assert notes_of(standing.answered(D0, CapacityAnswer(2, ""))) == ["capacity.agreed"]
    assert standing.answered(D0, CapacityAnswer(2, "")) == []


def test_what_was_refused_is_not_said_again() -> None:
    standing, _ = leadership_part_of()
    standing.pause(0.0, paused=True)
    assert notes_of(standing.answered(D0, CapacityAnswer(1, "no"))) == ["capacity.refused"]
    assert standing.overdue(5.0) == []
    assert standing.answered(D0, CapacityAnswer(1, "no")) == []


# --- memory ---------------------------------------------------------------------------------------


def test_a_device_that_runs_out_of_memory_again_takes_one_less() -> None:
    """Once may be another program's doing."""
    standing, context = leadership_part_of()
    assert standing.out_of_memory(0.0) == []
    effects = standing.out_of_memory(1.0)
    assert notes_of(effects) == ["capacity.lowered"]
    assert said(effects) == [Capacity(1, 1)]
    assert said(standing.overdue(6.0)) == [Capacity(1, 1)]
    standing.answered(D0, CapacityAnswer(1, ""))
    context.adopt(view_of("d0", member("r1a", capacity=1), "r1b", version=2))
    standing.opened(7.0)
    assert standing.overdue(11.0) == []
    assert standing.out_of_memory(12.0) == [], "less than one is nothing"


def test_a_paused_node_comes_back_with_one_less() -> None:
    standing, _ = leadership_part_of()
    standing.pause(0.0, paused=True)
    standing.out_of_memory(1.0)
    assert notes_of(effects := standing.out_of_memory(1.0)) == ["capacity.lowered"]
    assert said(effects) == []
    assert said(standing.pause(2.0, paused=False)) == [Capacity(2, 1)]


@pytest.mark.parametrize(
    ("view", "node", "word"),
    [
        (view_of("d0", "r1a"), R1A, "stage 1 would stop"),
        (view_of("d0", "r1a", member("r1b", capacity=0)), R1A, "stage 1 would stop"),
        (BOTH, D0, "data node"),
    ],
)
def test_what_can_not_be_is_refused_without_asking(view: View, node: NodeId, word: str) -> None:
    standing, _ = leadership_part_of(view, node)
    (note,) = standing.pause(0.0, paused=True)
    assert notes_of([note]) == ["capacity.refused"]
    assert word in str(note)
    assert standing.deadline_s is None


def test_a_candidate_can_not_be_paused() -> None:
    standing, context = leadership_part_of()
    context.view = view_of("d0", "r1b", num_stages=2)
    assert notes_of(standing.pause(0.0, paused=True)) == ["capacity.refused"]
    assert standing.capacity == 2


# --- leaving --------------------------------------------------------------------------------------


def test_leaving_is_said_until_a_view_is_without_the_node() -> None:
    standing, _ = leadership_part_of()
    assert said(standing.drain(0.0, 60.0)) == [LEAVE]
    assert said(standing.overdue(5.0)) == [LEAVE]
    assert said(standing.overdue(10.0)) == [LEAVE]
    assert notes_of(standing.pause(11.0, paused=True)) == ["capacity.refused"]


def test_a_second_request_shortens_the_time_and_never_prolongs_it() -> None:
    standing, _ = leadership_part_of()
    assert standing.drain(0.0, math.inf)
    assert standing.drain(1.0, 20.0) == []
    standing.drain(2.0, 60.0)
    standing.drain(3.0, 1.0)
    assert isinstance(standing.overdue(4.0)[0], Send)
    assert stop_of(standing.overdue(4.0))
