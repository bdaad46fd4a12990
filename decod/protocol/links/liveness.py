"""Who is alive: heartbeats between neighbours on a ring, and doubts reported to the leader.

A node tells its watchers regularly that it lives. Any other message counts as a sign of life too,
so only those get a heartbeat that have heard nothing else meanwhile. But once anybody has been
banned, each watcher gets one every few seconds: it says which list of bans the node has.
A watcher that hears nothing, or a sender whose message could not be delivered, tells the leader.
Only the leader concludes anything: it asks the suspect itself and removes it if there is no answer.

A node also watches over those that it waits for: the next nodes of its flows until they can take
microbatches and while they have some, members whose part of a sum, vote or decision has not come,
whomever a tensor is under way to, and whomever a message could not be delivered to. It asks them
itself, and only an answer counts: the ring's watchers may well hear a node that this one can't
reach, or that it hears and that does not hear it; and a transport may find out late that nothing
arrives. Who does not answer in time is doubted, and from then on addressed by way of another member
(`decod.protocol.links.forwarding`): that may be all it takes.

How long a node may be silent depends on how regular it was before (`Accrual`).

A node watches, too, over its own connection to the run. The leader's announcements reach every node
at least every few seconds; when they stop, the node asks the leader what it missed, and gives up
when there is no leader to answer.

Time in which this process did not run counts against nobody. A node that stood still may have been
removed meanwhile, so it asks the leader at once what it missed.
"""

import math
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from math import sqrt

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Stop, StopReason
from decod.protocol.core.events import Received
from decod.protocol.core.messages import OF_TENSORS, STANDS_STILL, Heartbeat, Ping, Pong, Suspect
from decod.protocol.core.messages.decision_messages import AWAITED_MAX
from decod.protocol.core.messages.membership_messages import SLACK_MAX as SLACK_MAX
from decod.protocol.core.view import watched, watchers

_DEVIATIONS = 5.61
"""Standard deviations above the mean at which phi is 8."""

_WINDOW = 100
"""Silences that are remembered."""

_GAP_SHARE = 0.5
"""Signs of life that follow each other faster than this share of the interval are one: traffic
must not make a peer seem more regular than its heartbeats are."""


class Accrual:
    """Learns from a peer's signs of life how long it may be silent.

    A peer that shows itself regularly is suspected after a fixed time. One whose signs of life come
    irregularly, because its host is busy or its link delays, is given more: as long as its past
    makes a longer silence a thing of one in a hundred million. So a loaded host keeps its place,
    and a host that vanishes is found soon.

    Source: Hayashibara, Défago, Yared, Katayama, "The phi accrual failure detector" (SRDS 2004),
    with a normal distribution, as in Akka. Deviations: the fixed time is the least that is ever
    given, and what is asked for is the silence at which phi reaches the threshold, not phi.

    Args:
        floor_s: The fixed time: what is given at least.
        interval_s: How often the peer shows itself if it has nothing else to say.
    """

    def __init__(self, *, floor_s: float, interval_s: float) -> None:
        self._floor_s = floor_s
        self._gap_min_s = _GAP_SHARE * interval_s
        self._gaps_s: deque[float] = deque(maxlen=_WINDOW)
        self._slack = 1.0

    @property
    def slack(self) -> float:
        """How many times the fixed time the peer is given, from 1 to `SLACK_MAX`."""
        return self._slack

    @property
    def timeout_s(self) -> float:
        """The silence after which the peer is suspected."""
        return self._slack * self._floor_s

    def ended(self, silence_s: float) -> None:
        """The peer has shown itself after it was silent for so long."""
        if silence_s < self._gap_min_s:
            return
        gaps_s = self._gaps_s
        gaps_s.append(silence_s)
        mean_s = sum(gaps_s) / len(gaps_s)
        variance = sum((gap_s - mean_s) ** 2 for gap_s in gaps_s) / len(gaps_s)
        least_s = mean_s + _DEVIATIONS * sqrt(variance)
        self._slack = min(SLACK_MAX, max(1.0, least_s / self._floor_s))


_NO_PROBE = 0
"""Nonce of a Ping whose Pong is but a sign of life; the leader's probes count from 1."""

_ASKED_INTERVALS = 2.5
"""A silent node that is waited for is asked so long before it is doubted: at least twice."""


_BANS_TOLD_S = 5.0
"""How often a watcher is told which list of bans a node has."""

_ANSWER_INTERVALS = 1.5
"""A node to which a message could not be delivered is asked at once, and has so long to answer."""


@dataclass(slots=True)
class _Heard:
    """When somebody last showed itself, and how long it may be silent."""

    since_s: float
    patience: Accrual

    def again(self, now_s: float, *, expected_s: float = 0.0) -> None:
        """The peer shows itself. `expected_s`: how much of its silence was not asked to end."""
        self.patience.ended(now_s - self.since_s - expected_s)
        self.since_s = now_s


