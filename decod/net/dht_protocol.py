"""One UDP socket of the DHT: it answers datagrams, sends them, and keeps the contacts that follow.

The package `kademlia` supplies the routing table and the metric. Its own protocol class trusts its
input, so one reply could crash the caller or close the socket. Here every field is checked before
use. Datagrams that are wrong are counted and dropped.

Further rules:
- Nobody but a member of the run gets an answer to anything.
- A node enters the table only after it has answered this node's random id. A node that asks is
  pinged first, and a contact that has moved is pinged at its new address.
- Whoever repeats another's datagrams in the name of a third node can't flood that one: what is sent
  to an address in response to a datagram from there is never longer than the datagram.
- Limits of rates come before checks of signatures.
- A reply that nobody asked for is dropped before it is decoded.
- A call ends within two seconds, in one if nobody answers. A cancelled one leaves nothing behind.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from kademlia.node import Node
from typing_extensions import override

from decod.errors import MalformedMessageError
from decod.net.address import Address
from decod.net.dht_datagram import (
    DATAGRAM_SIZE_MAX_BYTES,
    GREETING,
    GREETING_SIZE_BYTES,
    ID_END,
    KADEMLIA_ID_SIZE_BYTES,
    NONCE_SIZE_BYTES,
    PING,
    PING_SIZE_BYTES,
    REPLY,
    REPLY_SIZE_LEAST_BYTES,
    REQUEST,
    REQUEST_HEAD_SIZE_BYTES,
    REQUEST_SIZE_LEAST_BYTES,
    RUN_TAG_SIZE_BYTES,
    WELCOME,
    Session,
    Sessions,
    decoded,
    encoded,
    framed,
    new_nonce,
    nodes_in,
    search_call,
    source_of,
    unframed,
)
from decod.net.dht_record import RecordStore
from decod.net.dht_table import ContactTable, DhtLimits
from decod.net.net_limits import Counters, RateLimiter

# A datagram is sent once for each wait.
_WAITS_S = (0.4, 0.6)
_MEETINGS_MAX = 32

Found = list[Node] | bytes | None
"""Contacts near a place, or the bytes of the record there, unchecked; None for no valid answer."""


@dataclass(slots=True)
class _Call:
    """A datagram that waits for its answer."""

    address: Address
    session: Session | None
    """None for a greeting."""
    answer: asyncio.Future[object]


class DhtProtocol(asyncio.DatagramProtocol):
    """One UDP socket of the DHT.

    Args:
        tag: Names the run in a greeting. Greetings of other runs are dropped.
        sessions: This node's sessions.
        table: Its contacts.
        store: The records that it holds.
        counters: Counts faults, by IP address, or by node id if the fault is a member's.
        limits: The limits.
    """

    def __init__(
        self,
        tag: bytes,
        sessions: Sessions,
        table: ContactTable,
        store: RecordStore,
        counters: Counters,
        limits: DhtLimits,
    ) -> None:
        self._run_tag = tag
        self._sessions = sessions
        self._table = table
        self._store = store
        self._counters = counters
        self._limits = limits
        clock = asyncio.get_running_loop().time
        self._greetings = RateLimiter(
            clock, rate_per_s=limits.greetings_per_s, burst=limits.greetings_burst
        )
        self._checks = RateLimiter(clock, rate_per_s=limits.checks_per_s, burst=limits.checks_per_s)
        self._requests = RateLimiter(
            clock, rate_per_s=limits.requests_per_s, burst=limits.requests_burst
        )
        self._transport: asyncio.DatagramTransport | None = None
        self._dual_stack = False
        self._calls: dict[bytes, _Call] = {}
        self._meetings: dict[Address, asyncio.Task[None]] = {}
        self._closed = False
        self._lost = asyncio.get_running_loop().create_future()
        self.on_lost: Callable[[], None] | None = None
        """Called if the socket closes before `close` is called."""
        self.is_quiet: Callable[[], bool] = lambda: False
        """True if this node answers nobody, because others can't reach this node by themselves."""

    # --- socket -----------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an assert: in Python 3.11 the loop's own class does not derive from this one.
        self._transport = cast("asyncio.DatagramTransport", transport)
        self._dual_stack = transport.get_extra_info("socket").family == socket.AF_INET6

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._lost.done():
            self._lost.set_result(None)
        if not self._closed and self.on_lost is not None:
            self.on_lost()

    @override
    def error_received(self, exc: Exception) -> None:
        """Ignore the error of a peer's closed port: the call to it times out."""

    async def close(self) -> None:
        """Close the socket, end open calls, and wait for the tasks of this object."""
        self._closed = True
        if self._transport is not None:
            # Not `close`, which would wait for datagrams that the system has not taken yet.
            self._transport.abort()
            await self._lost
        for call in self._calls.values():
            _settle(call, None)
        meetings = list(self._meetings.values())
        for task in meetings:
            task.cancel()
        await asyncio.gather(*meetings, return_exceptions=True)

    @override
    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        source = source_of(addr)
        kind = data[:1]
        size_bytes = len(data)
        if kind in (GREETING, REQUEST) and self.is_quiet():
            # A router lets the pings of those through that this node has asked. An answer would
            # make it a contact, to which others are sent that can't reach it.
            return
        if kind == GREETING and size_bytes == GREETING_SIZE_BYTES:
            self._greeting_received(data, source)
        elif kind == WELCOME and size_bytes <= GREETING_SIZE_BYTES:
            self._welcome_received(data, source)
        elif kind == REQUEST and REQUEST_SIZE_LEAST_BYTES <= size_bytes <= DATAGRAM_SIZE_MAX_BYTES:
            self._request_received(data, source)
        elif kind == REPLY and REPLY_SIZE_LEAST_BYTES <= size_bytes <= DATAGRAM_SIZE_MAX_BYTES:
            self._reply_received(data, source)
        else:
            self._count("malformed", source)

    def _send(self, datagram: bytes, address: Address) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        host, port = address
        if self._dual_stack and ":" not in host:
            host = f"::ffff:{host}"
        self._transport.sendto(datagram, (host, port))

    def _count(self, fault: str, source: Address) -> None:
        self._counters.add(f"dht.{fault}", source[0])

    # --- introductions ----------------------------------------------------------------------

    def _greeting_received(self, data: bytes, source: Address) -> None:
        tag_end = ID_END + RUN_TAG_SIZE_BYTES
        if data[ID_END:tag_end] != self._run_tag:
            self._count("foreign", source)
            return
        if (own := self._calls.get(data[1:ID_END])) is not None:
            # This node's own, which was told its own address.
            _settle(own, ())
            return
        limited = self._limits.network_of(source[0])
        if not self._greetings.allow(source if limited is None else source[0]):
            self._count("flood", source)
            return
        introduction, _ = unframed(data[tag_end:])
        session = self._sessions.known(introduction)
        if session is None and not self._checks.allow(""):
            self._count("flood", source)
            return
        session = session or self._met(introduction, source)
        if session is None:
            return
        nonce = new_nonce()
        head = WELCOME + data[1:ID_END] + framed(self._sessions.introduction())
        welcome = head + nonce + session.encrypt(nonce, b"", head)
        # It would tell of a bug: introductions are shorter than that.
        assert len(welcome) + PING_SIZE_BYTES <= GREETING_SIZE_BYTES, len(welcome)
        self._send(welcome, source)
        self._meet(session, source)

    def _welcome_received(self, data: bytes, source: Address) -> None:
        call = self._calls.get(data[1:ID_END])
        if call is None or call.address != source or call.session is not None:
            self._count("unasked", source)
            return
        introduction, proof = unframed(data[ID_END:])
        session = self._sessions.known(introduction) or self._met(introduction, source)
        head = data[: len(data) - len(proof)]
        nonce = proof[:NONCE_SIZE_BYTES]
        if session is None:
            _settle(call, ())
        elif session.decrypt(nonce, proof[NONCE_SIZE_BYTES:], head) is None:
            # Somebody shows an introduction that is not his own.
            self._count("unproven", source)
            _settle(call, ())
        else:
            self._sessions.answered(session)
            _settle(call, session)

    def _met(self, introduction: bytes, source: Address) -> Session | None:
        """Return the session that follows from an introduction, or count its fault."""
        try:
            return self._sessions.meet(introduction)
        except MalformedMessageError:
            self._count("unproven", source)
            return None

    # --- answering --------------------------------------------------------------------------

    def _request_received(self, data: bytes, source: Address) -> None:
        head = data[:REQUEST_HEAD_SIZE_BYTES]
        rest = data[REQUEST_HEAD_SIZE_BYTES:]
        session = self._sessions.find(head[1:])
        if session is None:
            self._count("unknown", source)
            return
        message_id = rest[:NONCE_SIZE_BYTES]
        body = session.decrypt(message_id, rest[NONCE_SIZE_BYTES:], head)
        if body is None:
            self._count("malformed", source)
        elif not self._requests.allow(session.node_id):
            self._counters.add("dht.flood", session.node_id)
        else:
            self._answer(session, message_id, body, source)

    def _answer(self, session: Session, message_id: bytes, body: bytes, source: Address) -> None:
        reply = self._reply_to(session, decoded(body))
        if reply is None:
            self._counters.add("dht.malformed", session.node_id)
            return
        nonce = new_nonce()
        head = REPLY + message_id
        datagram = head + nonce + session.encrypt(nonce, encoded(reply), head)
        is_ping = body == PING
        size_bytes = len(datagram) + (0 if is_ping else PING_SIZE_BYTES)
        if size_bytes > REQUEST_SIZE_LEAST_BYTES + len(body):
            self._counters.add("dht.unpadded", session.node_id)
            return
        self._send(datagram, source)
        if not is_ping:
            self._meet(session, source)

    def _reply_to(self, session: Session, call: object) -> object:
        """Return the answer to a member's call; None if there is no such call."""
        match call:
            case ["ping"]:
                return True
            case ["store", bytes(data)]:
                return self._store.put(data, source=session.node_id)
            case ["find_node" | "find_value" as name, bytes(key), bytes(_)] if (
                len(key) == KADEMLIA_ID_SIZE_BYTES
            ):
                return self._found(name, key, session)
        return None

    def _found(self, name: str, key: bytes, session: Session) -> object:
        if name == "find_value" and (record := self._store.get(key)) is not None:
            return {"value": record.data}
        nodes = self._table.nearest(key, without=session.kademlia_id)
        return [list(node) for node in nodes]

    def _meet(self, session: Session, source: Address) -> None:
        """Ping a member at the source of its datagram; if it answers, make it a contact.

        One ping, so that no more is sent there than came from there.
        """
        known = self._table.contact(session.kademlia_id)
        if known is not None and (known.ip, known.port) == source:
            return
        if self._closed or source in self._meetings or len(self._meetings) >= _MEETINGS_MAX:
            return

        async def meet() -> None:
            if await self._request(source, session, PING, waits_s=(sum(_WAITS_S),)) is True:
                self._sessions.answered(session)
                self._table.add(Node(session.kademlia_id, *source))

        task = asyncio.get_running_loop().create_task(meet())
        self._meetings[source] = task
        task.add_done_callback(lambda _: self._meetings.pop(source, None))

    # --- asking -----------------------------------------------------------------------------

    async def greet(
        self, address: Address, *, waits_s: tuple[float, ...] = _WAITS_S
    ) -> Node | None:
        """Introduce this node to the member at an address; return it as a contact.

        Args:
            address: Where to send the greeting.
            waits_s: How long to wait for the answer, each time that it is sent.

        Returns:
            None if no member of the run answers there.
        """
        message_id = new_nonce()
        introduction = framed(self._sessions.introduction())
        greeting = GREETING + message_id + self._run_tag + introduction
        greeting = greeting.ljust(GREETING_SIZE_BYTES, b"\0")
        session = await self._exchange(greeting, message_id, address, None, waits_s)
        if not isinstance(session, Session):
            return None
        node = Node(session.kademlia_id, *address)
        self._table.add(node)
        return node

    async def ping(self, node: Node) -> None:
        """Ask a contact whether it still lives, and drop it if it does not answer."""
        if await self._call(node, PING) is not True:
            self._drop(node)

    async def find(self, node: Node, key: bytes, *, value: bool) -> Found:
        """Ask `node` for contacts near `key`, or for the record at `key`.

        Args:
            node: The node to ask.
            key: A place in the DHT, 20 bytes.
            value: Ask for the record. A node without it answers with contacts.

        Returns:
            Contacts near `key`, or the bytes of a record, unchecked. None if there was no valid
            answer: then `node` has been dropped from the contacts.
        """
        reply = await self._call(node, search_call("find_value" if value else "find_node", key))
        match reply:
            case {"value": bytes(data), **rest} if value and not rest:
                self._table.add(node)
                return data
            case list() if (nodes := nodes_in(reply)) is not None:
                self._table.add(node)
                return [each for each in nodes if self._is_other(each)]
        self._judge(reply, node)
        return None

    async def store(self, node: Node, data: bytes) -> bool:
        """Give `node` a record; return whether it holds this record or a newer one."""
        reply = await self._call(node, encoded(["store", data]))
        if not isinstance(reply, bool):
            self._judge(reply, node)
        return reply is True

    async def _call(self, node: Node, body: bytes) -> object:
        """Ask a node, and introduce this node first if need be; None if there is no answer."""
        address = (node.ip, node.port)
        session = self._sessions.of(node.id)
        if session is not None:
            reply = await self._request(address, session, body, waits_s=_WAITS_S[:1])
            if reply is not None:
                return reply
        # A member that was restarted has lost its sessions.
        waits_s = _WAITS_S if session is None else _WAITS_S[1:]
        met = await self.greet(address, waits_s=waits_s)
        if met is None or met.id != node.id:
            return None
        session = self._sessions.of(node.id)
        return None if session is None else await self._request(address, session, body)

    async def _request(
        self,
        address: Address,
        session: Session,
        body: bytes,
        *,
        waits_s: tuple[float, ...] = _WAITS_S,
    ) -> object:
        """Send a call; return the decoded reply, or None if none came in time."""
        message_id = new_nonce()
        head = REQUEST + self._sessions.tag
        datagram = head + message_id + session.encrypt(message_id, body, head)
        return await self._exchange(datagram, message_id, address, session, waits_s)

    async def _exchange(
        self,
        datagram: bytes,
        message_id: bytes,
        address: Address,
        session: Session | None,
        waits_s: tuple[float, ...],
    ) -> object:
        """Send a datagram once for each wait, until it is answered."""
        if self._closed:
            return None
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._calls[message_id] = _Call(address, session, answer)
        try:
            for wait_s in waits_s:
                self._send(datagram, address)
                done, _ = await asyncio.wait({answer}, timeout=wait_s)
                if done or self._closed:
                    break
            return answer.result() if answer.done() else None
        finally:
            del self._calls[message_id]

    def _reply_received(self, data: bytes, source: Address) -> None:
        head = data[:ID_END]
        rest = data[ID_END:]
        call = self._calls.get(head[1:])
        if call is None or call.address != source or call.session is None:
            # A late reply, or a forged one: only the node that was asked knows the id.
            self._count("unasked", source)
            return
        body = call.session.decrypt(rest[:NONCE_SIZE_BYTES], rest[NONCE_SIZE_BYTES:], head)
        if body is None:
            self._count("malformed", source)
            return
        _settle(call, decoded(body))

    def _judge(self, reply: object, node: Node) -> None:
        """Drop a contact that has not answered as it should."""
        session = self._sessions.of(node.id)
        if reply is not None and session is not None:
            self._counters.add("dht.malformed", session.node_id)
        self._drop(node)

    def _is_other(self, node: Node) -> bool:
        """Return whether this is another node, to which this socket can send."""
        return node.id != self._sessions.kademlia_id and (self._dual_stack or ":" not in node.ip)

    def _drop(self, node: Node) -> None:
        if self._table.lose(node):
            self._sessions.drop(node.id)


def _settle(call: _Call, answer: object) -> None:
    if not call.answer.done():
        call.answer.set_result(answer)
