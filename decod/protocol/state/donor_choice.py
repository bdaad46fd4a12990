"""Which member of its stage a candidate asks for averages, and when it asks another one."""

import math

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Note, Send, UseMembers
from decod.protocol.core.messages.membership_messages import Follow
from decod.protocol.core.view import Member, Reach, View

_SILENT_S = 10.0
"""How long the member that is followed may say nothing."""

_PAUSE_S = 1.0
_PAUSE_MAX_S = 300.0
"""Before another beginning; doubles each time."""

_SLOW_PAUSE_S = 30.0
"""Before the first new beginning of a candidate that could not keep up."""


class DonorChoice:
    """The member that one candidate follows, chosen among those that hold its stage's state.

    Args:
        context: The node's.
        address: Where the member can reach this node.
        reach: Whether it can dial this node there.
        incarnation: Of this node. Its requests are numbered from there: a member may still know a
            wish of an earlier life, and would answer an equal number as a repeat of that.
    """

    def __init__(self, context: Context, address: str, reach: Reach, *, incarnation: int) -> None:
        self._context = context
        self._address, self._reach = address, reach
        self.stage_index = 0
        self._donors: tuple[Member, ...] = ()
        self._turn = 0
        self._request_id = incarnation // 2  # Half: so that there are numbers behind it.
        self.followed: NodeId | None = None
        self._since = 0
        """The iteration with which that member was admitted."""
        self.heard_s = 0.0
        self._again_s = -math.inf
        self._pause_s = 0.0

    @property
    def donor_ids(self) -> tuple[NodeId, ...]:
        """All members that hold the state, the one that is followed first."""
        ids = [member.node_id for member in self._donors]
        first = ids.index(self.followed) if self.followed in ids else 0
        return (*ids[first:], *ids[:first])

    def silent(self, now_s: float) -> bool:
        """Whether the member that is followed has said nothing for too long."""
        return self.followed is not None and now_s - self.heard_s > _SILENT_S

    def stays_in(self, view: View) -> bool:
        """Whether the member that is followed is in a view, and still knows its follower."""
        donor = None if self.followed is None else view.by_id.get(self.followed)
        # One that was admitted again has started again: it knows of no follower.
        return donor is not None and donor.since_iteration == self._since

    def aim(self, stage_index: int, donors: tuple[Member, ...]) -> list[Effect]:
        """Say which stage this node is to serve, and which other members hold its state."""
        new = donors != self._donors
        self.stage_index, self._donors = stage_index, donors
        return [UseMembers(donors)] if new and donors else []

    def ask(self, now_s: float) -> list[Effect]:
        """Choose a member, if it is time; say that this node still follows."""
        if not self._donors or now_s < self._again_s:
            return []
        if self.followed is None:
            donor = self._donors[self._turn % len(self._donors)]
            self.followed, self._since = donor.node_id, donor.since_iteration
            self._request_id += 1
            self.heard_s = now_s
        return [
            Send(
                self.followed,
                Follow(self._request_id, self.stage_index, self._address, self._reach),
            )
        ]

    def answered(self, now_s: float, sender: NodeId, request_id: int) -> bool:
        """Return whether an answer is to the newest request."""
        if (sender, request_id) != (self.followed, self._request_id):
            return False
        self.heard_s = now_s
        return True

    def failed(self, now_s: float, reason: str, *, slow: bool) -> Note:
        """A try has failed: the next one is with another member, after a pause. `slow`: this node
        could not keep up.
        """
        least_s = _SLOW_PAUSE_S if slow else _PAUSE_S
        self._pause_s = min(_PAUSE_MAX_S, max(least_s, 2 * self._pause_s))
        self._again_s = now_s + self._pause_s
        self._turn += 1
        fields = (
            ("stage", self.stage_index),
            ("reason", reason),
            ("pause_s", round(self._pause_s)),
        )
        return Note("replay.failed", fields)

    def succeeded(self) -> None:
        """A step can be taken: the next failure is the first one again."""
        self._pause_s = 0.0
