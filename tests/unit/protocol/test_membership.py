"""Heartbeats, doubts, and a node's own connection to the run."""

from collections.abc import Set
from dataclasses import replace

import pytest

from decod.ids import Iteration, NodeId
from decod.protocol.core.effects import Note, Send, Stop, StopReason
from decod.protocol.core.events import Received
from decod.protocol.core.messages import CatchUp, Heartbeat, Ping, Pong, Suspect
from decod.protocol.links.liveness import Liveness
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R1B,
    R2A,
    STRANGER,
    configured,
    context_of,
    notes_of,
    sent,
    view_of,
)

VIEW = view_of("d0", "r1a", "r1b", "r2a")
"""On the ring: d0, r1a, r1b, r2a; with one watcher each, r1a listens to d0 and tells r1b."""

BEAT = Heartbeat(ITERATION, 0, VIEW.version)


def machine(node: str = "r1a", awaited: Set[NodeId] = frozenset(), **changes: float) -> Liveness:
    config = configured(num_watchers=1, heartbeat_timeout_s=2.0, **changes)
    member = next(m.node_id for m in VIEW.members if m.node_id == node)
    membership = Liveness(context_of(member, VIEW, config=config), lambda: awaited)
    membership.adopt(0.0)
    return membership


def test_a_node_tells_its_watchers_once_an_interval_that_it_lives() -> None:
    membership = machine()
    assert membership.deadline_s == 1.0
    assert membership.overdue(0.9) == []
    assert membership.overdue(1.0) == [Send(R1B, BEAT)]
    assert membership.deadline_s == 2.0


@pytest.mark.parametrize(
    ("further", "asks"),
    [
        (Heartbeat(ITERATION, 0, VIEW.version + 1), True),
        (Heartbeat(replace(ITERATION, number=ITERATION.number + 1)), True),
        (Heartbeat(replace(ITERATION, number=ITERATION.number - 1), 0, 99), False),
        (BEAT, False),
    ],
)
def test_who_hears_of_a_later_view_asks_for_it(further: Heartbeat, asks: bool) -> None:
    """The decision that makes it, and the question for it, may have been lost."""
    membership = machine()
    told = sent(membership.received(5.0, Received(R1B, further)))
    assert [type(message) for _, message in told] == [CatchUp] * asks
    assert not membership.received(5.5, Received(R1B, further)), "at most once a heartbeat"


def test_a_node_without_a_view_does_nothing() -> None:
    membership = Liveness(context_of(R1A, VIEW), set)
    assert membership.deadline_s is None
    assert membership.overdue(100.0) == []


def test_after_a_stall_one_heartbeat_is_owed_not_a_burst() -> None:
    membership = machine()
    assert [m for _, m in sent(membership.overdue(50.0)) if isinstance(m, Heartbeat)] == [BEAT]
    assert membership.deadline_s == 51.0


def test_a_new_view_does_not_delay_the_heartbeat() -> None:
    membership = machine()
    membership.adopt(0.9)
    assert membership.deadline_s == 1.0


def test_silence_makes_a_suspect_and_any_word_is_a_sign_of_life() -> None:
    membership = machine("r2a")  # It listens to r1b.
    membership.heard(0.0, Received(R1B, BEAT))
    assert sent(membership.overdue(2.0)) == [(D0, BEAT)]
    membership.heard(1.5, Received(R1B, BEAT))
    membership.heard(1.5, Received(STRANGER, BEAT))
    assert sent(membership.overdue(3.5)) == [(D0, BEAT)]
    effects = membership.overdue(4.5)
    assert (D0, Suspect(R1B, "no heartbeat")) in sent(effects)
    assert notes_of(effects) == ["peer.suspected"]


def test_who_is_waited_for_is_asked_for_a_sign_of_life_and_doubted_without() -> None:
    """r2a is not among those that r1a listens to, and may be there for everybody but r1a."""
    awaited: set[NodeId] = set()
    membership = machine(awaited=awaited)
    for now_s in (1.0, 2.0):
        membership.heard(now_s, Received(D0, BEAT))
        assert R2A not in dict(sent(membership.overdue(now_s)))
    awaited.add(R2A)
    for now_s in (3.0, 4.0):
        membership.heard(now_s, Received(D0, BEAT))
        effects = membership.overdue(now_s)
        assert (R2A, Ping(0)) in sent(effects)
        assert not notes_of(effects)
    membership.heard(4.5, Received(R2A, Pong(0)))
    for now_s, doubted in ((5.0, False), (6.0, False), (7.0, True), (8.0, True)):
        membership.heard(now_s, Received(D0, BEAT))
        membership.heard(now_s, Received(R2A, BEAT))
        effects = membership.overdue(now_s)
        assert ((D0, Suspect(R2A, "no answer")) in sent(effects)) == doubted
        assert notes_of(effects) == ["peer.suspected"] * (now_s == 7.0)
    awaited.clear()
    membership.heard(10.0, Received(D0, BEAT))
    assert R2A not in dict(sent(membership.overdue(10.0)))


