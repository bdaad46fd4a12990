"""Members that live and can't work together: as a last resort one of them is set aside.

Whoever is doubted and answers the leader is no lost node. As a rule the two ends of a bad link find
a way round it (`decod.protocol.links.forwarding`), and the iteration goes on. This is for when it
does not:

- **A link is cut, and there is no way round it.** One member goes on doubting another for longer
  than it takes to find such a way, and the iteration takes longer than usual meanwhile.
- **A member's tensors travel too slowly**, or those for it, or it refuses them: transfers between
  it and several others were given up. They come tens of seconds apart, so they add up until an
  iteration is committed.
- **An iteration stands still for a second time**, and nobody knows why. Then whoever most of the
  others wait for goes, above all if it waits for nobody itself.

Of the two ends of a link the one goes that is at odds with more members, else the one that is
missed less. That is a loss like any other: what it had done is done again by others. It may come
back after a pause, which doubles each time.

A doubt is one member's word, and it may be false. So it removes another member only if somebody
confirms it: a second member that doubts the same one, the accused itself, or the accuser's being a
data node. Without that, it is the accuser that goes, if it can. If the run has lost a member to
somebody's quarrel before, and it is at odds with a third one, then only it can go.
"""

import math
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, noted
from decod.protocol.core.view import Role, View
from decod.run.protocol_config import ProtocolConfig

_PATIENCE_INTERVALS = 2
"""Heartbeats, or answers, that both ends have had time for since they have found a way."""

_SLOW_OTHERS = 2
"""Members between which and one other tensors are too slow, so that it is not the links' fault."""

_QUARREL_FADES_S = 3600.0
"""How long the run remembers with whom a member was at odds when one of the two was set aside."""

_SLOW_FADES_S = 180.0
"""How long a tensor that was given up counts: the next may take most of a minute."""

Ends = tuple[NodeId, NodeId]
"""Who doubts, and whom."""

Allows = Callable[[Container[NodeId]], bool]
"""Whether the leader may go on with some members only."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """What one member says of another."""

    ends: Ends
    slow: bool
    """A tensor between them was given up; else they don't reach each other."""


@dataclass(frozen=True, slots=True)
class IterationProgress:
    """How far the run is."""

    view: View
    due_s: float
    """By when the iteration's next step was to be expected, or when its last one was made."""
    under_way: bool = True
    """An iteration is being worked on."""


