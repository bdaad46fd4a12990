"""What the leader agrees to, and what becomes of it when a view is made."""

from decod.ids import NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages.membership_messages import Capacity, CapacityAnswer
from decod.protocol.core.view import View
from decod.protocol.leadership.availability import Capacities
from tests.unit.protocol.cast import D0, R1A, R1B, R1C, sent, view_of

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


def test_the_last_of_a_stage_is_refused_whoever_asks_first() -> None:
    capacities = Capacities()
    assert [ask(capacities, node, 0) for node in (R1C, R1A)] == ["", ""]
    assert "stage 1 would stop" in ask(capacities, R1B, 0)
    assert applied(capacities) == "0 2 0"


def test_a_data_node_is_not_paused() -> None:
    view = view_of("d0", "d1", "r1a", "r1b")
    assert "data node" in ask(Capacities(), D0, 0, view=view)
