"""What the leader agrees to, and what becomes of it when a view is made."""

from decod.ids import NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages import Capacity, CapacityAnswer
from decod.protocol.core.view import View
from decod.protocol.leadership.availability import Capacities
from tests.unit.protocol.cast import D0, R1A, R1B, R1C, member, sent, view_of

ALL = view_of("d0", "r1a", "r1b", "r1c")
NONE: set[NodeId] = set()


def ask(
    capacities: Capacities,
    node: NodeId,
    capacity: int,
    request_id: int = 1,
    *,
    view: View = ALL,
    leaving: set[NodeId] = NONE,
) -> str:
    """Ask for a capacity; returns why not, or nothing."""
    request = Capacity(request_id, capacity)
    effects = capacities.ask(view.members, view.by_id[node], request, leaving)
    return refusal_of(effects, node, request_id)


def refusal_of(effects: list[Effect], node: NodeId, request_id: int = 1) -> str:
    ((to, answer),) = sent(effects)
    assert isinstance(answer, CapacityAnswer)
    assert (to, answer.request_id) == (node, request_id)
    return answer.refusal


def applied(capacities: Capacities, view: View = ALL, leaving: set[NodeId] = NONE) -> str:
    """Return the capacities of the next view's relays, in order."""
    members = capacities.apply(view.members, leaving)
    assert [m.node_id for m in members] == [m.node_id for m in view.members]
    return " ".join(str(m.capacity) for m in members if m.stage_index)


def test_a_view_gets_what_members_want() -> None:
    capacities = Capacities()
    assert not capacities.pending(ALL)
    assert ask(capacities, R1B, 0) == ""
    assert capacities.pending(ALL)
    assert applied(capacities) == "2 0 2"
    assert capacities.opened(ALL) == []
    view = view_of(*capacities.apply(ALL.members, NONE), version=2)
    assert not capacities.pending(view)


def test_a_later_life_of_a_member_starts_without_the_wishes_of_the_earlier() -> None:
    """Where too few are left for a new view, its later life enters without ever being left out."""
    capacities = Capacities()
    assert ask(capacities, R1B, 0, 5) == ""
    capacities.forget(R1B)
    assert applied(capacities) == "2 2 2"
    assert ask(capacities, R1B, 0, 1) == ""
    assert applied(capacities) == "2 0 2"


def test_a_repeat_gets_the_first_answer_and_an_older_wish_none() -> None:
    capacities = Capacities()
    assert ask(capacities, R1A, 0) == ""
    assert ask(capacities, R1A, 0) == ""
    assert ask(capacities, R1A, 2, 2) == ""
    old = capacities.ask(ALL.members, ALL.by_id[R1A], Capacity(1, 0), NONE)
    assert old == []
    assert not capacities.pending(ALL)


def test_the_last_of_a_stage_is_refused_whoever_asks_first() -> None:
    capacities = Capacities()
    assert [ask(capacities, node, 0) for node in (R1C, R1A)] == ["", ""]
    assert "stage 1 would stop" in ask(capacities, R1B, 0)
    assert applied(capacities) == "0 2 0"


def test_who_is_leaving_does_not_keep_a_stage_going() -> None:
    assert "stage 1 would stop" in ask(Capacities(), R1A, 0, leaving={R1B, R1C})


def test_a_data_node_is_not_paused() -> None:
    view = view_of("d0", "d1", "r1a", "r1b")
    assert "data node" in ask(Capacities(), D0, 0, view=view)


def test_a_pause_is_taken_back_if_the_others_have_gone() -> None:
    capacities = Capacities()
    assert ask(capacities, R1A, 0) == ""
    alone = view_of("d0", "r1a", version=2)
    assert applied(capacities, alone) == "2"
    assert "would stop" in refusal_of(capacities.opened(alone), R1A)
    assert not capacities.pending(alone)
    assert "would stop" in ask(capacities, R1A, 0, view=alone), "a repeat hears it too"


def test_a_pause_is_taken_back_if_the_others_are_leaving() -> None:
    capacities = Capacities()
    assert ask(capacities, R1A, 0) == ""
    assert applied(capacities, leaving={R1B, R1C}) == "2 2 2"


def test_one_may_pause_because_another_takes_part_again() -> None:
    view = view_of("d0", "r1a", member("r1b", capacity=0))
    capacities = Capacities()
    assert ask(capacities, R1B, 2, view=view) == ""
    assert ask(capacities, R1A, 0, view=view) == ""
    assert applied(capacities, view) == "0 2"


def test_what_a_member_wanted_goes_with_it() -> None:
    """It begins anew when it comes back, and counts its wishes from 1 again."""
    capacities = Capacities()
    assert ask(capacities, R1A, 0, 7) == ""
    capacities.opened(view_of("d0", "r1b", "r1c", version=2))
    assert not capacities.pending(ALL)
    assert ask(capacities, R1A, 0, 1) == ""