class Liveness:
    """One member's heartbeats, watches, and doubts.

    Args:
        context: The node's.
        awaited: Returns whom the node waits for.
        broken: Called with the time and a node that does not answer on the direct way.
    """

    def __init__(
        self,
        context: Context,
        awaited: Callable[[], Set[NodeId]],
        broken: Callable[[float, NodeId], None] = lambda *_: None,
    ) -> None:
        self._context = context
        self._out = context.out
        self._awaited = awaited
        self._broken = broken
        self._answered: dict[NodeId, _Heard] = {}
        """When each of those that are waited for last answered, or was first waited for."""
        self._waits_s: dict[NodeId, float] = {}
        """Since when each of them is waited for without a break."""
        self.late: tuple[NodeId, ...] = ()
        """Whom this node has waited for for longer than for a heartbeat, the longest first."""
        self._unreached: dict[NodeId, float] = {}
        """When a message to them could first not be delivered; they have not answered since."""
        self._watchers: tuple[NodeId, ...] = ()
        self._heard: dict[NodeId, _Heard] = {}
        """Those that this node watches."""
        self._told_s: dict[NodeId, float] = {}
        """When each watcher was last sent anything."""
        self._beat_s: dict[NodeId, float] = {}
        """When each watcher was last sent a heartbeat."""
        self._suspected_s: dict[NodeId, float] = {}
        self._noted: set[NodeId] = set()
        """Suspects that were noted and not heard since."""
        self.deadline_s: float | None = None
        """When this node beats next, and looks at the others."""
        self._leader_heard_s = 0.0
        self._asked_s = -math.inf
        self._asks_until_s = -math.inf
        """Until then the leader is asked what was missed: this node stood still."""
        self._leader_gone_s: tuple[float, float] | None = None
        """When nobody listened at the leader's address first, and last; None since it was heard."""

    def adopt(self, now_s: float) -> None:
        """Watch the neighbours of the context's new view."""
        context = self._context
        num = self._context.run.protocol.num_watchers
        self._watchers = watchers(context.view, context.node_id, num_watchers=num)
        listened = watched(context.view, context.node_id, num_watchers=num)
        known = self._heard
        self._heard = {node: known.get(node) or self._new(now_s) for node in listened}
        for heard in self._heard.values():
            heard.since_s = now_s
        self._told_s = dict.fromkeys(self._watchers, -math.inf)
        self._beat_s = dict.fromkeys(self._watchers, -math.inf)
        if self.deadline_s is None:
            self.deadline_s = now_s + context.run.protocol.heartbeat_interval_s
        self._leader_heard_s = now_s
        self._leader_gone_s = None

    def _new(self, now_s: float) -> _Heard:
        config = self._context.run.protocol
        floor_s = config.heartbeat_timeout_s
        return _Heard(now_s, Accrual(floor_s=floor_s, interval_s=config.heartbeat_interval_s))

    def told(self, now_s: float, receiver: NodeId) -> None:
        """Something is being sent to a node."""
        if receiver in self._told_s:
            self._told_s[receiver] = now_s

    def heard(self, now_s: float, received: Received) -> None:
        sender = received.sender
        if sender == self._context.view.leader:
            self._leader_gone_s = None
        if (heard := self._heard.get(sender)) is not None:
            heard.again(now_s)
        if isinstance(received.message, Pong):
            # There is a way to the sender, and one back.
            self._unreached.pop(sender, None)
            if (answered := self._answered.get(sender)) is not None:
                answered.again(now_s, expected_s=self._asked_after_s)
        elif sender in self._answered:
            return
        self._noted.discard(sender)

    def announced(self, now_s: float) -> None:
        """An announcement of the leader has arrived, through whomever."""
        self._leader_heard_s = now_s
        self._leader_gone_s = None

    def gone(self, now_s: float, node: NodeId) -> None:
        """Nobody listens at a node's address, or another node or run does."""
        if node == self._context.view.leader:
            since_s, _ = self._leader_gone_s or (now_s, now_s)
            self._leader_gone_s = (since_s, now_s)

    def overdue(self, now_s: float) -> None:
        """Beat, and look at who has been silent."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return
        config = self._context.run.protocol
        context = self._context
        # Counted from now: after a long stall one heartbeat is owed, not a burst.
        self.deadline_s = now_s + config.heartbeat_interval_s
        self._beat(now_s)
        for node, heard in self._heard.items():
            if now_s - heard.since_s > heard.patience.timeout_s:
                self.suspect(now_s, node, "no heartbeat", heard.patience.slack)
        self._await(now_s)
        if context.compute.is_late(now_s):
            # The leader goes on without this node, if others can do its work.
            self._out.send(context.view.leader, Suspect(context.node_id, STANDS_STILL))
        silent_s = now_s - self._leader_heard_s
        if context.node_id != context.view.leader and silent_s > config.leader_timeout_s:
            detail = f"no announcement of the leader for {silent_s:.0f} s"
            self._out.put(Stop(StopReason.LEADER_LOST, detail))
            return
        if self._leader_gone_s is not None:
            since_s, last_s = self._leader_gone_s
            # Where there are other data nodes, they elect another leader.
            alone = len(context.view.data_nodes) == 1
            if alone and last_s - since_s > config.heartbeat_timeout_s:
                detail = f"nobody has listened at the leader's address for {last_s - since_s:.0f} s"
                self._out.put(Stop(StopReason.LEADER_LOST, detail))
                return
            self.catch_up(now_s)
        if now_s < self._asks_until_s or silent_s > 3 * config.heartbeat_timeout_s:
            self.catch_up(now_s)

    def woke(self, now_s: float, asleep_s: float) -> None:
        """Ask what was missed while this process did not run, and go on asking for a while."""
        config = self._context.run.protocol
        self._asks_until_s = now_s + config.heartbeat_timeout_s
        # After so long the leader may not know this node's address any more. Then only a new
        # offer helps, and an answer that does not come soon will not come at all.
        if asleep_s > config.leader_timeout_s:
            self._leader_heard_s = now_s - config.leader_timeout_s + config.heartbeat_timeout_s
        self.catch_up(now_s)

    def _beat(self, now_s: float) -> None:
        """Tell the watchers that this node lives, unless they have heard it."""
        beat = self._context.heartbeat
        # Half an interval: whatever was sent, a watcher never waits for two whole ones.
        since_s = now_s - self._context.run.protocol.heartbeat_interval_s / 2
        due = [
            node
            for node in self._watchers
            if self._told_s[node] < since_s
            or (beat.bans and now_s - self._beat_s[node] >= _BANS_TOLD_S)
        ]
        self._beat_s.update(dict.fromkeys(due, now_s))
        self._out.send_all(due, beat)

    def _await(self, now_s: float) -> None:
        """Ask those that this node waits for whether they live; doubt those that stay silent."""
        context = self._context
        config = self._context.run.protocol
        self._unreached = {n: at_s for n, at_s in self._unreached.items() if n in context.view}
        awaited = sorted((self._awaited() | self._unreached.keys()) - {context.node_id})
        known = self._answered
        self._answered = {node: known.get(node) or self._new(now_s) for node in awaited}
        self._waits_s = {node: self._waits_s.get(node, now_s) for node in awaited}
        late = [n for n, s in self._waits_s.items() if now_s - s > config.heartbeat_timeout_s]
        self.late = tuple(sorted(late, key=self._waits_s.__getitem__)[:AWAITED_MAX])
        for node, answered in self._answered.items():
            silent_s = now_s - answered.since_s
            slack = answered.patience.slack
            overdue = silent_s >= config.heartbeat_timeout_s * slack
            failed_s = self._unreached.get(node, math.inf)
            if overdue or now_s - failed_s > _ANSWER_INTERVALS * config.heartbeat_interval_s:
                self._broken(now_s, node)
            if overdue or node in self._unreached:
                self.suspect(now_s, node, "no answer", slack)
            if silent_s > self._asked_after_s or node in self._unreached:
                self._out.send(node, Ping(_NO_PROBE))

    @property
    def _asked_after_s(self) -> float:
        """A silent node that is waited for is asked after so long: most are done by then."""
        config = self._context.run.protocol
        return config.heartbeat_timeout_s - _ASKED_INTERVALS * config.heartbeat_interval_s

    def undelivered(self, now_s: float, node: NodeId, reason: str) -> None:
        """A message could not be delivered."""
        self._unreached.setdefault(node, now_s)
        self.suspect(now_s, node, reason)

    def suspect(self, now_s: float, node: NodeId, reason: str, slack: float = 1.0) -> None:
        """Tell the leader of a doubt, not more often than once a heartbeat."""
        context = self._context
        last_s = self._suspected_s.get(node, -math.inf)
        if now_s - last_s < context.run.protocol.heartbeat_interval_s or node not in context.view:
            return
        self._suspected_s[node] = now_s
        if node not in self._noted:
            self._noted.add(node)
            self._out.note("peer.suspected", peer=node, reason=reason)
        # That the leader may be gone concerns those who elect another.
        if node != context.view.leader or reason in OF_TENSORS:
            self._out.send(context.view.leader, Suspect(node, reason, slack))

    def received(self, now_s: float, received: Received) -> None:
        """Take in a heartbeat: its sender may be further than this node."""
        assert isinstance(received.message, Heartbeat)
        beat = received.message
        context = self._context
        place = context.iteration, context.view.version
        behind = (beat.iteration, beat.view_version) > place
        if behind and context.node_id in context.view:
            self.catch_up(now_s)

    def catch_up(self, now_s: float) -> None:
        """Ask the leader what was decided meanwhile, not more often than once a heartbeat."""
        context = self._context
        waited_s = now_s - self._asked_s
        if (
            waited_s < context.run.protocol.heartbeat_interval_s
            or context.node_id == context.view.leader
        ):
            return
        self._asked_s = now_s
        self._out.send(context.view.leader, context.catch_up)
