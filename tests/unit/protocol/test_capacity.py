"""What the leader agrees to, and what becomes of it when a view is made."""

from decod.ids import NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages import Capacity, CapacityAnswer
from decod.protocol.core.view import View
from decod.protocol.leadership.availability import Capacities
from tests.unit.protocol.cast import D0, R1A, sent, view_of

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


def test_a_repeat_gets_the_first_answer_and_an_older_wish_none() -> None:
    capacities = Capacities()
    assert ask(capacities, R1A, 0) == ""
    assert ask(capacities, R1A, 0) == ""
    assert ask(capacities, R1A, 2, 2) == ""
    old = capacities.ask(ALL.members, ALL.by_id[R1A], Capacity(1, 0), NONE)
    assert old == []
    assert not capacities.pending(ALL)


def test_a_data_node_is_not_paused() -> None:
    view = view_of("d0", "d1", "r1a", "r1b")
    assert "data node" in ask(Capacities(), D0, 0, view=view)
