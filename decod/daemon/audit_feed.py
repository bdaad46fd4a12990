"""What enters a data node's audit log: events of this node, chosen by their names.

Events come from the node's one stream of notes, so a part that notes an event needs to know nothing
of the log. To have another event in the log, name it in `AUDITED`.

The event loop only puts events into a queue. A thread writes what has come meanwhile, and waits for
the disk. If the disk is full or fails, training goes on, the operator is told, and events wait in
memory until there is no more room.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum, auto
from functools import partial
from itertools import islice
from typing import Protocol, Self

from decod.ids import NodeId
from decod.membership.audit_log import FOLDER, AuditEvent, AuditLog
from decod.membership.papers import Membership
from decod.net.door import PeerFault
from decod.net.rate import RateLimiter
from decod.protocol.core.view import Role
from decod.tasks import cancelled, in_thread
from decod.texts import why_of
from decod.wall_clock import wall_clock

PEER_BURST, PEER_RATE_PER_S = 20, 1 / 60
"""Lines of one event that one peer can cause: so many at once, then at this rate."""
EVENT_BURST, EVENT_RATE_PER_S = 1000, 20 / 60
"""Lines of one event that all peers together can cause."""
WAITING_MAX = 4096
"""Events that wait for the disk. Further ones are lost, and counted."""
OMITTED, INTERRUPTED = "audit_log.omitted", "audit_log.interrupted"
"""Events about the log itself."""
OPERATOR = "operator"

_OMITTED_S = 60.0
"""How often the log says how many events were left out."""
_SOURCES_MAX = 256
"""Peers whose omitted events are counted apart."""
_SOURCES_SHOWN_MAX = 8
_OTHERS = "others"
_BATCH_MAX = 256
"""Events in one write, so that a disk with little room takes some."""
_RETRY_S = 60.0
_END_S = 5.0
"""How long the end of a node waits for a disk that hangs."""
_NODE_FIELDS = ("peer", "node", "node_id")
"""Fields of notes that hold the node that an event is about."""


class Actor(Enum):
    """Who does what an event tells, unless its field `actor` says."""

    NODE = auto()
    """The node whose log it is."""
    PEER = auto()
    """The node that the event is about."""
    OPERATOR = auto()


@dataclass(frozen=True, slots=True)
class Audited:
    """How an event enters the log."""

    actor: Actor = Actor.NODE
    limited: bool = False
    """Peers can cause any number of it. So only some of them are written, and the rest counted."""


_OWN = Audited()
_OPERATORS = Audited(Actor.OPERATOR)
_PEERS = Audited(Actor.PEER, limited=True)

AUDITED: Mapping[str, Audited] = {
    # Who is let in.
    "token.created": _OWN,
    "token.revoked": _OPERATORS,
    "token.used": Audited(Actor.PEER),
    "token.refused": _PEERS,
    "member.admitted": _OWN,
    "member.refused": Audited(limited=True),
    "member.extended": Audited(limited=True),
    "member.renewed": _OWN,
    "certificate.issued": Audited(limited=True),
    # Who is kept out.
    "member.banned": _OPERATORS,
    "member.unbanned": _OPERATORS,
    "bans.changed": _OWN,
    "bans.unproven": _PEERS,
    "caller.refused": _PEERS,
    # Misbehaviour.
    "message.malformed": _PEERS,
    "message.forged": _PEERS,
    "decision.unproven": _PEERS,
    "tensor.unproven": _PEERS,
    "contribution.refused": _PEERS,
    "relay.lied": _PEERS,
    "complaint.unfounded": _PEERS,
    "audit.disputed": _PEERS,
    "audit.unsettled": _PEERS,
    # The run.
    "run.started": _OWN,
    "run.resumed": _OWN,
    "run.entered": _OWN,
    "run.finished": _OWN,
    "node.stopped": _OWN,
    "leader.elected": _OWN,
    "leader.stopped": _OWN,
    "leader.resigned": _OWN,
    "checkpoint.written": _OWN,
}
"""The events that enter the log."""


class TakeNote(Protocol):
    """Tells the operator of an event."""

    def __call__(self, event: str, **fields: object) -> None: ...


def feed_of(membership: Membership, run: str, note: TakeNote) -> "AuditFeed | None":
    """Return the feed of a node's audit log; None if it is no data node, and so has none.

    Args:
        membership: The node's.
        run: The run's name.
        note: Tells the operator what is wrong with the log.
    """
    if membership.role is not Role.DATA or membership.folder is None:
        return None
    log = AuditLog(membership, membership.folder / FOLDER, run)
    return AuditFeed(log, membership.node_id, note)


class AuditFeed:
    """Writes events to an audit log. Use it in `async with`; events may come before that.

    Args:
        log: The log.
        node: This node.
        note: Tells the operator what is wrong with the log.
    """

    def __init__(self, log: AuditLog, node: NodeId, note: TakeNote) -> None:
        self._log, self._node, self._note = log, node, note
        self._waiting: deque[AuditEvent] = deque()
        clock = time.monotonic
        self._per_peer = RateLimiter(clock, rate_per_s=PEER_RATE_PER_S, burst=PEER_BURST)
        self._per_event = RateLimiter(clock, rate_per_s=EVENT_RATE_PER_S, burst=EVENT_BURST)
        self._omitted: Counter[tuple[str, str]] = Counter()
        """Events that were left out since the log last said so, by name and peer."""
        self._tells_s = 0.0
        """When to say so, in monotonic seconds."""
        self._gap = _Gap()
        self._wake, self._ending = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def take(self, event: str, fields: Mapping[str, object]) -> None:
        """Take in one note, if it is to be in the log. Returns at once."""
        audited = AUDITED.get(event)
        if audited is None:
            return
        details = dict(fields)
        node = next((str(details.pop(name)) for name in _NODE_FIELDS if name in details), "")
        address = str(details.pop("address", ""))
        if audited.limited and not self._allows(event, node or address):
            return
        actors = {Actor.NODE: self._node, Actor.PEER: node, Actor.OPERATOR: OPERATOR}
        actor = str(details.pop("actor", actors[audited.actor]))
        self._put(
            AuditEvent(
                time_s=wall_clock(),
                event=event,
                actor=actor,
                node=node,
                address=address,
                details=details,
            )
        )

    def take_fault(self, fault: PeerFault) -> None:
        """Take in a peer's fault, which the server logs and counts itself."""
        fields = {"peer": fault.node, "address": fault.address, "reason": fault.reason}
        self.take(fault.name, fields)

    def _allows(self, event: str, source: str) -> bool:
        """Return whether one more line of an event fits; if not, count it."""
        if self._per_peer.allow((event, source)) and self._per_event.allow(event):
            return True
        if not self._omitted:
            self._tells_s = time.monotonic() + _OMITTED_S
            self._wake.set()
        known = (event, source) in self._omitted or len(self._omitted) < _SOURCES_MAX
        self._omitted[event, source if known else _OTHERS] += 1
        return False

    def _put(self, event: AuditEvent) -> None:
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append(event)
            self._wake.set()
        else:
            self._gap = replace(self._gap, num_lost=self._gap.num_lost + 1)

    # --- writing ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._ending.set()
        self._wake.set()
        await asyncio.wait({self._task}, timeout=_END_S)
        await cancelled(self._task)

    async def _keep(self) -> None:
        """Write what comes, until the end."""
        while True:
            ends, left_s = self._ending.is_set(), self._tells_s - time.monotonic()
            if self._omitted and (ends or left_s <= 0):
                self._put_omitted()
            if self._waiting:
                if not await self._write():
                    if ends:
                        return
                    await _within(self._ending, _RETRY_S)
            elif ends:
                break
            else:
                await _within(self._wake, left_s if self._omitted else None)
                self._wake.clear()
        with suppress(OSError):
            await in_thread(self._log.close)

    def _put_omitted(self) -> None:
        """Have the log say how many events were left out, and whose most were."""
        for event in sorted({event for event, _ in self._omitted}):
            peers = Counter({peer: num for (e, peer), num in self._omitted.items() if e == event})
            shown = dict(peers.most_common(_SOURCES_SHOWN_MAX))
            self._put(self._own(OMITTED, {"of": event, "count": peers.total(), **shown}))
        self._omitted.clear()

    async def _write(self) -> bool:
        """Write the events that wait; return whether the disk took them."""
        events, gap = list(islice(self._waiting, _BATCH_MAX)), self._gap
        self._gap = _Gap()
        first = [self._own(INTERRUPTED, gap.fields)] if gap else []
        try:
            altered = await in_thread(partial(self._log.append, [*first, *events]))
        except OSError as error:
            num_lost = gap.num_lost + self._gap.num_lost
            self._gap = gap = _Gap(gap.since_s or wall_clock(), why_of(error), num_lost)
            waiting = len(self._waiting)
            self._note(
                "audit_log.failed", reason=gap.reason, num_waiting=waiting, num_lost=num_lost
            )
            return False
        for _ in events:
            self._waiting.popleft()
        if gap:
            self._note("audit_log.restored", num_lost=gap.num_lost)
        if altered:
            self._note("audit_log.altered", reason=altered)
        return True

    def _own(self, event: str, details: Mapping[str, object]) -> AuditEvent:
        return AuditEvent(time_s=wall_clock(), event=event, actor=self._node, details=details)


@dataclass(frozen=True, slots=True)
class _Gap:
    """A time in which the disk did not take all events."""

    since_s: float | None = None
    """When the disk began to fail, in seconds of the Unix epoch; None if it did not fail."""
    reason: str = ""
    num_lost: int = 0
    """Events for which there was no room in memory."""

    def __bool__(self) -> bool:
        return self.since_s is not None or self.num_lost > 0

    @property
    def fields(self) -> dict[str, object]:
        """What the log says of it."""
        began = datetime.fromtimestamp(self.since_s or wall_clock(), UTC)
        since = began.isoformat(timespec="seconds")
        return {"since": since, "reason": self.reason, "num_lost": self.num_lost}


async def _within(event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait for an event, but no longer than `timeout_s`. None: for as long as it takes."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