class Conflicts:
    """Doubts about members that live. The leader's.

    Args:
        config: The run's.
        allows: Whether the leader may go on with some members only.
    """

    def __init__(self, config: ProtocolConfig, allows: Allows) -> None:
        intervals_s = _PATIENCE_INTERVALS * config.heartbeat_interval_s
        # In the longest of these a member finds out that who was to pass messages on can't.
        self._patience_s = config.probe_timeout_s + intervals_s
        self._fades_s = 2 * config.heartbeat_timeout_s
        self._allows = allows
        self._told_s: dict[Ends, tuple[float, float]] = {}
        """When each of them was first told of, and when last. They fade."""
        self._noted_s: dict[Ends, float] = {}
        """When the operator was told of a doubt that nobody confirms."""
        self._quarrels_s: dict[Ends, float] = {}
        """When the run has lost one of two members since they were at odds."""
        self._slow_s: dict[Ends, float] = {}
        """When a tensor between two members was last given up, since the last commit."""
        self._num_stalls = 0
        """Iterations in a row that have stood still."""
        self._gone: tuple[float, dict[NodeId, str]] | None = None

    @property
    def deadline_s(self) -> float | None:
        """When somebody is to be removed."""
        return self._gone[0] if self._gone is not None else None

    def doubted(self, now_s: float, doubt: Doubt, progress: IterationProgress) -> list[Effect]:
        """A member doubts another, of whom the leader knows nothing worse."""
        view = progress.view
        if not all(end in view for end in doubt.ends):
            return []
        if doubt.slow:
            self._slowed(now_s, doubt.ends, view)
            return []
        self._told_s = {
            ends: told for ends, told in self._told_s.items() if now_s - told[1] <= self._fades_s
        }
        since_s, _ = self._told_s.get(doubt.ends, (now_s, now_s))
        self._told_s[doubt.ends] = (since_s, now_s)
        if now_s - since_s < self._patience_s:
            return []
        if now_s - max(since_s, progress.due_s) >= self._patience_s:
            self._settle(now_s, doubt.ends, view)
        return self._unconfirmed(now_s, doubt.ends, view)

    def _settle(self, now_s: float, ends: Ends, view: View) -> None:
        """The iteration does not get on: one of two members goes, if it is known which."""
        accuser, accused = ends
        # Who is at odds with more members; else who is missed less.
        order = sorted(ends, key=lambda end: (-self._num_at_odds(end), _missed(end, view)))
        if not self._is_believed(now_s, (accused, accuser), view):
            order = [accused]
        elif not self._is_confirmed(now_s, ends, view):
            order = [accuser]
        goes = self._first_able(view, order)
        if goes is None:
            return
        other = accused if goes == accuser else accuser
        if (other, goes) in self._told_s:
            self._quarrels_s[other, goes] = now_s
        reason = f"it and {view.by_id[other].label} can't reach each other"
        self._gone = (now_s, {goes: reason})

    def _is_confirmed(self, now_s: float, ends: Ends, view: View) -> bool:
        """Whether a doubt is more than one member's word."""
        accuser, accused = ends
        if any(of == accused and by != accuser for by, of in self._told_s):
            return True
        mutual = (accused, accuser) in self._told_s or view.by_id[accuser].role is Role.DATA
        return mutual and self._is_believed(now_s, ends, view)

    def _is_believed(self, now_s: float, ends: Ends, view: View) -> bool:
        """Whether a member is a data node, or the run has lost nobody else to its quarrels."""
        accuser, accused = ends
        if view.by_id[accuser].role is Role.DATA:
            return True
        self._quarrels_s = {
            ends: at_s
            for ends, at_s in self._quarrels_s.items()
            if now_s - at_s <= _QUARREL_FADES_S
        }
        return all(by != accuser or gone == accused for by, gone in self._quarrels_s)

    def _unconfirmed(self, now_s: float, ends: Ends, view: View) -> list[Effect]:
        """Tell the operator of a doubt that only one member has, once in a while."""
        last_s = self._noted_s.get(ends, -math.inf)
        if now_s - last_s <= _QUARREL_FADES_S or self._is_confirmed(now_s, ends, view):
            return []
        self._noted_s = {
            each: at_s for each, at_s in self._noted_s.items() if now_s - at_s <= _QUARREL_FADES_S
        }
        self._noted_s[ends] = now_s
        accuser, accused = ends
        return [noted("member.doubted", peer=accuser, suspect=view.by_id[accused].label)]

    def _slowed(self, now_s: float, ends: Ends, view: View) -> None:
        self._slow_s[ends] = now_s
        self._slow_s = {
            other: at_s
            for other, at_s in self._slow_s.items()
            if now_s - at_s <= _SLOW_FADES_S and all(end in view for end in other)
        }
        others = {end: _others_of(end, self._slow_s) for end in ends}
        worst, least = sorted(ends, key=lambda end: -len(others[end]))
        if len(others[worst]) < max(_SLOW_OTHERS, len(others[least]) + 1):
            return
        if self._first_able(view, [worst]) is not None:
            names = ", ".join(view.by_id[node].label for node in sorted(others[worst]))
            self._gone = (now_s, {worst: f"tensors between it and {names} take too long"})

    def committed(self) -> None:
        """An iteration is done: whatever held it up did not hold it up for good."""
        self._slow_s.clear()
        self._num_stalls = 0

    def stalled(
        self, now_s: float, view: View, awaited: Mapping[NodeId, Collection[NodeId]]
    ) -> None:
        """An iteration has stood still until its time was up. After the second somebody goes.

        Args:
            now_s: The time.
            view: Its members.
            awaited: For whom each of them waits, as it last said.
        """
        self._num_stalls += 1
        if self._num_stalls < 2:
            return
        waiting: dict[NodeId, set[NodeId]] = {}
        for node, others in awaited.items():
            for other in others:
                known = other in view and node in view and other != node
                if known and self._is_believed(now_s, (node, other), view):
                    waiting.setdefault(other, set()).add(node)
        order = sorted(
            waiting,
            key=lambda node: (
                bool(set(awaited.get(node, ())) & view.by_id.keys()),
                -len(waiting[node]),
                _missed(node, view),
            ),
        )
        goes = self._first_able(view, order)
        if goes is not None:
            names = ", ".join(view.by_id[node].label for node in sorted(waiting[goes]))
            reason = f"{self._num_stalls} iterations stood still while {names} waited for it"
            if len(waiting[goes]) == 1:
                (only,) = waiting[goes]
                self._quarrels_s[only, goes] = now_s
            self._gone = (now_s, {goes: reason})

    def due(self, view: View) -> dict[NodeId, str]:
        """Return who goes, and why; once. The view may have changed since that was decided."""
        gone, self._gone = self._gone, None
        members = {} if gone is None else {n: why for n, why in gone[1].items() if n in view}
        return members if self._first_able(view, members) is not None else {}

    def _first_able(self, view: View, order: Collection[NodeId]) -> NodeId | None:
        """Return the first without whom the run can go on; None if there is none."""
        able = (n for n in order if _can_go(n, view) and self._allows({*view.by_id} - {n}))
        return next(able, None)

    def _num_at_odds(self, node: NodeId) -> int:
        return len(_others_of(node, self._told_s))


def _others_of(node: NodeId, known: Collection[Ends]) -> set[NodeId]:
    """Return who is at odds with a node."""
    return {end for ends in known if node in ends for end in ends} - {node}


def _can_go(node: NodeId, view: View) -> bool:
    """Whether others can do again what a node has done, and go on doing it."""
    return view.by_id[node].role is Role.RELAY and node not in view.last_workers


def _missed(node: NodeId, view: View) -> int:
    """Return a number that is larger for who is missed more: who has fewer beside it."""
    return -len(view.workers[view.by_id[node].stage_index])
