"""Who is with a peer, and which of them coordinates."""

import pytest

from decod.ids import NodeId
from decod.protocol.collaboration.company import Company
from decod.protocol.collaboration.loading import Past
from decod.protocol.collaboration.loop import PeerSink, UseAddresses
from decod.protocol.core.effects import Note, Send
from decod.protocol.core.messages.round_messages import (
    Farewell,
    Greeting,
    Height,
    PeerEntry,
    Roll,
)
from tests.unit.protocol.collaboration.rounds_cast import (
    CONFIG,
    START,
    A,
    B,
    C,
    D,
    entry,
    height,
    of,
    roll,
    sent,
)


@pytest.fixture
def out() -> PeerSink:
    return PeerSink()


def company(out: PeerSink, node: NodeId = A, past: Past | None = None) -> Company:
    found = Company(PeerEntry(node, f"{node}:1", level=True), past or Past(START), CONFIG, out)
    found.coordinate(0.0, 1)
    return found


def follower(out: PeerSink, node: NodeId, coordinator: NodeId, *others: NodeId) -> Company:
    found = company(out, node)
    found.took_roll(0.0, coordinator, roll(coordinator, *others, at=height(1)))
    assert found.coordinator == coordinator
    out.taken()
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


# --- meeting --------------------------------------------------------------------------------------


def test_a_follower_that_is_greeted_sends_the_stranger_on(out: PeerSink) -> None:
    found = follower(out, A, B, A)
    found.greeted(0.0, C, greeting(C))
    effects = out.taken()
    assert [e.to for e in of(Send, effects)] == [C]
    (message,) = sent(effects)
    assert isinstance(message, Greeting)
    assert (message.coordinator, message.coordinator_address) == (B, "b:1")


def test_who_takes_a_follower_for_its_coordinator_is_sent_on(out: PeerSink) -> None:
    """Its farewell was lost."""
    found = follower(out, A, B, A)
    found.greeted(0.0, D, greeting(D, coordinator=A))
    assert sent(out.taken(), D) == [Farewell(B, "b:1")]


# --- yielding -------------------------------------------------------------------------------------


def test_of_two_coordinators_one_yields_even_if_one_has_taken_the_other_in(out: PeerSink) -> None:
    """With D counted, C has more peers than D; without it, as many, and then D comes first."""
    c, d = company(out, C), company(out, D)
    for node in (A, D):
        c.greeted(0.0, node, greeting(node))
    d.greeted(0.0, B, greeting(B))
    out.taken()
    c.greeted(0.1, D, greeting(D, num_peers=2))
    (yielding,) = sent(out.taken(), D)
    assert isinstance(yielding, Greeting)
    d.greeted(0.2, C, yielding)
    (told,) = [message for message in sent(out.taken(), C) if isinstance(message, Roll)]
    c.took_roll(0.3, D, told)
    assert c.coordinator == D


def test_samples_that_the_others_do_not_have_are_reported_as_lost(out: PeerSink) -> None:
    past = Past(height(1))
    past.advance(height(2, "mine"), 40)
    past.advance(height(3, "mine"), 50)
    found = company(out, A, past)
    theirs = roll(D, A, at=height(4), past=(height(3).state_id, height(1).state_id))
    found.took_roll(0.0, D, theirs)
    (note,) = [n for n in of(Note, out.taken()) if n.event == "samples.lost"]
    assert dict(note.fields)["samples"] == found.num_lost == 90


def test_a_roll_that_lacks_its_receiver_makes_it_come_back(out: PeerSink) -> None:
    """The coordinator has taken it for lost."""
    found = follower(out, A, B, A, C)
    found.take_moved()
    found.took_roll(1.0, B, roll(B, C, version=3, at=height(1)))
    assert isinstance(sent(out.taken(), B)[0], Greeting)
    assert found.take_moved(), "the round goes on without it: so does its loop"


def test_a_strangers_roll_that_lacks_its_receiver_changes_nothing(out: PeerSink) -> None:
    found = company(out, A)
    found.took_roll(0.0, D, roll(D, C, at=height(9)))
    assert out.taken() == []
    assert found.coordinator == A


def test_an_old_roll_of_the_coordinator_changes_nothing(out: PeerSink) -> None:
    found = follower(out, A, B, A, C)
    found.took_roll(1.0, B, roll(B, A, version=1))
    assert out.taken() == []
    assert {*found.peers} == {A, B, C}


# --- losing the coordinator -----------------------------------------------------------------------


def test_a_follower_that_is_ahead_of_the_successor_takes_its_place(out: PeerSink) -> None:
    """The last coordinator has told only this one that an average counts."""
    past = Past(height(1))
    found = company(out, C, past)
    found.took_roll(0.0, B, roll(B, A, C, at=height(1)))
    past.advance(height(2), 32)
    found.succeed(10.0)
    assert found.coordinator == A
    out.taken()
    found.took_roll(10.5, A, roll(A, C, term=2, at=height(1)))
    assert (found.coordinator, found.term) == (C, 3)
    (message,) = sent(out.taken(), A)
    assert isinstance(message, Greeting)
    assert message.height == height(2)


# --- leaving --------------------------------------------------------------------------------------


def test_a_follower_says_goodbye_to_its_coordinator_and_a_coordinator_to_all(out: PeerSink) -> None:
    follower(out, A, B, A, C).leave()
    assert [e.to for e in of(Send, out.taken())] == [B]
    found = company(out, A)
    for node in (B, C):
        found.greeted(0.0, node, greeting(node, coordinator=A))
    out.taken()
    found.leave()
    assert [e.to for e in of(Send, out.taken())] == [B, C]


# --- addresses ------------------------------------------------------------------------------------


def test_addresses_are_told_once_they_change(out: PeerSink) -> None:
    found = follower(out, A, B, A, entry(C))
    found.use_addresses()
    assert out.taken() == [UseAddresses(((A, "a:1"), (B, "b:1"), (C, "c:1")))]
    found.use_addresses()
    assert out.taken() == []
    assert found.addresses == ("b:1", "a:1", "c:1")


def test_few_strangers_are_remembered(out: PeerSink) -> None:
    found = company(out, A)
    for number in range(100):
        found.found(NodeId(f"n{number}"), f"n{number}:1")
    out.taken()
    found.use_addresses()
    (told,) = out.taken()
    assert isinstance(told, UseAddresses)
    assert len(told.addresses) == 32
