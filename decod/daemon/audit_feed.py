"""What enters a data node's audit log: events of this node, chosen by their names.

The log is a view of the journal, so a part that notes an event needs to know nothing of it. To have
another event in the log, name it in `AUDITED`. If the disk is full or fails, training goes on, the
operator is told, and events wait in memory until there is no more room.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from functools import partial
from typing import Self

from decod.clocks import wall_clock
from decod.ids import NodeId
from decod.journal.journal import RETRY_S, JournalEntry, Outage, Spool, TakeNote
from decod.membership.audit_log import FOLDER, AuditEvent, AuditLog
from decod.membership.papers import Membership
from decod.net.door import PeerFault
from decod.net.net_limits import RateLimiter
from decod.protocol.core.view import Role

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
    """The view of the journal that is signed. Use it in `async with`; entries may come before that.

    Args:
        log: The log.
        node: This node.
        note: Tells the operator what is wrong with the log.
        retry_s: How long after a failure the disk is tried again.
    """

    def __init__(
        self, log: AuditLog, node: NodeId, note: TakeNote, *, retry_s: float = RETRY_S
    ) -> None:
        self._log, self._node, self._note = log, node, note
        self._spool = Spool(self._write, log.close, waiting_max=WAITING_MAX, retry_s=retry_s)
        self._spool.on_failed.append(self._failed)
        self._spool.on_restored.append(self._restored)
        clock = time.monotonic
        self._per_peer = RateLimiter(clock, rate_per_s=PEER_RATE_PER_S, burst=PEER_BURST)
        self._per_event = RateLimiter(clock, rate_per_s=EVENT_RATE_PER_S, burst=EVENT_BURST)
        self._omitted: Counter[tuple[str, str]] = Counter()
        """Events that were left out since the log last said so, by name and peer."""
        self._loop = asyncio.get_running_loop()
        self._telling: asyncio.TimerHandle | None = None
        """Will say so."""

    async def __aenter__(self) -> Self:
        await self._spool.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._tell_omitted()
        await self._spool.__aexit__(*exc_info)

    def take(self, entry: JournalEntry) -> None:
        """Take in one entry, if it is to be in the log. Returns at once."""
        event, details = entry.event, dict(entry.fields)
        audited = AUDITED.get(event)
        if audited is None:
            return
        node = next((str(details.pop(name)) for name in _NODE_FIELDS if name in details), "")
        address = str(details.pop("address", ""))
        if audited.limited and not self._allows(event, node or address):
            return
        actors = {Actor.NODE: self._node, Actor.PEER: node, Actor.OPERATOR: OPERATOR}
        actor = str(details.pop("actor", actors[audited.actor]))
        self._spool.add(
            AuditEvent(
                time_s=entry.time_s,
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
        self.take(JournalEntry(fault.name, fields, wall_clock(), time.monotonic()))

    def _allows(self, event: str, source: str) -> bool:
        """Return whether one more line of an event fits; if not, count it."""
        if self._per_peer.allow((event, source)) and self._per_event.allow(event):
            return True
        if self._telling is None:
            self._telling = self._loop.call_later(_OMITTED_S, self._tell_omitted)
        known = (event, source) in self._omitted or len(self._omitted) < _SOURCES_MAX
        self._omitted[event, source if known else _OTHERS] += 1
        return False

    def _tell_omitted(self) -> None:
        """Have the log say how many events were left out, and whose most were."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        for event in sorted({event for event, _ in self._omitted}):
            peers = Counter({peer: num for (e, peer), num in self._omitted.items() if e == event})
            shown = dict(peers.most_common(_SOURCES_SHOWN_MAX))
            self._spool.add(self._own(OMITTED, {"of": event, "count": peers.total(), **shown}))
        self._omitted.clear()

    # --- writing ------------------------------------------------------------------------------

    def _write(self, events: Sequence[AuditEvent], outage: Outage) -> None:
        """Add events to the log, from a thread; say first if some may lack before them."""
        gap = [self._own(INTERRUPTED, _gap_fields(outage))] if outage else []
        if altered := self._log.append([*gap, *events]):
            tell = partial(self._note, "audit_log.altered", reason=altered)
            with suppress(RuntimeError):  # The event loop has ended meanwhile.
                self._loop.call_soon_threadsafe(tell)

    def _failed(self, outage: Outage) -> None:
        self._note(
            "audit_log.failed",
            reason=outage.reason,
            num_waiting=self._spool.num_waiting,
            num_lost=outage.num_lost,
        )

    def _restored(self, outage: Outage) -> None:
        self._note("audit_log.restored", num_lost=outage.num_lost)

    def _own(self, event: str, details: Mapping[str, object]) -> AuditEvent:
        return AuditEvent(time_s=wall_clock(), event=event, actor=self._node, details=details)


def _gap_fields(outage: Outage) -> dict[str, object]:
    """Return what the log says of a time in which the disk did not take all events."""
    began = datetime.fromtimestamp(outage.since_s or wall_clock(), UTC)
    since = began.isoformat(timespec="seconds")
    return {"since": since, "reason": outage.reason, "num_lost": outage.num_lost}
