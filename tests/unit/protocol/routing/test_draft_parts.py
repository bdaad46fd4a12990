"""The parts of the search, one at a time: walks, links, changes."""

from random import Random

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages.routing_messages import (
    ChangeAnswer,
    ChangeDecision,
    RequestChange,
)
from decod.protocol.core.residual import (
    ENTRANCE,
    EXIT,
    Improvement,
    Place,
)
from decod.protocol.flows.negotiation.draft_changes import Changes, DraftLink, DraftLinks
from decod.protocol.flows.position import Position

A, B, C, D, E, F = (NodeId(name) for name in "abcdef")
COSTS = {(A, C): 8.0, (B, D): 3.0, (A, D): 6.0, (B, C): 6.0}
EXCHANGE: tuple[Place, ...] = ((A, EXIT), (D, ENTRANCE), (B, EXIT), (C, ENTRANCE))
"""From A forth to D, back to B, forth to C, and back to A: A and B exchange next hops."""


def position(
    node_id: NodeId, *, previous: str = "", following: str = "", capacity: int = 2
) -> Position:
    return Position(
        node_id=node_id,
        data=False,
        capacity=capacity,
        num_stages=3,
        previous=[NodeId(name) for name in previous],
        next=[NodeId(name) for name in following],
        data_peers=[],
        cost_to=lambda peer: COSTS.get((node_id, peer), 1.0),
        cost_from=lambda peer: COSTS.get((peer, node_id), 1.0),
    )


def agreed(units: int) -> DraftLink:
    return DraftLink(units, peer_units=units)


def changes_of_b() -> Changes:
    """Return B's part: a unit comes from F and goes on to D; there is a link to C too."""
    links = DraftLinks({C: agreed(0), D: agreed(1)}, {F: agreed(1)})
    return Changes(position(B, previous="f", following="cd"), links, 1, Random(0))


def changes_of_a() -> Changes:
    links = DraftLinks({C: agreed(1), D: agreed(0)}, {F: agreed(1)})
    return Changes(position(A, previous="f", following="cd"), links, 1, Random(0))


def messages(effects: list[Effect], kind: type) -> list[object]:
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message for message in sent if isinstance(message, kind)]


# --- changes ----------------------------------------------------------------------------------


def test_a_request_that_comes_after_its_decision_is_ignored() -> None:
    changes = changes_of_b()
    changes.decided(A, ChangeDecision(1, 7, 0))
    assert changes.requested(A, RequestChange(1, 7, EXCHANGE, is_closed=True, units=1)) == []
    assert not changes.any_reserved


def test_an_asker_loses_patience_and_keeps_to_its_decision() -> None:
    """Answers that come after it are told the decision again."""
    changes = changes_of_a()
    sent = changes.ask(Improvement(EXCHANGE, -5.0, 1, closed=True))
    assert [effect.to for effect in sent if isinstance(effect, Send)] == [B, C, D]
    decisions = [message for _ in range(10) for message in messages(changes.tick(), ChangeDecision)]
    assert decisions == [ChangeDecision(1, 1, 0)] * 3
    assert not changes.any_reserved
    late = changes.answered(B, ChangeAnswer(1, 1, 1, -20.0))
    assert messages(late, ChangeDecision) == [ChangeDecision(1, 1, 0)]
    refused = changes.take_refused()
    assert refused is not None
    assert refused.places == EXCHANGE
