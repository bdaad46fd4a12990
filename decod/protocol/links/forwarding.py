"""A message that does not arrive: it goes round a broken link, or is sent again.

Two members may live and still not reach each other: a route of the internet is down, a firewall is
in between, a link carries a byte a second. Nobody needs to leave the run for that, as long as
somebody else reaches both.

    sender --X--> goal          the link is broken
    sender -----> by -----> goal

A link counts as broken for its sender when the peer does not answer: for a heartbeat's timeout, or,
after the transport has given a message up, for a little longer than a heartbeat takes. For tensors
alone it does when one has travelled too slowly, or two in a row could not be sent. From then on
what is sent to that peer goes by way of another member, and what was still under way is sent
again. The member in between passes messages on without looking at them. It says when it could not,
and when a tensor has arrived; until then the sender keeps the tensor, and sends it another way if
the member in between is lost. Messages are idempotent, so a copy that arrives twice does no harm.

A broken link also counts as the most expensive there is, so flows leave it. It is probed now and
then, at growing intervals, and used again when it carries a tensor in reasonable time.

    whole --a send fails, or no answer--> broken --a probe arrives--> whole

Deviation: in GWTF all nodes of adjacent stages reach each other.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from decod.ids import NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import ProbeLink, Send, SendTensor
from decod.protocol.core.events import Fault, LinkMeasured, Received, SendFailed, TensorSent
from decod.protocol.core.messages import (
    CatchUp,
    Heartbeat,
    Leave,
    LinkReport,
    Message,
    Open,
    Pong,
    Suspect,
)
from decod.protocol.core.messages.decision_messages import ElectionMessage
from decod.protocol.core.messages.scopes import OfAveraging, Passed, Way, travels_on
from decod.protocol.core.view import Member, Role

_RETRY_S = 1.0
"""Pause before an undelivered message is tried again."""


class Outbox:
    """Holds undelivered messages (and their tensors) until they are sent again or dropped."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._out = context.out
        self._waiting: list[tuple[float, int, Send | SendTensor]] = []
        """With the instant and the term that each is tried again at."""

    @property
    def deadline_s(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None  # All wait equally long.

    def undelivered(self, now_s: float, event: SendFailed) -> None:
        """Keep a message for another try, if its receiver would still care."""
        if self._current(event.to, event.message):
            again: Send | SendTensor = Send(event.to, event.message)
            if event.tensor is not None:
                again = SendTensor(event.to, event.message, event.tensor)
            due_s = now_s + _RETRY_S
            assert not self._waiting or self._waiting[-1][0] <= due_s, "the first is due first"
            self._waiting.append((due_s, self._context.view.term, again))
        elif event.tensor is not None:
            self._context.tensors.release(event.tensor)

    def overdue(self, now_s: float) -> None:
        if not self._waiting or self._waiting[0][0] > now_s:
            return
        due = [(term, effect) for due_s, term, effect in self._waiting if due_s <= now_s]
        self._waiting = [entry for entry in self._waiting if entry[0] > now_s]
        for term, effect in due:
            same_term = term == self._context.view.term
            if same_term and self._current(effect.to, effect.message):
                self._out.put(effect)
            elif isinstance(effect, SendTensor):
                self._context.tensors.release(effect.tensor)

    def _current(self, receiver: NodeId, message: Message) -> bool:
        """Whether a message would still mean something to its receiver."""
        if isinstance(message, Open):
            return message.opening.iteration == self._context.iteration
        # That this node can't go on is known to nobody else.
        own = isinstance(message, Suspect) and message.node_id == self._context.node_id
        if own or isinstance(message, Leave):
            return True
        if isinstance(message, ElectionMessage):
            return False  # An election that has not ended is begun again.
        if isinstance(message, (Heartbeat, LinkReport, CatchUp)):
            return False  # A newer one follows by itself.
        if receiver not in self._context.view:
            return False
        if isinstance(message, Passed):
            return True
        if travels_on(message, self._context.opening.anchor):
            return True
        if isinstance(message, OfAveraging):
            return message.averaging.iteration == self._context.iteration
        if (iteration := getattr(message, "iteration", None)) is not None:
            return bool(iteration == self._context.iteration)
        return getattr(message, "view_version", None) == self._context.view.version


_OTHERS_MAX = 3
"""Members that may fail to pass something on to a peer, before it is given up."""

_NUM_AROUND = 2
"""Members by way of which a suspect is asked whether it lives."""

_PROBE_PAUSE_S = 2.0
_PROBE_PAUSE_MAX_S = 60.0
"""Before a broken link is probed again; doubles each time."""

_PROBE_SIZE_BYTES = 1 << 16

_OPEN_MAX = 1024
"""Messages that are kept because they may have to be sent again; of more, the oldest are not."""

_TENSORS_LOST = 2
"""Tensors in a row that could not be sent, though the peer answers: then the link is broken for
tensors."""

_Sending = Send | SendTensor

_PASSING = Heartbeat | LinkReport | CatchUp | Pong | Passed
"""Messages that nobody sends again: a newer one follows, or is asked for."""


@dataclass(slots=True)
class _Broken:
    """A link that this node can't use."""

    tensors_only: bool
    """Control messages still arrive."""
    probe_s: float
    """When the link is tried again."""
    pause_s: float = _PROBE_PAUSE_S
    failed: set[NodeId] = field(default_factory=set)
    """Members that could not pass anything on to the peer."""
    by: NodeId | None = None
    """By way of whom messages go at present."""


@dataclass(slots=True)
class _Open:
    """What has been given to another member, and may not have arrived."""

    sending: _Sending
    by: NodeId


class Forwarding:
    """How one member's messages get to the others.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._out = context.out
        self._broken: dict[NodeId, _Broken] = {}
        self._whole_s: dict[NodeId, float] = {}
        """When a probe last found a broken link to work again."""
        self._open: dict[int, _Open] = {}
        """By ticket. A tensor's entry owns a reference to it."""
        self._num_tickets = 0
        self._direct: dict[tuple[NodeId, TensorId], SendTensor] = {}
        """Tensors under way to members, directly."""
        self._again: set[tuple[NodeId, TensorId]] = set()
        """Those of them that have been sent another way meanwhile."""
        self._passing: dict[tuple[NodeId, TensorId], Way] = {}
        """Tensors that this node passes on."""
        self._num_lost: Counter[NodeId] = Counter()
        """Tensors in a row that could not be sent to a peer."""

    @property
    def deadline_s(self) -> float | None:
        """When the next broken link is probed."""
        if not self._broken:
            return None  # Asked after every event.
        return min(broken.probe_s for broken in self._broken.values())

    @property
    def receivers(self) -> set[NodeId]:
        """Members to whom a tensor is under way."""
        return {to for to, _ in self._direct}

    def goes_around(self, node: NodeId) -> bool:
        """Whether control messages for a member go by way of another."""
        broken = self._broken.get(node)
        around = broken is not None and not broken.tensors_only
        return around and next(self._others(node), None) is not None

    # --- sending ------------------------------------------------------------------------------

    def routed(self, sending: _Sending) -> _Sending:
        """Return what is really sent: to the receiver, or to who passes it on."""
        tensor = sending.tensor if isinstance(sending, SendTensor) else None
        if sending.way is not None or (tensor is None and not self._broken):
            return sending
        to = sending.to
        view = self._context.view
        if to not in view or self._context.node_id not in view:
            return sending
        broken = self._broken.get(to)
        if broken is not None and (tensor is not None or not broken.tensors_only):
            if broken.by is None:
                broken.by = next(self._others(to), None)
            if broken.by is not None:
                return self._given(sending, broken.by)
        if isinstance(sending, SendTensor):
            self._direct[to, sending.tensor] = sending
        return sending

    def around(self, node: NodeId, message: Message) -> int:
        """Send a control message by way of two others, even if the direct link is whole.

        Returns how many there are.
        """
        others = zip(self._others(node), range(_NUM_AROUND), strict=False)
        given = [self._given(Send(node, message), by) for by, _ in others]
        self._out.put(*given)
        return len(given)

    def _given(self, sending: _Sending, by: NodeId) -> _Sending:
        self._num_tickets += 1
        ticket = self._num_tickets
        me = self._context.node_id
        if isinstance(sending, SendTensor):
            self._context.tensors.retain(sending.tensor)
        if not isinstance(sending.message, _PASSING):
            self._open[ticket] = _Open(sending, by)
        if len(self._open) > _OPEN_MAX:
            self._forget(next(iter(self._open)))
        return replace(sending, to=by, way=Way(me, sending.to, self._context.view.term, ticket))

    def _others(self, goal: NodeId) -> Iterator[NodeId]:
        """Yield who may pass something on to a member: of its stage first, then of this one's.

        Clients, which come and go, are the last, and before them members that nobody can dial.
        """
        view = self._context.view
        me = self._context.node_id
        broken = self._broken.get(goal)
        failed = broken.failed if broken is not None else set[NodeId]()
        if len(failed) >= _OTHERS_MAX or goal not in view or me not in view:
            return
        theirs = view.by_id[goal].stage_index
        ours = view.by_id[me].stage_index
        able = [
            m
            for members in (*view.rosters, *view.clients)
            for m in members
            if m.node_id not in (me, goal)
            and m.node_id not in self._broken
            and m.node_id not in failed
        ]

        def rank(member: Member) -> tuple[bool, bool, bool, bool, int]:
            stage = member.stage_index
            return (
                member.role is Role.CLIENT,
                member.outbound,
                stage != theirs,
                stage != ours,
                stage,
            )

        able.sort(key=rank)
        # Of equals another for each pair, so that none passes everything on.
        digest = hashlib.sha256(f"{me}/{goal}".encode()).digest()
        while able:
            best = [m for m in able if rank(m) == rank(able[0])]
            chosen = best[digest[0] % len(best)]
            able.remove(chosen)
            yield chosen.node_id

    # --- what becomes of it -------------------------------------------------------------------

    def sent(self, event: TensorSent) -> None:
        """A tensor has arrived at its receiver, or at who is to pass it on."""
        key = (event.to, event.tensor)
        self._num_lost.pop(event.to, None)
        self._direct.pop(key, None)
        self._again.discard(key)
        way = self._passing.pop(key, None)
        if way is not None:
            self._out.send(way.origin, Passed(way.ticket, arrived=True))

    def undelivered(self, now_s: float, event: SendFailed) -> SendFailed | None:
        """Something could not be sent.

        Returns:
            The failure as it concerns this node: of a message to its goal. None if it does not,
            because it is another's message, or has been sent another way already.
        """
        way = event.way
        tensor = event.tensor
        key = (event.to, tensor) if tensor is not None else None
        if key is not None:
            self._tensor_failed(now_s, event)
        if way is not None and way.origin != self._context.node_id:
            if tensor is not None:
                self._passing.pop((event.to, tensor), None)
                self._context.tensors.release(tensor)
            self._out.send(way.origin, Passed(way.ticket, arrived=False))
            return None
        if way is not None:
            # Nothing is said of the goal: who was to pass it on is out of reach.
            self._fails(way.goal, event.to)
            entry = self._open.pop(way.ticket, None)
            if tensor is not None:
                self._context.tensors.release(tensor)
            if entry is not None:
                self._out.put(entry.sending)
            return None
        if key is not None:
            self._direct.pop(key, None)
            if key in self._again:
                self._again.discard(key)
                self._context.tensors.release(key[1])
                return None
        return event

    def passed(self, sender: NodeId, message: Passed) -> SendFailed | None:
        """Somebody says what became of what it was to pass on.

        Returns:
            The failure of the message if it has not arrived.
        """
        entry = self._open.get(message.ticket)
        if entry is None or entry.by != sender:
            return None
        if message.arrived:
            self._forget(message.ticket)
            return None
        sending = self._open.pop(message.ticket).sending
        self._fails(sending.to, sender)
        # Whoever gets the failure takes over the entry's reference to a tensor.
        tensor = sending.tensor if isinstance(sending, SendTensor) else None
        return SendFailed(sending.to, sending.message, "no member can reach it", tensor)

    def _fails(self, goal: NodeId, by: NodeId) -> None:
        """Have another than `by` pass on what is for a member."""
        if (broken := self._broken.get(goal)) is not None:
            broken.failed.add(by)
            broken.by = None

    def _tensor_failed(self, now_s: float, event: SendFailed) -> None:
        """Take in that a tensor could not be sent."""
        if event.fault is Fault.NONE:
            return
        self._num_lost[event.to] += 1
        if event.fault is not Fault.LINK or self._num_lost[event.to] >= _TENSORS_LOST:
            self.broken(now_s, event.to, tensors_only=True)

    def _forget(self, ticket: int) -> None:
        sending = self._open.pop(ticket).sending
        if isinstance(sending, SendTensor):
            self._context.tensors.release(sending.tensor)

    # --- passing on ---------------------------------------------------------------------------

    def pass_on(self, received: Received) -> None:
        """Send on what another has given this node for somebody else."""
        way = received.way
        view = self._context.view
        me = self._context.node_id
        assert way is not None
        if not {me, way.origin, way.goal} <= view.by_id.keys():
            self._out.free(received.tensor)
            self._out.send(way.origin, Passed(way.ticket, arrived=False))
        elif received.tensor is None:
            self._out.put(Send(way.goal, received.message, way))
        else:
            tensor = self._context.tensors.add(received.tensor)
            self._passing[way.goal, tensor] = way
            self._out.put(SendTensor(way.goal, received.message, tensor, way))

    # --- links --------------------------------------------------------------------------------

    def broken(self, now_s: float, node: NodeId, *, tensors_only: bool = False) -> None:
        """The link to a member carries nothing. What is under way on it is sent another way."""
        known = self._broken.get(node)
        view = self._context.view
        if node not in view or self._context.node_id not in view:
            return
        if known is not None and (tensors_only or not known.tensors_only):
            return
        if known is None:
            self._broken[node] = _Broken(tensors_only, now_s + _PROBE_PAUSE_S)
            self._context.links.broken.add(node)
        else:
            known.tensors_only = False
        for other in self._broken.values():
            other.by = None if other.by == node else other.by
        if next(self._others(node), None) is None:
            return
        self._out.note("link.broken", peer=node)
        for key, sending in list(self._direct.items()):
            if key[0] == node:
                del self._direct[key]
                self._again.add(key)
                self._context.tensors.retain(sending.tensor)
                self._out.put(sending)

    def hinted(self, now_s: float, node: NodeId) -> None:
        """The link to a member may be broken, unless it has lately been seen to work."""
        if now_s - self._whole_s.get(node, -math.inf) >= _PROBE_PAUSE_MAX_S:
            self.broken(now_s, node)

    def measured(self, now_s: float, event: LinkMeasured) -> None:
        """A probe has ended: of a broken link, maybe."""
        broken = self._broken.get(event.peer)
        ended = event.bandwidth_bytes_per_s is not None or event.latency_s is None
        if broken is None or not ended:
            return
        if event.bandwidth_bytes_per_s is not None:
            self._whole(event.peer)
            self._whole_s[event.peer] = now_s
            self._out.note("link.restored", peer=event.peer)
        else:
            broken.pause_s = min(2 * broken.pause_s, _PROBE_PAUSE_MAX_S)
            broken.probe_s = now_s + broken.pause_s
            broken.failed.clear()

    def _whole(self, node: NodeId) -> None:
        del self._broken[node]
        self._context.links.broken.discard(node)

    def overdue(self, now_s: float) -> None:
        """Probe the broken links that are due."""
        due = [node for node, broken in self._broken.items() if broken.probe_s <= now_s]
        for node in due:
            # Again only when this has ended; if that is never told, after the longest pause.
            self._broken[node].probe_s = now_s + 2 * _PROBE_PAUSE_MAX_S
            self._out.put(ProbeLink(node, _PROBE_SIZE_BYTES))

    # --- iterations and views ---------------------------------------------------------------------

    def opened(self) -> None:
        """Another iteration begins: what was given away in the last one matters to nobody.

        Parts of an average that travels still do.
        """
        anchor = self._context.opening.anchor
        stale = [
            ticket
            for ticket, entry in self._open.items()
            if not travels_on(entry.sending.message, anchor)
        ]
        for ticket in stale:
            self._forget(ticket)

    def end(self) -> None:
        """The run is over: nobody needs the tensors that were given away."""
        tensors = [t for t, entry in self._open.items() if isinstance(entry.sending, SendTensor)]
        for ticket in tensors:
            self._forget(ticket)

    def adopt(self) -> None:
        """The context has a new view: what its lost members were to pass on is sent again."""
        view = self._context.view
        self._num_lost.clear()
        for node in [node for node in self._broken if node not in view]:
            self._whole(node)
        self._whole_s = {node: at_s for node, at_s in self._whole_s.items() if node in view}
        for broken in self._broken.values():
            broken.by = None
            broken.failed.clear()
        for ticket, entry in list(self._open.items()):
            if entry.sending.to not in view:
                self._forget(ticket)
            elif entry.by not in view:
                # Whoever sends it takes over the entry's reference to a tensor.
                self._out.put(self._open.pop(ticket).sending)
