"""Who is with a peer, and which of them coordinates."""

from decod.ids import NodeId
from decod.protocol.collaboration.company import Company
from decod.protocol.collaboration.loading import Past
from decod.protocol.collaboration.loop import PeerEffect, UseAddresses
from decod.protocol.core.effects import Note, Send
from decod.protocol.core.messages.round_messages import Farewell, Greeting, Height, Roll
from tests.unit.protocol.collaboration.rounds_cast import (
    CONFIG,
    START,
    A,
    B,
    C,
    D,
    entry,
    events_of,
    height,
    of,
    progress,
    roll,
    sent,
)


def company(node: NodeId = A, at: Height = START) -> Company:
    found = Company(node, f"{node}:1", Past(at), CONFIG)
    found.coordinate(0.0, 1)
    return found


def follower(node: NodeId, coordinator: NodeId, *others: NodeId, term: int = 1) -> Company:
    found = company(node)
    found.took_roll(0.0, coordinator, roll(coordinator, *others, term=term, at=height(1)))
    assert found.coordinator == coordinator
    return found


def greeting(
    sender: NodeId,
    *,
    at: Height = START,
    num_peers: int = 1,
    coordinator: NodeId | None = None,
) -> Greeting:
    first = coordinator or sender
    return Greeting(f"{sender}:1", at, (), num_peers, first, f"{first}:1")


def settle(peers: dict[NodeId, Company], effects: dict[NodeId, list[PeerEffect]]) -> int:
    """Deliver all messages, one of each peer at a time; return how many there were."""
    queue = [(sender, e) for sender, found in effects.items() for e in found]
    count = 0
    while queue:
        sender, effect = queue.pop(0)
        if not isinstance(effect, Send) or effect.to not in peers or effect.to == sender:
            continue
        count += 1
        assert count < 200, "they talk for ever"
        to, message = peers[effect.to], effect.message
        match message:
            case Greeting():
                found = to.greeted(0.0, sender, message)
            case Roll():
                found = to.took_roll(0.0, sender, message)
            case Farewell():
                found = to.parted(0.0, sender, message)
            case _:
                found = []
        queue += [(effect.to, each) for each in found]
    return count


# --- meeting --------------------------------------------------------------------------------------


def test_two_fresh_peers_that_greet_each_other_at_once_become_one_run() -> None:
    """Only their ids differ."""
    peers = {A: company(A), B: company(B)}
    settle(peers, {A: peers[A].found(B, "b:1"), B: peers[B].found(A, "a:1")})
    assert (peers[A].coordinator, peers[B].coordinator) == (B, B)
    assert {*peers[A].peers} == {*peers[B].peers} == {A, B}


def test_the_run_that_has_come_further_goes_on() -> None:
    peers = {A: company(A, height(5)), B: company(B, height(3))}
    settle(peers, {B: peers[B].found(A, "a:1")})
    assert peers[B].coordinator == A
    assert not peers[B].level


def test_of_runs_that_have_come_equally_far_the_larger_goes_on() -> None:
    peers = {A: company(A), B: company(B), C: company(C), D: company(D)}
    settle(peers, {A: peers[A].found(B, "b:1")})
    settle(peers, {C: peers[C].found(B, "b:1")})
    settle(peers, {D: peers[D].found(A, "a:1")})
    assert {each.coordinator for each in peers.values()} == {B}, "though D's id is the greatest"
    assert all({*each.peers} == {A, B, C, D} for each in peers.values())


def test_followers_of_two_runs_who_meet_bring_their_coordinators_together() -> None:
    """They don't greet each other for ever."""
    peers = {A: company(A), B: company(B), C: company(C), D: company(D)}
    settle(peers, {A: peers[A].found(B, "b:1"), C: peers[C].found(D, "d:1")})
    assert (peers[A].coordinator, peers[C].coordinator) == (B, D)
    count = settle(peers, {A: peers[A].found(C, "c:1"), C: peers[C].found(A, "a:1")})
    assert {each.coordinator for each in peers.values()} == {D}
    assert count < 40


def test_two_coordinators_that_take_the_same_peer_become_one_run() -> None:
    """Both have been found by it at once. It follows the first, and tells the other."""
    peers = {A: company(A), B: company(B), C: company(C)}
    settle(peers, {A: [*peers[A].found(B, "b:1"), *peers[A].found(C, "c:1")]})
    assert {each.coordinator for each in peers.values()} == {B}
    assert all({*each.peers} == {A, B, C} for each in peers.values())


