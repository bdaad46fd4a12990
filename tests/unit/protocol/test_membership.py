"""Heartbeats, doubts, and a node's own connection to the run."""

from collections.abc import Set

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, Stop, StopReason
from decod.protocol.core.events import Received
from decod.protocol.core.messages.membership_messages import CatchUp, Heartbeat
from decod.protocol.links.liveness import Liveness
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1B,
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


def overdue(membership: Liveness, now_s: float) -> list[Effect]:
    membership.overdue(now_s)
    return membership._out.taken()


def suspect(membership: Liveness, now_s: float, node: NodeId) -> list[Effect]:
    membership.suspect(now_s, node, "gone")
    return membership._out.taken()


def test_nobody_doubts_a_stranger_and_the_leader_is_not_told_of_itself() -> None:
    membership = machine()
    assert suspect(membership, 5.0, STRANGER) == []
    assert notes_of(suspect(membership, 5.0, D0)) == ["peer.suspected"]
    assert sent(suspect(membership, 9.0, D0)) == []


def test_a_lone_leader_whose_port_refuses_is_given_up_soon() -> None:
    """Unless it is heard again. Where it is not alone, the others elect another."""
    asked, stops = CatchUp(ITERATION, VIEW.hash), list[float]()
    membership = machine(leader_timeout_s=60.0)
    for now_s in (1.0, 2.0):
        membership.gone(now_s, D0)
        assert (D0, asked) in sent(overdue(membership, now_s))
    membership.heard(2.5, Received(D0, BEAT))
    assert (D0, asked) not in sent(overdue(membership, 3.0))
    for now_s in (4.0, 5.0, 6.0, 7.0, 8.0):
        membership.gone(now_s, D0)
        membership.gone(now_s, R1B)
        found = [e for e in overdue(membership, now_s) if isinstance(e, Stop)]
        stops += [now_s] * len(found)
        assert all(stop.reason is StopReason.LEADER_LOST for stop in found)
    assert stops == [7.0, 8.0]
