"""What the leader does once it is known, or not known, which member has lied."""

from decod.ids import NodeId
from decod.protocol.core.effects import BanLiar, Effect
from decod.protocol.core.messages import AuditResult
from decod.protocol.leadership.leader import Leader
from decod.protocol.leadership.relay_audits import Verdict


def audited(leader: Leader, now_s: float, sender: NodeId, result: AuditResult) -> list[Effect]:
    """An auditor has found out whether a relay's work was right."""
    verdict, effects = leader.audits.found(now_s, leader.view, sender, result)
    follows = _follow(leader, now_s, verdict)
    return effects + (leader.decide(now_s) if follows is None else follows)


def audits_overdue(leader: Leader, now_s: float) -> list[Effect]:
    """An audit may take too long."""
    verdict, effects = leader.audits.overdue(now_s, leader.view)
    if not effects:
        return []
    follows = _follow(leader, now_s, verdict)
    return effects + (leader.decide(now_s) if follows is None else follows)


def not_finite(leader: Leader, now_s: float, sender: NodeId, node: NodeId) -> list[Effect]:
    """A member says that it can't use what another has sent."""
    verdict, effects = leader.audits.not_finite(leader.view, sender, node)
    return effects + (_follow(leader, now_s, verdict) or [])


def _follow(leader: Leader, now_s: float, verdict: Verdict) -> list[Effect] | None:
    """Go on without liars. None: nothing follows."""
    gone = {**verdict.aside, **verdict.liars}
    # Others have computed with lies: all of the iteration is repeated.
    if present := {node: reason for node, reason in gone.items() if node in leader.view}:
        banned = [node for node in present if node in verdict.liars]
        bans: list[Effect] = [BanLiar(node, present[node]) for node in banned]
        return bans + leader.remove(now_s, present, mends=False)
    if verdict.repeats:
        return leader.repeat(now_s, verdict.repeats, counts=False)
    return None