def test_a_follower_that_is_greeted_sends_the_stranger_on() -> None:
    found = follower(A, B, A)
    effects = found.greeted(0.0, C, greeting(C))
    assert [e.to for e in of(Send, effects)] == [C]
    (message,) = sent(effects)
    assert isinstance(message, Greeting)
    assert (message.coordinator, message.coordinator_address) == (B, "b:1")


def test_a_follower_of_the_same_coordinator_is_no_news() -> None:
    found = follower(A, B, A, C)
    assert found.greeted(0.0, C, greeting(C, coordinator=B)) == []
    assert found.found(C, "c:1") == []


def test_who_takes_a_follower_for_its_coordinator_is_sent_on() -> None:
    """Its farewell was lost."""
    found = follower(A, B, A)
    effects = found.greeted(0.0, D, greeting(D, coordinator=A))
    assert sent(effects, D) == [Farewell(B, "b:1")]


def test_a_coordinator_forgets_who_follows_another_one() -> None:
    found = company(A)
    found.greeted(0.0, B, greeting(B, coordinator=A))
    assert B in found.peers
    effects = found.greeted(0.0, B, greeting(B, coordinator=C))
    assert B not in found.peers
    assert [e.to for e in of(Send, effects) if isinstance(e.message, Greeting)] == [C]


# --- yielding -------------------------------------------------------------------------------------


def test_a_coordinator_that_yields_tells_its_peers_where_to_go() -> None:
    found = company(A)
    for node in (B, C):
        found.greeted(0.0, node, greeting(node, coordinator=A))
    effects = found.took_roll(0.0, D, roll(D, A, at=height(9)))
    assert found.coordinator == D
    assert sent(effects, B) == sent(effects, C) == [Farewell(D, "d:1")]


def test_a_coordinator_that_has_come_further_does_not_yield() -> None:
    found = company(A, height(9))
    effects = found.took_roll(0.0, D, roll(D, A))
    assert found.coordinator == A
    assert isinstance(sent(effects, D)[0], Greeting)


def test_samples_that_the_others_do_not_have_are_reported_as_lost() -> None:
    past = Past(height(1))
    past.advance(height(2, "mine"), 40)
    past.advance(height(3, "mine"), 50)
    found = Company(A, "a:1", past, CONFIG)
    found.coordinate(0.0, 1)
    theirs = roll(D, A, at=height(4), past=(height(3).state_id, height(1).state_id))
    effects = found.took_roll(0.0, D, theirs)
    (note,) = [n for n in of(Note, effects) if n.event == "samples.lost"]
    assert dict(note.fields)["samples"] == found.num_lost == 90


def test_who_is_merely_behind_loses_nothing() -> None:
    found = company(A, height(1))
    effects = found.took_roll(0.0, D, roll(D, A, at=height(3), past=(height(1).state_id,)))
    assert (found.coordinator, found.num_lost) == (D, 0)
    assert "samples.lost" not in events_of(effects)


def test_a_roll_that_lacks_its_receiver_makes_it_come_back() -> None:
    """The coordinator has taken it for lost."""
    found = follower(A, B, A, C)
    found.take_moved()
    effects = found.took_roll(1.0, B, roll(B, C, version=3, at=height(1)))
    assert isinstance(sent(effects, B)[0], Greeting)
    assert found.take_moved(), "the round goes on without it: so does its loop"


def test_a_strangers_roll_that_lacks_its_receiver_changes_nothing() -> None:
    found = company(A)
    assert found.took_roll(0.0, D, roll(D, C, at=height(9))) == []
    assert found.coordinator == A


def test_an_old_roll_of_the_coordinator_changes_nothing() -> None:
    found = follower(A, B, A, C)
    assert found.took_roll(1.0, B, roll(B, A, version=1)) == []
    assert {*found.peers} == {A, B, C}


# --- losing the coordinator -----------------------------------------------------------------------


def test_the_oldest_that_is_left_succeeds() -> None:
    found = follower(A, B, A, C)
    effects = found.succeed(10.0)
    assert (found.coordinator, found.term) == (A, 2)
    assert events_of(effects)[:2] == ["coordinator.lost", "coordinator.succeeded"]
    (message,) = {m for m in sent(effects, C) if isinstance(m, Roll)}
    assert [each.node_id for each in message.peers] == [A, C]


