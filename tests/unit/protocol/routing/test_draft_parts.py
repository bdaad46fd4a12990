"""The parts of the search, one at a time: walks, links, changes."""

from random import Random

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages.routing_messages import (
    ChangeAnswer,
    ChangeDecision,
    DraftOffer,
    DraftUnits,
    RequestChange,
    RequestUnits,
    ResidualWalk,
    UnitsAnswer,
)
from decod.protocol.core.residual import (
    ENTRANCE,
    EXIT,
    Improvement,
    Place,
    Walk,
    change_at,
    closed,
    empty_walk,
)
from decod.protocol.flows.negotiation.draft import Draft, DraftBuilding
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


# --- walks ------------------------------------------------------------------------------------


def test_request_change_of_the_paper_is_a_walk_of_four_links() -> None:
    """Links of cost 8 and 3 become two of 6: that alone saves nothing, so A > C costs 10 here."""
    walk = empty_walk((A, EXIT), units=5).to((D, ENTRANCE), 6.0, 9).to((B, EXIT), -3.0, 2)
    walk = walk.to((C, ENTRANCE), 6.0, 9)
    detour = closed(walk, (A, EXIT), -10.0, 1)
    assert detour == Improvement(EXCHANGE, -1.0, 1, closed=True)
    at_a = change_at(A, EXCHANGE, is_closed=True)
    assert (at_a.outward, at_a.inward) == ({D: 1, C: -1}, {})
    at_d = change_at(D, EXCHANGE, is_closed=True)
    assert (at_d.outward, at_d.inward) == ({}, {A: 1, B: -1})
    assert at_a.net_out == at_d.net_in == 0


def test_request_redirect_of_the_paper_goes_through_a_node_with_room() -> None:
    """A unit from A by B to D (11) goes by the idle C instead (9)."""
    places: tuple[Place, ...] = (
        (A, EXIT), (C, ENTRANCE), (C, EXIT), (D, ENTRANCE), (B, EXIT), (B, ENTRANCE),
    )  # fmt: skip
    walk = empty_walk(places[0], units=9)
    for place, cost in zip(places[1:], (4.0, 0.0, 5.0, -6.0, 0.0), strict=True):
        walk = walk.to(place, cost, 3)
    detour = closed(walk, (A, EXIT), -5.0, 1)
    assert (detour.places, detour.cost, detour.units) == (places, 9.0 - 11.0, 1)
    idle = change_at(C, places, is_closed=True)
    assert (idle.outward, idle.inward) == ({D: 1}, {A: 1})
    left = change_at(B, places, is_closed=True)
    assert (left.outward, left.inward) == ({D: -1}, {A: -1})


def test_a_cycle_leaves_out_what_led_to_it() -> None:
    walk = empty_walk((F, EXIT), units=4, cost=-2.0).to((A, ENTRANCE), 1.0, 4)
    walk = walk.to((A, EXIT), 0.0, 3).to((C, ENTRANCE), 5.0, 4)
    detour = closed(walk, (A, ENTRANCE), -7.0, 2)
    assert detour.places == walk.places[1:]
    assert (detour.cost, detour.units) == (-2.0, 2)


# --- links ------------------------------------------------------------------------------------


def test_what_was_said_before_a_change_is_stale() -> None:
    links = DraftLinks({C: agreed(2)}, {})
    links.outward[C].grow(1)
    stale = DraftUnits(1, outward=False, link_version=0, units=1, agreed=False)
    assert not links.said(C, stale, busy=False)
    assert (links.outward[C].units, links.outward[C].agreed) == (3, True)


def test_links_take_the_smaller_number_but_not_while_a_promise_rests_on_it() -> None:
    links = DraftLinks({C: agreed(2)}, {})
    lower = DraftUnits(1, outward=False, link_version=0, units=1, agreed=False)
    assert not links.said(C, lower, busy=True), "the two would answer each other for ever"
    assert (links.outward[C].units, links.outward[C].agreed) == (2, False)
    assert links.said(C, lower, busy=False)
    assert (links.outward[C].units, links.outward[C].agreed) == (1, True)


