"""Who waits to be let in, and for how long the leader remembers it."""

from decod.ids import NodeId
from decod.membership.waiting_list import GONE_S, WAITING_MAX, WaitingList

A, B = NodeId("a"), NodeId("b")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def opened() -> tuple[WaitingList, Clock]:
    clock = Clock()
    waiting = WaitingList(clock)
    waiting.open()
    return waiting, clock


def test_nobody_waits_unless_the_organiser_wants_it() -> None:
    waiting = WaitingList(Clock())
    assert waiting.decision(A, "192.0.2.1", "token") is True
    assert not waiting.all()


def test_a_newcomer_waits_until_it_is_decided() -> None:
    waiting, clock = opened()
    assert waiting.decision(A, "192.0.2.1", "token") is None
    assert waiting.is_new(A)
    clock.now_s += 5
    assert waiting.decision(A, "192.0.2.9", "token") is None
    assert not waiting.is_new(A)
    waiting.decision(B, "192.0.2.2", "token")
    assert [(each.node_id, each.since_s, each.address) for each in waiting.all()] == [
        (A, 1000.0, "192.0.2.9"),
        (B, 1005.0, "192.0.2.2"),
    ]
    waiting.decide(A, may_enter=True)
    waiting.decide(B, may_enter=False)
    assert not waiting.all()
    assert waiting.decision(A, "192.0.2.1", "token") is True
    assert waiting.decision(B, "192.0.2.2", "token") is False


def test_who_asks_no_more_is_gone() -> None:
    waiting, clock = opened()
    waiting.decision(A, "192.0.2.1", "token")
    clock.now_s += GONE_S + 1
    assert not waiting.all()


def test_a_crowd_takes_no_more_room_than_it_may() -> None:
    waiting, _ = opened()
    for number in range(3 * WAITING_MAX):
        waiting.decision(NodeId(f"n{number}"), "192.0.2.1", "token")
    assert len(waiting.all()) == WAITING_MAX
    assert waiting.all()[-1].node_id == f"n{3 * WAITING_MAX - 1}"
    for number in range(3 * WAITING_MAX):
        waiting.decide(NodeId(f"n{number}"), may_enter=True)
    assert waiting.decision(NodeId("n0"), "192.0.2.1", "token") is None, "it is forgotten"
