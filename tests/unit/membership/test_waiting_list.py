"""Who waits to be let in, and for how long the leader remembers it."""

from decod.ids import NodeId
from decod.membership.waiting_list import (
    GONE_S,
    WAITING_MAX,
    WAITING_PER_NETWORK_MAX,
    Decision,
    WaitingList,
)
from decod.net.dht_table import network_of

A, B = NodeId("a"), NodeId("b")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """An open list, and a way to ask."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.waiting = WaitingList(self.clock, network_of)
        self.waiting.open()

    def ask(self, node: NodeId, address: str = "192.0.2.1") -> Decision:
        return self.waiting.decision(node, address, "token")

    def listed(self) -> list[NodeId]:
        return [each.node_id for each in self.waiting.all()]


def test_nobody_waits_unless_the_organiser_wants_it() -> None:
    waiting = WaitingList(Clock(), network_of)
    assert waiting.decision(A, "192.0.2.1", "token") is Decision.ENTERS
    assert not waiting.all()


def test_a_newcomer_waits_until_it_is_decided() -> None:
    bench = Bench()
    assert bench.ask(A) is Decision.LISTED
    bench.clock.now_s += 5
    assert bench.ask(A, "192.0.2.9") is Decision.WAITS
    assert bench.ask(B, "192.0.2.2") is Decision.LISTED
    assert [(each.node_id, each.since_s, each.address) for each in bench.waiting.all()] == [
        (A, 1000.0, "192.0.2.9"),
        (B, 1005.0, "192.0.2.2"),
    ]
    bench.waiting.decide(A, may_enter=True)
    bench.waiting.decide(B, may_enter=False)
    assert not bench.waiting.all()
    assert bench.ask(A) is Decision.ENTERS
    assert bench.ask(B) is Decision.SENT_AWAY


def test_who_asks_no_more_is_gone() -> None:
    bench = Bench()
    bench.ask(A)
    bench.clock.now_s += GONE_S + 1
    assert not bench.waiting.all()
    assert bench.ask(A) is Decision.LISTED


def test_a_crowd_takes_no_more_room_than_it_may_and_pushes_nobody_off() -> None:
    bench = Bench()
    bench.ask(A)
    for number in range(3 * WAITING_MAX):
        bench.ask(NodeId(f"n{number}"), f"192.0.2.{number % 200}")
    assert len(bench.listed()) == WAITING_MAX
    assert bench.listed()[0] == A
    assert bench.ask(NodeId("late"), "198.51.100.1") is Decision.WAITS
    for number in range(3000):
        bench.waiting.decide(NodeId(f"n{number}"), may_enter=True)
    assert bench.ask(NodeId("n0"), "198.51.100.2") is Decision.LISTED, "it is forgotten"


def test_one_network_does_not_fill_the_list() -> None:
    bench = Bench()
    for number in range(50):
        bench.ask(NodeId(f"n{number}"))
    assert len(bench.listed()) == WAITING_PER_NETWORK_MAX
    assert bench.ask(B, "203.0.113.1") is Decision.LISTED
    assert bench.ask(NodeId("nowhere"), "") is Decision.LISTED
    before = len(bench.listed())
    for number in range(50):
        bench.ask(NodeId(f"v{number}"), f"2a01:4f8:1:2::{number:x}")
    assert len(bench.listed()) == before + WAITING_PER_NETWORK_MAX


def test_a_decision_can_be_changed() -> None:
    bench = Bench()
    bench.ask(A)
    bench.waiting.decide(A, may_enter=False)
    assert bench.ask(A) is Decision.SENT_AWAY
    assert bench.waiting.find("a", may_enter=True) == [A]
    assert not bench.waiting.find("b", may_enter=True)
    bench.waiting.decide(A, may_enter=True)
    assert bench.ask(A) is Decision.ENTERS
    assert not bench.waiting.find("a", may_enter=False), "it may be a member by now"