def test_ends_that_did_not_agree_do_not_agree_after_growing() -> None:
    """Both count a version more; if growing meant agreeing, they would differ for ever."""
    unspoken, differing = DraftLink(1, peer_units=None), DraftLink(3, peer_units=1)
    unspoken.grow(1)
    differing.grow(1)
    assert not unspoken.agreed
    assert not differing.agreed
    assert (unspoken.units, differing.units, differing.peer_units) == (2, 4, 2)


# --- changes ----------------------------------------------------------------------------------


def test_a_reserved_unit_is_not_promised_twice() -> None:
    changes = changes_of_b()
    first = changes.requested(A, RequestChange(1, 7, EXCHANGE, is_closed=True, units=1))
    assert messages(first, ChangeAnswer) == [ChangeAnswer(1, 7, 1, 6.0 - 3.0)]
    second = changes.requested(E, RequestChange(1, 1, EXCHANGE, is_closed=True, units=1))
    assert messages(second, ChangeAnswer) == [ChangeAnswer(1, 1, 0, 0.0)]
    assert changes.links.outward[D].reserved == 1


def test_a_repeated_request_reserves_once_and_gets_the_same_answer() -> None:
    changes = changes_of_b()
    request = RequestChange(1, 7, EXCHANGE, is_closed=True, units=1)
    assert changes.requested(A, request) == changes.requested(A, request)
    assert changes.links.outward[D].reserved == 1


def test_a_repeated_decision_is_carried_out_once() -> None:
    changes = changes_of_b()
    changes.requested(A, RequestChange(1, 7, EXCHANGE, is_closed=True, units=1))
    for _ in range(2):
        changes.decided(A, ChangeDecision(1, 7, 1))
    links = changes.links.outward
    assert (links[C].units, links[D].units, links[D].reserved) == (1, 0, 0)


def test_a_request_that_comes_after_its_decision_is_ignored() -> None:
    changes = changes_of_b()
    changes.decided(A, ChangeDecision(1, 7, 0))
    assert changes.requested(A, RequestChange(1, 7, EXCHANGE, is_closed=True, units=1)) == []
    assert not changes.any_reserved


def test_a_participant_repeats_its_answer_until_it_is_told() -> None:
    changes = changes_of_b()
    changes.requested(A, RequestChange(1, 7, EXCHANGE, is_closed=True, units=1))
    said = [len(messages(changes.tick(), ChangeAnswer)) for _ in range(12)]
    assert sum(said) == 3
    changes.decided(A, ChangeDecision(1, 7, 0))
    assert not any(changes.tick() for _ in range(12))


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


def test_a_change_that_saves_nothing_by_what_nodes_measure_is_dropped() -> None:
    """The walk promised 5; 6 + 6 is more than 8 + 3."""
    changes = changes_of_a()
    changes.ask(Improvement(EXCHANGE, -5.0, 1, closed=True))
    changes.answered(C, ChangeAnswer(1, 1, 1, 0.0))
    changes.answered(D, ChangeAnswer(1, 1, 1, 0.0))
    last = changes.answered(B, ChangeAnswer(1, 1, 1, 3.0))
    assert messages(last, ChangeDecision) == [ChangeDecision(1, 1, 0)] * 3
    assert changes.links.outward[C].units == 1


def test_a_unit_may_be_left_missing_where_another_could_come() -> None:
    """From D back to B and forth to C: D gives a unit up, if it knows of one that could come."""
    links = DraftLinks({E: agreed(1)}, {A: agreed(0), B: agreed(1)})
    changes = Changes(position(D, previous="ab", following="e"), links, 1, Random(0))
    part: tuple[Place, ...] = ((D, ENTRANCE), (B, EXIT), (C, ENTRANCE))
    request = RequestChange(1, 1, part, is_closed=False, units=1)
    assert messages(changes.requested(C, request), ChangeAnswer) == [ChangeAnswer(1, 1, 0, 0.0)]
    changes.supplied = frozenset([ENTRANCE])
    request = RequestChange(1, 2, part, is_closed=False, units=1)
    assert messages(changes.requested(C, request), ChangeAnswer) == [ChangeAnswer(1, 2, 1, 0.0)]
    changes.decided(C, ChangeDecision(1, 2, 1))
    assert changes.num_missing == 1


