"""Datagrams of the DHT, and the contacts that follow from them.

Routing table and metric are those of the `kademlia` package; so is the form of a datagram: one byte
(0 a request, 1 a reply), 20 bytes that pair the two, and msgpack. The package's own protocol class
trusts what it receives, so that one reply could crash the caller or close the socket; here every
field is checked before use, and whatever is wrong is counted and dropped.

Further rules:
- A contact enters the table only after it has answered; one that asks is asked back first.
- A contact that has moved is taken at its new address once it answers there.
- A reply is never longer than the request, which is padded for that: nobody can use this node to
  flood a third one.
- What comes unasked, or from another run, is dropped before it is decoded.
- Calls end within a second, with one repeat on the way; a cancelled call leaves nothing behind.
"""

import asyncio
import ipaddress
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any, cast

import umsgpack  # type: ignore[import-untyped]  # Comes with kademlia; has no types.
from kademlia.node import Node
from kademlia.routing import RoutingTable
from typing_extensions import override

from decod.net.address import Address
from decod.net.counters import Counters
from decod.net.dht_record import RecordStore
from decod.net.rate import RateLimiter

DATAGRAM_SIZE_MAX_BYTES = 1200
BUCKET_SIZE = 8
ID_SIZE_BYTES = 20
_HEAD_SIZE_BYTES = 1 + ID_SIZE_BYTES
_REQUEST, _REPLY = b"\x00", b"\x01"
_TAG_FIELD_SIZE_BYTES = 2 + 8
# Covers the longest reply: a record of 1000 bytes, or eight contacts.
_PADDED_SIZE_BYTES = 1100
# A repeat after the first wait, then the rest of the second.
_WAITS_S = (0.4, 0.6)
_MEETINGS_MAX = 32
# Datagrams of one address and port.
_RATE_PER_S, _BURST = 50.0, 100.0

# All that the decoder raises on hostile bytes.
_UNPACK_ERRORS = (
    umsgpack.UnpackException,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    OSError,
)


def _opening(name: str, num_fields: int) -> bytes:
    """Returns what the body of a request begins with, up to the sender's id."""
    call = umsgpack.packb([name, [bytes(ID_SIZE_BYTES), *([0] * (num_fields - 1))]])
    return bytes(call[: call.index(bytes(ID_SIZE_BYTES))])


_OPENINGS = tuple(
    _opening(name, num_fields)
    for name, num_fields in (("ping", 2), ("store", 3), ("find_node", 4), ("find_value", 4))
)


def _tag_field_of(request: bytes) -> bytes | None:
    """Returns the bytes in which a request names its run, without decoding it.

    None if it does not begin as a request does.
    """
    for opening in _OPENINGS:
        if request.startswith(opening, _HEAD_SIZE_BYTES):
            begin = _HEAD_SIZE_BYTES + len(opening) + ID_SIZE_BYTES
            return request[begin : begin + _TAG_FIELD_SIZE_BYTES]
    return None