def test_the_others_look_to_the_oldest() -> None:
    found = follower(C, B, A, C)
    found.succeed(10.0)
    assert found.coordinator == A
    assert found.is_courting
    found.succeed(20.0)
    assert found.coordinator == C, "that one is silent as well"


def test_a_peer_that_is_asked_succeeds_only_if_it_misses_the_coordinator_too() -> None:
    found = follower(A, B, A, C)
    assert found.succeed_if_asked(1.0, C, progress(0, term=2)) == []
    assert found.coordinator == B
    assert found.succeed_if_asked(9.0, D, progress(0, term=2)) == [], "a stranger"
    assert found.succeed_if_asked(9.0, C, progress(0, term=2))
    assert found.coordinator == A


def test_a_follower_that_is_ahead_of_the_successor_takes_its_place() -> None:
    """The last coordinator has told only this one that an average counts."""
    past = Past(height(1))
    found = Company(C, "c:1", past, CONFIG)
    found.coordinate(0.0, 1)
    found.took_roll(0.0, B, roll(B, A, C, at=height(1)))
    past.advance(height(2), 32)
    found.succeed(10.0)
    assert found.coordinator == A
    effects = found.took_roll(10.5, A, roll(A, C, term=2, at=height(1)))
    assert (found.coordinator, found.term) == (C, 3)
    (message,) = sent(effects, A)
    assert isinstance(message, Greeting)
    assert message.height == height(2)


def test_whoever_shows_signs_of_life_is_not_lost() -> None:
    found = follower(A, B, A, C)
    assert found.unreached(1.0, B) == []
    assert found.unreached(3.0, C) == [], "that is not the coordinator"
    assert events_of(found.unreached(3.0, B))[0] == "coordinator.lost"


def test_a_coordinator_drops_a_peer_that_it_can_not_reach_and_has_not_heard() -> None:
    found = company(A)
    found.greeted(0.0, B, greeting(B, coordinator=A))
    assert found.unreached(1.0, B) == []
    assert events_of(found.unreached(3.0, B)) == ["peer.lost"]


# --- leaving --------------------------------------------------------------------------------------


def test_a_follower_says_goodbye_to_its_coordinator_and_a_coordinator_to_all() -> None:
    assert [e.to for e in of(Send, follower(A, B, A, C).leave())] == [B]
    found = company(A)
    for node in (B, C):
        found.greeted(0.0, node, greeting(node, coordinator=A))
    assert [e.to for e in of(Send, found.leave())] == [B, C]


def test_a_farewell_without_a_successor_is_followed_by_the_oldest() -> None:
    found = follower(A, B, A, C)
    found.parted(1.0, B, Farewell())
    assert found.coordinator == A


def test_a_farewell_with_a_successor_leads_there() -> None:
    """Whether the successor was in the roll or not."""
    for successor in (C, D):
        found = follower(A, B, A, C)
        effects = found.parted(1.0, B, Farewell(successor, f"{successor}:1"))
        (message,) = sent(effects, successor)
        assert isinstance(message, Greeting)
        assert message.coordinator == A, "until the successor has answered"


def test_a_farewell_that_names_the_receiver_makes_it_coordinate_all() -> None:
    """The last coordinator is one of them: only its loop stands still."""
    peer = follower(A, B, A, C)
    effects = peer.parted(1.0, B, Farewell(A, "a:1"))
    assert peer.coordinating is not None
    assert (peer.term, {*peer.peers}) == (2, {A, B, C})
    assert {e.to for e in effects if isinstance(e, Send)} >= {B, C}
    assert "coordinator.succeeded" in events_of(effects)


def test_a_farewell_of_anybody_else_changes_nothing() -> None:
    found = follower(A, B, A, C)
    assert found.parted(1.0, C, Farewell()) == []
    assert found.coordinator == B


# --- addresses ------------------------------------------------------------------------------------


def test_addresses_are_told_once_they_change() -> None:
    found = follower(A, B, A, entry(C))
    assert found.use_addresses() == [UseAddresses(((A, "a:1"), (B, "b:1"), (C, "c:1")))]
    assert found.use_addresses() == []
    assert found.addresses == ("b:1", "a:1", "c:1")


def test_few_strangers_are_remembered() -> None:
    found = company(A)
    for number in range(100):
        found.found(NodeId(f"n{number}"), f"n{number}:1")
    (told,) = found.use_addresses()
    assert isinstance(told, UseAddresses)
    assert len(told.addresses) == 32
