"""Members that the run has set aside for a while, because others could not work with them.

Each time the pause is twice as long, since whatever was wrong with a host or its links may last.
"""

from dataclasses import dataclass

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, Send, noted
from decod.protocol.core.messages import Refuse
from decod.protocol.core.view import Member

_PAUSE_S = 60.0
_PAUSE_MAX_S = 3600.0

_KNOWN_MAX = 4096
"""Nodes that are remembered; of more, those are forgotten that were set aside first."""


@dataclass(slots=True)
class _Pause:
    until_s: float
    pause_s: float
    reason: str


class Cooldowns:
    """Who was set aside, and until when. The leader's."""

    def __init__(self) -> None:
        self._known: dict[NodeId, _Pause] = {}

    @property
    def nodes(self) -> list[NodeId]:
        """Who was set aside, and may still want to come back."""
        return list(self._known)

    def put(self, now_s: float, member: Member, reason: str) -> Effect:
        """Set a member aside."""
        node = member.node_id
        before = self._known.pop(node, None)
        pause_s = _PAUSE_S if before is None else min(_PAUSE_MAX_S, 2 * before.pause_s)
        self._known[node] = _Pause(now_s + pause_s, pause_s, reason)
        if len(self._known) > _KNOWN_MAX:
            del self._known[next(iter(self._known))]
        return noted("member.aside", peer=node, reason=reason, pause_s=round(pause_s))

    def refused(self, now_s: float, node: NodeId) -> list[Effect]:
        """Return the answer to the offer of a node whose pause is not over; nothing if it is."""
        pause = self._known.get(node)
        if pause is None or pause.until_s <= now_s:
            return []
        again_s = pause.until_s - now_s
        reason = f"it was set aside for {pause.pause_s:.0f} s: {pause.reason}"
        return [Send(node, Refuse(reason[:200], again_s))]