class DhtProtocol(asyncio.DatagramProtocol):
    """One UDP socket of the DHT.

    Args:
        kademlia_id: This node's place, 20 bytes.
        run_tag: 8 bytes. Requests with another are dropped, so that runs do not mix.
        on_lost: Called when the socket closes without `close` having been called.
    """

    def __init__(
        self,
        kademlia_id: bytes,
        run_tag: bytes,
        store: RecordStore,
        counters: Counters,
        on_lost: Callable[[], None],
    ) -> None:
        self._run_tag = run_tag
        self._tag_field = bytes(umsgpack.packb(run_tag))
        self._store = store
        self._counters = counters
        self._on_lost = on_lost
        self._limiter = RateLimiter(
            asyncio.get_running_loop().time, rate_per_s=_RATE_PER_S, burst=_BURST
        )
        self._transport: asyncio.DatagramTransport | None = None
        self._dual_stack = False
        self._outstanding: dict[bytes, tuple[Address, asyncio.Future[object]]] = {}
        self._meetings: dict[Address, asyncio.Task[None]] = {}
        self._closed = False
        self._lost = asyncio.get_running_loop().create_future()
        self.source = Node(kademlia_id)
        self.table = RoutingTable(self, BUCKET_SIZE, self.source)

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
        if not self._closed:
            self._on_lost()

    @override
    def error_received(self, exc: Exception) -> None:
        """Ignores that a peer's port is closed: its call ends by time."""

    async def close(self) -> None:
        """Closes the socket and waits for what this object has started."""
        self._closed = True
        if self._transport is not None:
            # Not `close`: datagrams that the system has not taken yet are not worth waiting for.
            self._transport.abort()
            await self._lost
        for _, future in self._outstanding.values():
            if not future.done():
                future.set_result(None)
        meetings = list(self._meetings.values())
        for task in meetings:
            task.cancel()
        await asyncio.gather(*meetings, return_exceptions=True)

    @override
    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        source = _plain(addr)
        if not self._limiter.allow(source):
            self._counters.add("dht.flood", source[0])
            return
        message_id = data[1:_HEAD_SIZE_BYTES]
        whole = _HEAD_SIZE_BYTES <= len(data) <= DATAGRAM_SIZE_MAX_BYTES
        # What comes unasked, or from another run, is dropped before it is decoded.
        if whole and data[:1] == _REPLY:
            asked, _ = self._outstanding.get(message_id, (None, None))
            if asked == source:
                self._settle(message_id, _decoded(data))
            else:
                # Late, or made up: only the node that was asked knows the id.
                self._counters.add("dht.unasked", source[0])
        elif whole and data[:1] == _REQUEST and (tag := _tag_field_of(data)) is not None:
            if tag == self._tag_field:
                self._answer(message_id, _decoded(data), source, len(data))
            else:
                self._counters.add("dht.foreign", source[0])
        else:
            self._counters.add("dht.malformed", source[0])

    def _send(self, datagram: bytes, address: Address) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        host, port = address
        if self._dual_stack and ":" not in host:
            host = f"::ffff:{host}"
        self._transport.sendto(datagram, (host, port))

    def _can_dial(self, address: Address) -> bool:
        return self._dual_stack or ":" not in address[0]

    # --- answering --------------------------------------------------------------------------

    def _answer(self, message_id: bytes, body: object, source: Address, size_bytes: int) -> None:
        match body:
            case ["ping", [bytes(node_id), _]]:
                reply: object = self.source.id
            case ["store", [bytes(node_id), _, bytes(data)]]:
                # Stored below: not before the sender is known to be another node.
                reply = data
            case ["find_node" | "find_value" as name, [bytes(node_id), _, bytes(key), _]]:
                if len(key) != ID_SIZE_BYTES:
                    self._counters.add("dht.malformed", source[0])
                    return
                reply = self._found(name, key, source)
            case _:
                self._counters.add("dht.malformed", source[0])
                return
        if len(node_id) != ID_SIZE_BYTES or node_id == self.source.id:
            self._counters.add("dht.malformed", source[0])
            return
        if body[0] == "store":
            reply = self._store.put(reply, source=source[0])
        datagram = _REPLY + message_id + umsgpack.packb(reply)
        if len(datagram) > max(size_bytes, 64):
            self._counters.add("dht.unpadded", source[0])
            return
        self._send(datagram, source)
        self._meet(node_id, source)

    def _found(self, name: str, key: bytes, source: Address) -> object:
        if name == "find_value" and (record := self._store.get(key)) is not None:
            return {"value": record.to_bytes()}
        asker = Node(key, *source)
        nodes = self.table.find_neighbors(Node(key), BUCKET_SIZE, exclude=asker)
        return [list(node) for node in nodes]

    def _meet(self, node_id: bytes, source: Address) -> None:
        """Asks an unknown node back, to learn whether it is where it seems to be."""
        known = self.contact(node_id)
        if known is not None and (known.ip, known.port) == source:
            return
        if self._closed or source in self._meetings or len(self._meetings) >= _MEETINGS_MAX:
            return

        async def meet() -> None:
            if await self.ping(source) == node_id:
                self.add(Node(node_id, *source))

        self._own_meeting(source, meet())

    def _own_meeting(self, source: Address, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._meetings[source] = task
        task.add_done_callback(lambda _: self._meetings.pop(source, None))

    # --- contacts ---------------------------------------------------------------------------

    def contact(self, node_id: bytes) -> Node | None:
        """Returns the contact with this id, if it is in the table."""
        bucket = self.table.buckets[self.table.get_bucket_for(Node(node_id))]
        return bucket.nodes.get(node_id)

    def contacts(self) -> list[Node]:
        """Returns all contacts."""
        return [node for bucket in self.table.buckets for node in bucket.get_nodes()]

    def add(self, node: Node) -> None:
        """Puts a node that has answered into the table, in place of one with its id."""
        if node.id == self.source.id:
            return
        known = self.contact(node.id)
        if known is None:
            self.table.add_contact(node)
        elif not known.same_home_as(node):
            known.ip, known.port = node.ip, node.port

    # --- asking -----------------------------------------------------------------------------

    async def ping(self, address: Address) -> bytes | None:
        """Returns the id of the node at `address`, or None if none answers sensibly."""
        reply = await self._request(address, "ping")
        if isinstance(reply, bytes) and len(reply) == ID_SIZE_BYTES:
            return reply
        self._judge(reply, address)
        return None

    async def call_ping(self, node: Node) -> None:
        """Drops a contact that no longer answers. The routing table calls this."""
        if await self.ping((node.ip, node.port)) != node.id:
            self.table.remove_contact(node)

    async def find(self, node: Node, key: bytes, *, value: bool) -> "list[Node] | bytes | None":
        """Asks `node` for what is at `key`.

        Args:
            value: Ask for the record; a node without it tells contacts as if not asked.

        Returns:
            Contacts nearer to `key`; or the bytes of a record, unchecked; or None if nothing
            sensible came, in which case `node` is no contact any more.
        """
        name = "find_value" if value else "find_node"
        address = (node.ip, node.port)
        reply = await self._request(address, name, key, padded=True)
        match reply:
            case {"value": bytes(data), **rest} if value and not rest:
                self.add(node)
                return data
            case list() if (nodes := self._parse_nodes(reply)) is not None:
                self.add(node)
                return nodes
        self._judge(reply, address)
        self.table.remove_contact(node)
        return None

    async def store(self, node: Node, data: bytes) -> bool:
        """Gives `node` a record; returns whether it has it."""
        address = (node.ip, node.port)
        reply = await self._request(address, "store", data)
        if reply is True:
            return True
        if reply is not False:
            self._judge(reply, address)
            self.table.remove_contact(node)
        return False

    async def _request(
        self, address: Address, name: str, *args: bytes, padded: bool = False
    ) -> object:
        """Returns the decoded reply, or None if none came in time."""
        message_id = os.urandom(ID_SIZE_BYTES)
        fields: list[bytes] = [self.source.id, self._run_tag, *args]
        if padded:
            fields.append(b"")
            size_bytes = _HEAD_SIZE_BYTES + len(umsgpack.packb([name, fields]))
            fields[-1] = bytes(_PADDED_SIZE_BYTES - size_bytes)
        datagram = _REQUEST + message_id + umsgpack.packb([name, fields])
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._outstanding[message_id] = (address, future)
        try:
            for wait_s in _WAITS_S:
                self._send(datagram, address)
                done, _ = await asyncio.wait({future}, timeout=wait_s)
                if done or self._closed:
                    break
            return future.result() if future.done() else None
        finally:
            del self._outstanding[message_id]

    def _settle(self, message_id: bytes, body: object) -> None:
        _, future = self._outstanding[message_id]
        if not future.done():
            # None means "no reply", which a reply must not be able to say.
            future.set_result(() if body is None else body)

    def _judge(self, reply: object, address: Address) -> None:
        if reply is not None:
            self._counters.add("dht.malformed", address[0])

    def _parse_nodes(self, reply: list[Any]) -> list[Node] | None:
        """Returns contacts from a peer's reply, or None if one of them is not in order."""
        if len(reply) > BUCKET_SIZE:
            return None
        nodes = []
        for entry in reply:
            match entry:
                case [bytes(node_id), str(ip), int(port)]:
                    address = _checked(ip, port)
                    if len(node_id) != ID_SIZE_BYTES or address is None:
                        return None
                    if node_id != self.source.id and self._can_dial(address):
                        nodes.append(Node(node_id, *address))
                case _:
                    return None
        return nodes


def _decoded(datagram: bytes) -> object:
    """Returns the body of a datagram; if it can't be read, what no message looks like."""
    try:
        body: object = umsgpack.unpackb(datagram[_HEAD_SIZE_BYTES:])
    except _UNPACK_ERRORS:
        # Its caller need not wait any longer.
        return ()
    return body


def _plain(addr: tuple[Any, ...]) -> Address:
    """Returns host and port of a datagram's source; IPv4 in its plain form."""
    host, port = addr[:2]
    return host.removeprefix("::ffff:") if "." in host else host, port


def _checked(ip: str, port: int) -> Address | None:
    """Returns an address that a datagram can be sent to, or None."""
    try:
        parsed = ipaddress.ip_address(ip)
    except ValueError:
        return None
    if parsed.is_multicast or parsed.is_unspecified or isinstance(port, bool):
        return None
    return (ip, port) if 1 <= port <= 65535 else None
