"""Candidates that fall silent: the leader asks them, and does without them."""

from decod.ids import NodeId
from decod.protocol.core.messages.membership_messages import Assign, Leave, Ping, Pong, Refuse
from tests.unit.protocol.cast import D1, R1A, notes_of, sent
from tests.unit.protocol.leading import CONFIG, Run

FULL = Refuse("the run has all the data nodes that it takes (2)", again_s=2.0)


def test_a_silent_candidate_is_asked_and_has_its_place_only_while_it_answers() -> None:
    """Another data node may have the ordinal of one that died on its way in."""
    run = Run(R1A)
    leader, timeout_s = run.leader, CONFIG.heartbeat_timeout_s
    leader.leave(0.0, D1, Leave("gone", at_once=True))
    first, offer, other = NodeId("d8"), run.offer(NodeId("d8")), NodeId("d9")
    leader.join(10.0, first, offer)
    for asked_s in (10.0 + timeout_s, 10.0 + 2 * timeout_s):
        assert leader.admission.deadline_s == asked_s
        ((node, ping),) = [(n, m) for n, m in sent(leader.overdue(asked_s)) if isinstance(m, Ping)]
        assert node == first
        if asked_s < 10.0 + 2 * timeout_s:
            leader.received(asked_s, first, Pong(ping.nonce))
    assert sent(leader.join(asked_s, other, run.offer(other))) == [(other, FULL)]
    effects = leader.overdue(asked_s + CONFIG.probe_timeout_s)
    assert notes_of(effects) == ["candidate.lost"]
    assert sent(leader.join(50.0, other, run.offer(other)))[0][1] == Assign(0, 1)
    assert sent(leader.join(50.0, first, offer)) == [(first, FULL)], "it lives after all"
