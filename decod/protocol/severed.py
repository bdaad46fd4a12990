"""Links that are cut while both their ends live: then one of the two has to go.

Whoever is doubted and answers the leader is no lost node. But if the same member goes on doubting
it, the two can't reach each other, and whatever of the round has to pass between them never will:
the round would stand still for as long as the link does. So when one doubt has been repeated for
several intervals of heartbeats, its object has answered the leader, and the round has made no
progress meanwhile, the leader goes on without one end. That is a loss like any other: what it had
done is done again by others, and it may come back.
"""

from collections.abc import Callable, Container

from decod.ids import NodeId, Round
from decod.protocol.params import ProtocolConfig
from decod.protocol.view import Role, View

_PATIENCE_INTERVALS = 2
"""Heartbeats, or answers, that both ends have had time for since the doubt was first told."""

Ends = tuple[NodeId, NodeId]
"""Who doubts, and whom."""


class Severed:
    """Doubts about members that live, since the round has last made progress. The leader's."""

    def __init__(self, config: ProtocolConfig) -> None:
        self._patience_s = _PATIENCE_INTERVALS * config.heartbeat_interval_s
        self._fades_s = 2 * config.heartbeat_timeout_s
        self._told_s: dict[Ends, tuple[float, float]] = {}
        """When each of them was first told of, and when last."""
        self._place: object = None
        self._gone: tuple[float, dict[NodeId, str]] | None = None

    @property
    def deadline_s(self) -> float | None:
        """When somebody is to be removed."""
        return self._gone[0] if self._gone is not None else None

    def doubted(
        self,
        now_s: float,
        ends: Ends,
        view: View,
        place: tuple[Round, bool],
        allows: Callable[[Container[NodeId]], bool],
    ) -> None:
        """A member doubts another, of whom the leader knows nothing worse.

        Args:
            now_s: Now.
            ends: The two.
            view: Who takes part.
            place: Round, and whether its batch is done: as long as that is, and the view, as it was
                the round stands still.
            allows: Whether the leader may go on with some members only.
        """
        if self._place != (view.version, *place):
            self._told_s.clear()
            self._place = (view.version, *place)
        if not all(end in view for end in ends):
            return
        since_s, last_s = self._told_s.get(ends, (now_s, now_s))
        if now_s - last_s > self._fades_s:
            since_s = now_s
        self._told_s[ends] = (since_s, now_s)
        if now_s - since_s < self._patience_s:
            return
        goes = max(
            (end for end in ends if _can_go(end, view) and allows({*view.by_id} - {end})),
            # Who is at odds with more members; else who is missed less.
            key=lambda end: (self._num_at_odds(end), _num_beside(end, view)),
            default=None,
        )
        if goes is not None:
            other = view.by_id[ends[0] if goes == ends[1] else ends[1]]
            reason = f"it and {other.label} can't reach each other"
            self._gone = (now_s, {goes: reason})

    def due(self) -> dict[NodeId, str]:
        """Return who goes, and why; once."""
        gone, self._gone = self._gone, None
        return gone[1] if gone is not None else {}

    def _num_at_odds(self, node: NodeId) -> int:
        return len({end for ends in self._told_s if node in ends for end in ends})


def _can_go(node: NodeId, view: View) -> bool:
    """Whether others can do again what a node has done, and go on doing it."""
    return view.by_id[node].role is Role.RELAY and node not in view.last_workers


def _num_beside(node: NodeId, view: View) -> int:
    return len(view.workers[view.by_id[node].stage_index])