def test_who_could_not_be_reached_is_doubted_until_it_answers() -> None:
    membership = machine()
    assert (D0, Suspect(R2A, "timeout")) in sent(membership.undelivered(5.0, R2A, "timeout"))
    for now_s in (6.0, 7.0):
        membership.heard(now_s, Received(D0, BEAT))
        membership.heard(now_s, Received(R2A, BEAT))
        told = sent(membership.overdue(now_s))
        assert {(R2A, Ping(0)), (D0, Suspect(R2A, "no answer"))} <= {*told}
    membership.heard(7.5, Received(R2A, Pong(0)))
    membership.heard(8.0, Received(D0, BEAT))
    assert R2A not in dict(sent(membership.overdue(8.0)))


def test_a_doubt_is_repeated_once_an_interval_and_noted_once() -> None:
    membership = machine()
    doubt = Send(D0, Suspect(R2A, "unreachable"))
    note = Note("peer.suspected", (("peer", R2A), ("reason", "unreachable")))
    assert membership.suspect(5.0, R2A, "unreachable") == [note, doubt]
    assert membership.suspect(5.9, R2A, "unreachable") == []
    assert membership.suspect(6.0, R2A, "unreachable") == [doubt]
    membership.heard(6.5, Received(R2A, BEAT))
    assert membership.suspect(7.0, R2A, "unreachable") == [note, doubt]


def test_nobody_doubts_a_stranger_and_the_leader_is_not_told_of_itself() -> None:
    membership = machine()
    assert membership.suspect(5.0, STRANGER, "gone") == []
    assert notes_of(membership.suspect(5.0, D0, "gone")) == ["peer.suspected"]
    assert sent(membership.suspect(9.0, D0, "gone")) == []


def test_a_node_that_hears_no_announcement_asks_and_then_gives_up() -> None:
    membership = machine(leader_timeout_s=20.0)
    membership.announced(1.0)
    asked = CatchUp(ITERATION, VIEW.hash)
    told = {k: membership.overdue(float(k)) for k in range(1, 23)}
    assert [k for k in told if (D0, asked) in sent(told[k])] == [*range(8, 22)]
    assert not any(isinstance(e, Stop) for k in range(1, 22) for e in told[k])
    stop = told[22][-1]
    assert stop == Stop(StopReason.LEADER_LOST, "no announcement of the leader for 21 s")


@pytest.mark.parametrize(("slept_s", "stops_s"), [(18.0, 22.0), (500.0, 5.0)])
def test_a_node_that_slept_asks_at_once_what_it_missed(slept_s: float, stops_s: float) -> None:
    """After a long sleep the leader may not know its address any more, and can't answer."""
    membership = machine("r2a", leader_timeout_s=20.0)
    membership.announced(1.0)
    membership.overdue(1.0)
    asked = CatchUp(ITERATION, VIEW.hash)
    assert sent(membership.woke(2.0, slept_s)) == [(D0, asked)]
    assert (D0, asked) in sent(membership.overdue(3.0)), "the first may be lost"
    later = {2.0 + k: membership.overdue(2.0 + k) for k in range(2, 25)}
    stops = [s for s, effects in later.items() if any(isinstance(e, Stop) for e in effects)]
    assert stops[0] == stops_s


def test_a_lone_leader_whose_port_refuses_is_given_up_soon() -> None:
    """Unless it is heard again. Where it is not alone, the others elect another."""
    asked, stops = CatchUp(ITERATION, VIEW.hash), list[float]()
    membership = machine(leader_timeout_s=60.0)
    for now_s in (1.0, 2.0):
        membership.gone(now_s, D0)
        assert (D0, asked) in sent(membership.overdue(now_s))
    membership.heard(2.5, Received(D0, BEAT))
    assert (D0, asked) not in sent(membership.overdue(3.0))
    for now_s in (4.0, 5.0, 6.0, 7.0, 8.0):
        membership.gone(now_s, D0)
        membership.gone(now_s, R1B)
        found = [e for e in membership.overdue(now_s) if isinstance(e, Stop)]
        stops += [now_s] * len(found)
        assert all(stop.reason is StopReason.LEADER_LOST for stop in found)
    assert stops == [7.0, 8.0]


def test_the_leader_waits_for_nobodys_announcement() -> None:
    membership = machine("d0")
    effects = membership.overdue(500.0)
    assert not any(isinstance(e, Stop) for e in effects)
    assert all(not isinstance(m, CatchUp) for _, m in sent(effects))


def test_what_was_missed_is_asked_for_once_an_interval() -> None:
    membership = machine()
    asked = [Send(D0, CatchUp(Iteration(1, 1), VIEW.hash))]
    assert membership.catch_up(3.0) == asked
    assert membership.catch_up(3.9) == []
    assert membership.catch_up(4.0) == asked


@pytest.mark.parametrize("node", ["d0"])
def test_the_leader_asks_itself_nothing(node: str) -> None:
    assert machine(node).catch_up(3.0) == []
