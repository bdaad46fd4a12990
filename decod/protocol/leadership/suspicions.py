"""Who may be gone, or can't be worked with: what the leader makes of its members' doubts.

A doubt alone costs nobody its place. The leader asks the suspect, which is gone if it does not
answer (`Probes`). One that answers may be set aside all the same if the run can't get on with it
(`Conflicts`), and is then let in again after a pause (`Cooldowns`).
"""

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.events import earliest
from decod.protocol.core.messages import (
    OF_TENSORS,
    SLOW,
    TENSOR_REFUSED,
    TOO_SLOW,
    Message,
    NodeLoad,
    Ping,
    Refuse,
    Suspect,
)
from decod.protocol.core.view import Member, Role, View
from decod.protocol.leadership.admission import Admission
from decod.protocol.leadership.quorum import Quorum
from decod.run.protocol_config import ProtocolConfig

_TRIES_ALONE = 2
"""Pings that may fail, at once, before a node counts as gone, where nobody else can ask it."""

_TRIES = 3
"""The same where others can: the leader's own and those of two others."""

_TRIES_LAST = 6
"""The same for the last one of a stage."""

_ASKED = 3
"""How often a node that does not answer is asked in all."""


@dataclass(slots=True)
class _Probe:
    nonce: int
    deadline_s: float
    again_s: float
    """When the node is asked again: question or answer may have been lost on the way."""
    reason: str
    tries: int = _TRIES_ALONE
    """Of which so many may fail."""
    num_asked: int = 1
    """Pings that were sent."""
    num_failed: int = 0
    """Those of them that did not reach it."""


