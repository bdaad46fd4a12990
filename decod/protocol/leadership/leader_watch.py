"""When the leader was last heard, and how long a node lets it be silent."""

from decod.protocol.core.context import Context
from decod.protocol.links.failure_detector import Accrual

BEATS_PER_TIMEOUT = 4
"""How often the leader shows its deputies that it lives, in `election_timeout_s`."""

_BEATS_LEAST = 20
"""Of fewer nobody can tell how regular they are."""

DEPUTIES_MAX = 8
"""Data nodes that the leader does this for. Further ones stand only if these do not."""


class LeaderWatch:
    """One member's, for its leader.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self.heard_s = 0.0
        """When the leader itself was last heard."""
        self.vacant = False
        """Nobody leads: this node did, and has given up its term."""
        self._num_heard = 0
        self._context = context
        timeout_s = context.run.protocol.election_timeout_s
        self._regular = Accrual(floor_s=timeout_s, interval_s=timeout_s / BEATS_PER_TIMEOUT)

    def heard(self, now_s: float) -> None:
        """The leader has sent something."""
        self._num_heard += 1
        if self._num_heard > 1:
            self._regular.ended(now_s - self.heard_s)
        self.heard_s = now_s

    @property
    def patient_until_s(self) -> float:
        """Until when the leader may be silent."""
        return self.heard_s if self.vacant else self.heard_s + self._patience_s

    @property
    def _patience_s(self) -> float:
        """How long the leader may be silent: in turn, so that one stands at a time."""
        context, config = self._context, self._context.run.protocol
        rank = context.view.ranks[context.node_id]
        far_s = 0.0 if rank < DEPUTIES_MAX else config.heartbeat_timeout_s
        slack = self._regular.slack if self._num_heard > _BEATS_LEAST else 1.0
        return slack * config.election_timeout_s * (1 + rank / 4) + far_s
