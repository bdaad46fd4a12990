"""Sessions: two members of a run understand each other, and nobody else does."""

from dataclasses import replace

import pytest

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.membership.credential import parse_statement
from decod.membership.papers import Membership
from decod.membership.statements import Authors
from decod.net import dht_datagram
from decod.net.dht_datagram import (
    GREETING_SIZE_BYTES,
    PING_SIZE_BYTES,
    Session,
    Sessions,
    new_nonce,
)
from tests.support.dht import NOW_S, RUN, Clock, member
from tests.support.members import data_node, host_key, new_volunteer, volunteer

HEAD = b"head"


def sessions_of(
    by: Membership,
    clock: Clock | None = None,
    run_id: RunId = RUN,
    banned: set[NodeId] | None = None,
) -> Sessions:
    clock, out = clock or Clock(), banned or set()
    return Sessions(by, run_id, clock, Authors(by.root, clock, lambda each: each not in out))


def met(one: Sessions, other: Sessions) -> tuple[Session, Session]:
    """Returns what each of two calls its session with the other."""
    return one.meet(other.introduction()), other.meet(one.introduction())


def carries(sender: Session, receiver: Session) -> bool:
    """Whether a text that is encrypted in one session can be read in another."""
    nonce = new_nonce()
    return receiver.decrypt(nonce, sender.encrypt(nonce, b"text", HEAD), HEAD) == b"text"


def test_two_members_understand_each_other() -> None:
    ones, others = sessions_of(member(0)), sessions_of(member(5))
    one, other = met(ones, others)
    assert (one.node_id, other.node_id) == (member(5).node_id, member(0).node_id)
    assert (one.tag, other.tag) == (others.tag, ones.tag)
    assert carries(one, other)
    assert carries(other, one)
    nonce = new_nonce()
    encrypted = one.encrypt(nonce, b"text", HEAD)
    assert b"text" not in encrypted
    for altered in (
        other.decrypt(nonce, encrypted[:-1] + bytes([encrypted[-1] ^ 1]), HEAD),
        other.decrypt(nonce, encrypted, b"Head"),
        other.decrypt(new_nonce(), encrypted, HEAD),
        other.decrypt(nonce, b"", HEAD),
        other.decrypt(nonce[:-1], encrypted, HEAD),
        other.decrypt(b"", b"", HEAD),
        one.decrypt(nonce, encrypted, HEAD),
    ):
        assert altered is None


def test_nobody_else_does() -> None:
    ones, others, thirds = (sessions_of(member(i)) for i in (0, 5, 6))
    one, _ = met(ones, others)
    third, _ = met(thirds, ones)
    assert not carries(one, third)
    again, _ = met(sessions_of(member(5)), ones)
    assert not carries(one, again), "it has begun anew, with another key"


def test_who_takes_anothers_key_for_its_own_gets_nothing() -> None:
    """A member can sign an introduction with a key that it has only seen."""
    ones, others = sessions_of(member(0)), sessions_of(member(5))
    one, other = met(ones, others)
    key = parse_statement(others.introduction()).body
    said = volunteer("liar").state("dht introduction", RUN.encode() + key)
    false = ones.meet(replace(said, body=key).to_bytes())
    assert false.node_id == volunteer("liar").node_id
    assert not carries(false, other), "the other end knows whom it talks to"
    assert ones.find(others.tag) is one, "nor is the true session displaced"


def introduction(by: Membership, kind: str = "dht introduction", run_id: RunId = RUN) -> bytes:
    key = bytes(range(32))
    return replace(by.state(kind, run_id.encode() + key), body=key).to_bytes()


REFUSED = {
    "of another root": introduction(data_node("other", host_key("another root"))),
    "of another run": introduction(member(5), run_id=RunId("x" * 26)),
    "of another kind": introduction(member(5), kind="dht record"),
    "expired": introduction(new_volunteer("late", now_s=NOW_S - 25 * 3600)),
    "its own": introduction(member(0)),
    "banned": introduction(member(7)),
    "with another's credential": introduction(member(5)).replace(
        member(5).host.public, member(6).host.public
    ),
    "with a key that has no secret": replace(
        member(5).state("dht introduction", RUN.encode() + bytes(32)), body=bytes(32)
    ).to_bytes(),
    "with a short key": replace(
        member(5).state("dht introduction", RUN.encode() + b"key"), body=b"key"
    ).to_bytes(),
    "nothing": b"",
    "rubbish": b"\xff" * 100,
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_no_members_introduction_is_refused(how: str) -> None:
    sessions = sessions_of(member(0), banned={member(7).node_id})
    assert sessions.known(REFUSED[how]) is None
    with pytest.raises(MalformedMessageError):
        sessions.meet(REFUSED[how])
    assert len(sessions) == 0


def test_a_session_ends_with_the_credential_and_goes_on_with_a_new_one() -> None:
    clock = Clock()
    late = new_volunteer("late", now_s=NOW_S)
    ones, theirs = sessions_of(member(0), clock), sessions_of(late, clock)
    session, _ = met(ones, theirs)
    ones.answered(session)
    old = theirs.introduction()
    clock.now_s += 25 * 3600
    assert ones.find(theirs.tag) is None
    assert ones.of(theirs.kademlia_id) is None
    assert ones.known(old) is None
    late.adopt(new_volunteer("late", now_s=clock.now_s).papers)
    assert theirs.introduction() != old
    assert ones.meet(theirs.introduction()) is session, "the keys are the same"
    assert ones.find(theirs.tag) is session


def test_repeated_introductions_displace_no_session_that_works() -> None:
    """Whoever has heard a node's old introductions may repeat them."""
    ones = sessions_of(member(0))
    old = [sessions_of(member(5)).introduction() for _ in range(20)]
    session = ones.meet(sessions_of(member(5)).introduction())
    ones.answered(session)
    for each in old:
        ones.meet(each)
    assert ones.of(session.kademlia_id) is session
    assert ones.find(session.tag) is session
    assert len(ones._by_tag) == 2, "one more is kept, in case the node has begun anew"
    newest = ones.find(ones.meet(old[0]).tag)
    assert newest is not None
    ones.answered(newest)
    assert ones.of(session.kademlia_id) is newest
    assert ones.find(session.tag) is None


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_datagram, "_PEERS_MAX", 3)
    ones = sessions_of(member(0))
    met_in_turn = [ones.meet(sessions_of(member(i)).introduction()) for i in range(4, 7)]
    assert ones.find(met_in_turn[0].tag) is not None, "it is used"
    ones.meet(sessions_of(member(7)).introduction())
    assert len(ones) == len(ones._by_tag) == 3
    assert [ones.find(each.tag) is not None for each in met_in_turn] == [True, False, True]


def test_an_introduction_and_its_proof_fit_into_a_greeting() -> None:
    size_bytes = len(sessions_of(volunteer("relay")).introduction())
    assert 1 + 12 + 2 + size_bytes + 12 + 16 + PING_SIZE_BYTES < GREETING_SIZE_BYTES - 10