@dataclass(slots=True)
class Probes:
    """At most one open question to each suspect.

    A node that does not answer at once is also asked by way of other members: the leader's own link
    to it may be what is wrong.

    Source: SWIM (Das, Gupta, Motivala, DSN 2002), section 3.1: indirect probes.
    """

    timeout_s: float
    out: EffectSink[Effect]
    around: Callable[[NodeId, Ping], int] = lambda *_: 0
    """Asks by way of others. Returns how many."""
    _open: dict[NodeId, _Probe] = field(default_factory=dict)
    _nonces: Iterable[int] = field(default_factory=lambda: count(1))

    def renumbered(self, term: int) -> "Probes":
        """Return one without open questions, whose own are none of an earlier term's."""
        return Probes(self.timeout_s, self.out, self.around, _nonces=count(term << 32))

    @property
    def deadline_s(self) -> float | None:
        if not self._open:
            return None
        return min(min(p.again_s, p.deadline_s) for p in self._open.values())

    def __contains__(self, node: NodeId) -> bool:
        return node in self._open

    def ask(self, now_s: float, node: NodeId, reason: str, slack: float = 1.0) -> None:
        """Ask a suspect whether it lives, unless it has been asked.

        Args:
            now_s: The time.
            node: The suspect.
            reason: Why it is doubted.
            slack: How many times as long as usual it may take.
        """
        if node not in self._open:
            nonce = next(iter(self._nonces))
            again_s = now_s + self.timeout_s / _ASKED
            self._open[node] = _Probe(nonce, now_s + slack * self.timeout_s, again_s, reason)
            self.out.send(node, Ping(nonce))

    def ask_all(self, now_s: float, nodes: Iterable[NodeId], reason: str) -> None:
        """Ask several."""
        for node in sorted(nodes):
            self.ask(now_s, node, reason)

    def answered(self, node: NodeId, nonce: int) -> None:
        probe = self._open.get(node)
        if probe is not None and probe.nonce == nonce:
            del self._open[node]

    def undelivered(self, node: NodeId, *, last: bool) -> bool:
        """A ping did not reach a node: ask again. Returns whether that has been tried often enough.

        One lost packet must not cost a member, and several not the `last` one of a stage.
        """
        probe = self._open[node]
        probe.num_failed += 1
        if probe.num_failed == 1:
            self._ask_around(node, probe)
        if probe.num_failed >= (_TRIES_LAST if last else probe.tries):
            return True
        if probe.num_asked <= probe.num_failed:
            probe.num_asked += 1
            self.out.send(node, Ping(probe.nonce))
        return False

    def _ask_around(self, node: NodeId, probe: _Probe) -> None:
        """Have others ask a node."""
        num_asked = self.around(node, Ping(probe.nonce))
        probe.num_asked += num_asked
        probe.tries = _TRIES if num_asked else probe.tries

    def overdue(self, now_s: float) -> None:
        """Ask again who has not answered yet, and has time left."""
        due = [(n, p) for n, p in self._open.items() if p.again_s <= now_s < p.deadline_s]
        for node, probe in due:
            probe.again_s = now_s + self.timeout_s / _ASKED
            probe.num_asked += 1
            self.out.send(node, Ping(probe.nonce))
            self._ask_around(node, probe)

    def silent(self, now_s: float) -> dict[NodeId, str]:
        """Return who has not answered in time, and why it was doubted."""
        return {n: p.reason for n, p in self._open.items() if p.deadline_s <= now_s}

    def forget(self, node: NodeId) -> None:
        self._open.pop(node, None)


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

    Whoever is doubted and answers the leader is no lost node. As a rule the two ends of a bad link
    find a way round it (`decod.protocol.links.forwarding`), and the iteration goes on. This is for
    when it does not:

    - **A link is cut, and there is no way round it.** One member goes on doubting another for
      longer than it takes to find such a way, and the iteration takes longer than usual meanwhile.
    - **A member's tensors travel too slowly**, or those for it, or it refuses them: transfers
      between it and several others were given up. They come tens of seconds apart, so they add up
      until an iteration is committed.
    - **An iteration stands still for a second time**, and nobody knows why. Then whoever most of
      the others wait for goes, above all if it waits for nobody itself.

    Of the two ends of a link the one goes that is at odds with more members, else the one that is
    missed less. That is a loss like any other: what it had done is done again by others. It may
    come back after a pause, which doubles each time.

    A doubt is one member's word, and it may be false. So it removes another member only if somebody
    confirms it: a second member that doubts the same one, the accused itself, or the accuser's
    being a data node. Without that, it is the accuser that goes, if it can. If the run has lost a
    member to somebody's quarrel before, and it is at odds with a third one, then only it can go.

    Args:
        config: The run's.
        allows: Whether the leader may go on with some members only.
        out: The leading node's.
    """

    def __init__(self, config: ProtocolConfig, allows: Allows, out: EffectSink[Effect]) -> None:
        intervals_s = _PATIENCE_INTERVALS * config.heartbeat_interval_s
        # In the longest of these a member finds out that who was to pass messages on can't.
        self._patience_s = config.probe_timeout_s + intervals_s
        self._fades_s = 2 * config.heartbeat_timeout_s
        self._allows = allows
        self._out = out
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

    def doubted(self, now_s: float, doubt: Doubt, progress: IterationProgress) -> None:
        """A member doubts another, of whom the leader knows nothing worse."""
        view = progress.view
        if not all(end in view for end in doubt.ends):
            return
        if doubt.slow:
            self._slowed(now_s, doubt.ends, view)
            return
        self._told_s = {
            ends: told for ends, told in self._told_s.items() if now_s - told[1] <= self._fades_s
        }
        since_s, _ = self._told_s.get(doubt.ends, (now_s, now_s))
        self._told_s[doubt.ends] = (since_s, now_s)
        if now_s - since_s < self._patience_s:
            return
        if now_s - max(since_s, progress.due_s) >= self._patience_s:
            self._settle(now_s, doubt.ends, view)
        self._unconfirmed(now_s, doubt.ends, view)

    def _settle(self, now_s: float, ends: Ends, view: View) -> None:
        """The iteration does not get on: one of two members goes, if it is known which."""
        accuser, accused = ends
        # Who is at odds with more members; else who is missed less.
        order = sorted(
            ends, key=lambda end: (-len(_others_of(end, self._told_s)), _missed(end, view))
        )
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

    def _unconfirmed(self, now_s: float, ends: Ends, view: View) -> None:
        """Tell the operator of a doubt that only one member has, once in a while."""
        last_s = self._noted_s.get(ends, -math.inf)
        if now_s - last_s <= _QUARREL_FADES_S or self._is_confirmed(now_s, ends, view):
            return
        self._noted_s = {
            each: at_s for each, at_s in self._noted_s.items() if now_s - at_s <= _QUARREL_FADES_S
        }
        self._noted_s[ends] = now_s
        accuser, accused = ends
        self._out.note("member.doubted", peer=accuser, suspect=view.by_id[accused].label)

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
        gone = self._gone
        self._gone = None
        members = {} if gone is None else {n: why for n, why in gone[1].items() if n in view}
        return members if self._first_able(view, members) is not None else {}

    def _first_able(self, view: View, order: Collection[NodeId]) -> NodeId | None:
        """Return the first without whom the run can go on; None if there is none."""
        able = (n for n in order if _can_go(n, view) and self._allows({*view.by_id} - {n}))
        return next(able, None)


def _others_of(node: NodeId, known: Collection[Ends]) -> set[NodeId]:
    """Return who is at odds with a node."""
    return {end for ends in known if node in ends for end in ends} - {node}


def _can_go(node: NodeId, view: View) -> bool:
    """Whether others can do again what a node has done, and go on doing it."""
    return view.by_id[node].role is Role.RELAY and node not in view.last_workers


def _missed(node: NodeId, view: View) -> int:
    """Return a number that is larger for who is missed more: who has fewer beside it."""
    return -len(view.workers[view.by_id[node].stage_index])


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
    """Who was set aside, and until when. The leader's.

    Each time the pause is twice as long, since whatever was wrong with a host or its links may
    last.
    """

    def __init__(self, out: EffectSink[Effect]) -> None:
        self._out = out
        self._known: dict[NodeId, _Pause] = {}

    @property
    def nodes(self) -> list[NodeId]:
        """Who was set aside, and may still want to come back."""
        return list(self._known)

    def put(self, now_s: float, member: Member, reason: str) -> None:
        """Set a member aside."""
        node = member.node_id
        before = self._known.pop(node, None)
        pause_s = _PAUSE_S if before is None else min(_PAUSE_MAX_S, 2 * before.pause_s)
        self._known[node] = _Pause(now_s + pause_s, pause_s, reason)
        if len(self._known) > _KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._out.note("member.aside", peer=node, reason=reason, pause_s=round(pause_s))

    def refuse(self, now_s: float, node: NodeId) -> bool:
        """Refuse the offer of a node whose pause is not over. Returns whether it is not."""
        pause = self._known.get(node)
        if pause is None or pause.until_s <= now_s:
            return False
        again_s = pause.until_s - now_s
        reason = f"it was set aside for {pause.pause_s:.0f} s: {pause.reason}"
        self._out.send(node, Refuse(reason[:200], again_s))
        return True


Around = Callable[[NodeId, Message], int]
"""Sends a message by way of other members."""


class Suspicions:
    """The leader's doubts, and what has come of them.

    Args:
        config: The run's.
        admission: Knows the candidates.
        quorum: Knows with whom the leader may go on.
        out: The leading node's.
        around: Sends by way of others.
    """

    def __init__(
        self,
        config: ProtocolConfig,
        admission: Admission,
        quorum: Quorum,
        out: EffectSink[Effect],
        around: Around,
    ) -> None:
        self.probes = Probes(config.probe_timeout_s, out, around)
        self.cooldowns = Cooldowns(out)
        self._conflicts = Conflicts(config, quorum.allows, out)
        self._refused: set[Ends] = set()
        """Who has had a tensor refused by whom, since the last commit."""
        self._admission = admission

    @property
    def deadline_s(self) -> float | None:
        return earliest(self.probes.deadline_s, self._conflicts.deadline_s)

    def renumber(self, term: int) -> None:
        """Another term begins: its questions are others than those of an earlier one."""
        self.probes = self.probes.renumbered(term)

    # --- doubts -------------------------------------------------------------------------------

    def suspected(
        self, now_s: float, sender: NodeId, message: Suspect, progress: IterationProgress
    ) -> None:
        """A member doubts another, when the run is so far."""
        node = message.node_id
        reason = message.reason
        slow = reason == TOO_SLOW or (reason == TENSOR_REFUSED and (sender, node) in self._refused)
        if reason == TENSOR_REFUSED:
            # Once is a mishap: bits flip, and memory is full for a moment.
            self._refused.add((sender, node))
        # Whoever is being asked whether it lives may not reach anybody.
        unreached = reason not in (SLOW, *OF_TENSORS) and node not in self.probes
        if progress.under_way and (slow or unreached):
            self._conflicts.doubted(now_s, Doubt((sender, node), slow), progress)
        self.suspect(now_s, progress.view, node, reason, message.slack)

    def suspect(
        self, now_s: float, view: View, node: NodeId, reason: str, slack: float = 1.0
    ) -> None:
        """Ask a suspect whether it lives."""
        known = node in view or node in self._admission.candidates
        if known and node != view.leader:
            self.probes.ask(now_s, node, reason, slack)

    def unreachable(
        self, now_s: float, view: View, node: NodeId, reason: str, *, ping: bool
    ) -> bool:
        """The leader did not reach a node. Returns whether that was one ping too many."""
        if ping and node in self.probes:
            return self.probes.undelivered(node, last=node in view.last_workers)
        self.suspect(now_s, view, node, reason)
        return False

    def stalled(self, now_s: float, view: View, loads: Iterable[NodeLoad]) -> bool:
        """An iteration has stood still until its time was up. Returns whether somebody is to go."""
        awaited = {load.node_id: load.awaited for load in loads}
        self._conflicts.stalled(now_s, view, awaited)
        return self._conflicts.deadline_s is not None

    def committed(self) -> None:
        """An iteration is done."""
        self._conflicts.committed()
        self._refused.clear()

    # --- what comes of them -------------------------------------------------------------------

    def overdue(self, now_s: float, view: View) -> dict[NodeId, str]:
        """Ask who is to be asked. Return who is gone or is to go, and why."""
        probes = self.probes
        probes.ask_all(now_s, self._admission.doubt(now_s), "not heard of")
        probes.overdue(now_s)
        apart = self._conflicts.due(view)
        for node in apart:
            self.cooldowns.put(now_s, view.by_id[node], apart[node])
        return probes.silent(now_s) | apart