def test_a_walk_that_was_refused_is_asked_for_in_part() -> None:
    """Half of it, as near as it can be cut; all of it again when that has been granted."""
    links = DraftLinks({F: agreed(1)}, {E: agreed(0)})
    changes = Changes(position(C, previous="e", following="f"), links, 1, Random(0))
    passed = [(node_id, side) for node_id in (B, D, E) for side in (ENTRANCE, EXIT)]
    walk: tuple[Place, ...] = ((A, EXIT), *passed, (C, ENTRANCE))
    detour = Improvement(walk, -5.0, 1, closed=False)
    asked = [messages(changes.ask(detour), RequestChange)[0]]
    changes.answered(B, ChangeAnswer(1, 1, 0, 0.0))
    asked.append(messages(changes.ask(detour), RequestChange)[0])
    changes.answered(D, ChangeAnswer(1, 2, 1, 1.0))
    changes.answered(E, ChangeAnswer(1, 2, 1, 1.0))
    assert changes.num_missing == 0
    assert [request.places for request in asked] == [walk, walk[4:]]  # type: ignore[attr-defined]


def test_a_refused_walk_is_left_alone_also_when_it_has_been_taken_back_and_told_again() -> None:
    """Else two that are in each other's way could meet again and again, in step."""
    draft = Draft(position(B, previous="f", following="cd"), 1, Random(0))
    walk = Walk(((A, EXIT), (C, ENTRANCE)), (0.0, -3.0), 1)
    other = Walk(((A, EXIT), (C, ENTRANCE)), (0.0, -4.0), 1)
    draft.received(C, ResidualWalk(1, 1, ENTRANCE, walk))
    assert list(draft._walks(C, ENTRANCE)) == [walk]
    draft._ban(Improvement(((A, EXIT), (C, ENTRANCE), (B, EXIT)), -3.0, 1, closed=True))
    draft.received(C, ResidualWalk(1, 2, ENTRANCE, None))
    draft.received(C, ResidualWalk(1, 3, ENTRANCE, walk))
    assert list(draft._walks(C, ENTRANCE)) == []
    draft.received(C, ResidualWalk(1, 4, ENTRANCE, other))
    assert list(draft._walks(C, ENTRANCE)) == [other]


# --- building ---------------------------------------------------------------------------------


def building() -> DraftBuilding:
    """Return a relay whose one next node offers three units."""
    place = position(B, previous="f", following="d")
    links = DraftLinks({D: DraftLink()}, {F: DraftLink()})
    changes = Changes(place, links, 1, Random(0))
    build = DraftBuilding(place, links, changes, 1)
    build.received(D, DraftOffer(1, 1, 3, 2.0))
    return build


def test_a_node_asks_for_all_it_has_room_for_at_once() -> None:
    build = building()
    assert messages(build.tick(), RequestUnits) == [RequestUnits(1, 1, 2)]
    assert build.changes.expected == 2
    build.received(D, UnitsAnswer(1, 1, 1))
    assert (build.links.outward[D].units, build.changes.expected) == (1, 0)


def test_a_request_is_repeated_until_it_is_answered_even_after_the_end() -> None:
    """Room is kept for the answer; were it never to come, that room would be lost."""
    build = building()
    build.tick()
    build.ticks_left = 0
    repeats = [message for _ in range(8) for message in messages(build.tick(), RequestUnits)]
    assert repeats == [RequestUnits(1, 1, 2)] * 2


def test_a_repeated_request_for_units_gets_the_same_answer() -> None:
    build = building()
    build.links.outward[D].grow(2)
    build.changes.expected = 0
    build.received(F, RequestUnits(1, 5, 2))
    answers = messages(build.tick(), UnitsAnswer)
    again = messages(build.received(F, RequestUnits(1, 5, 2)), UnitsAnswer)
    assert answers == again == [UnitsAnswer(1, 5, 2)]
    assert build.links.inward[F].units == 2
