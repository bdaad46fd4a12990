"""Datagrams of the DHT, and the contacts that follow from them.

The `kademlia` package supplies the routing table, the metric and the form of a datagram: one byte
(0 for a request, 1 for a reply), 20 bytes that pair the two, and msgpack. The package's own
protocol class trusts its input, so one reply could crash the caller or close the socket. This
module checks every field before use. It counts and drops datagrams that are wrong.

Further rules:
- A node enters the table only after it has answered. A node that asks is pinged first.
- A contact that has moved is kept at its new address once it answers there.
- A reply is never longer than its request, and requests are padded to make room for it. So nobody
  can use this node to flood a third one.
- A reply that nobody asked for and a request of another run are dropped before they are decoded.
- Calls end within a second, with one repeat on the way. A cancelled call leaves nothing behind.
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
# The request is repeated after the first wait, and given up after the second.
_WAITS_S = (0.4, 0.6)
_MEETINGS_MAX = 32
# Limits for the datagrams of one address and port.
_RATE_PER_S, _BURST = 50.0, 100.0

# All errors that the decoder raises on hostile bytes.
_UNPACK_ERRORS = (
    umsgpack.UnpackException,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    OSError,
)


def _opening(name: str, num_fields: int) -> bytes:
    """Return the bytes with which the body of a request begins, up to the sender's id."""
    call = umsgpack.packb([name, [bytes(ID_SIZE_BYTES), *([0] * (num_fields - 1))]])
    return bytes(call[: call.index(bytes(ID_SIZE_BYTES))])


_OPENINGS = tuple(
    _opening(name, num_fields)
    for name, num_fields in (("ping", 2), ("store", 3), ("find_node", 4), ("find_value", 4))
)


def _tag_field_of(request: bytes) -> bytes | None:
    """Return the bytes in which a request names its run, without decoding the request.

    None if it does not begin like a request.
    """
    for opening in _OPENINGS:
        if request.startswith(opening, _HEAD_SIZE_BYTES):
            begin = _HEAD_SIZE_BYTES + len(opening) + ID_SIZE_BYTES
            return request[begin : begin + _TAG_FIELD_SIZE_BYTES]
    return None


class DhtProtocol(asyncio.DatagramProtocol):
    """One UDP socket of the DHT.

    Args:
        kademlia_id: This node's place in the DHT, 20 bytes.
        run_tag: Names the run, 8 bytes. Requests with another tag are dropped, so that runs do not
            mix.
        store: The records that this node holds.
        counters: Counts faults by IP address.
        on_lost: Called if the socket closes before `close` is called.
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
        """Ignore the error of a peer's closed port: the call to it times out."""

    async def close(self) -> None:
        """Close the socket, end open calls, and wait for the tasks of this object."""
        self._closed = True
        if self._transport is not None:
            # Not `close`, which would wait for datagrams that the system has not taken yet.
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
        # Drop unasked replies and other runs' requests before they are decoded.
        if whole and data[:1] == _REPLY:
            asked, _ = self._outstanding.get(message_id, (None, None))
            if asked == source:
                self._settle(message_id, _decoded(data))
            else:
                # A late reply, or a forged one: only the node that was asked knows the id.
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
                # Stored below, once the sender is known to be another node.
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
        """Ping an unknown node at the source of its request; if it answers, make it a contact."""
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
        """Return the contact with this id, if it is in the table."""
        bucket = self.table.buckets[self.table.get_bucket_for(Node(node_id))]
        return bucket.nodes.get(node_id)

    def contacts(self) -> list[Node]:
        """Return all contacts."""
        return [node for bucket in self.table.buckets for node in bucket.get_nodes()]

    def add(self, node: Node) -> None:
        """Put a node that has answered into the table, or update the address of its contact."""
        if node.id == self.source.id:
            return
        known = self.contact(node.id)
        if known is None:
            self.table.add_contact(node)
        elif not known.same_home_as(node):
            known.ip, known.port = node.ip, node.port

    # --- asking -----------------------------------------------------------------------------

    async def ping(self, address: Address) -> bytes | None:
        """Return the id of the node at `address`, or None if there is no valid answer."""
        reply = await self._request(address, "ping")
        if isinstance(reply, bytes) and len(reply) == ID_SIZE_BYTES:
            return reply
        self._judge(reply, address)
        return None

    async def call_ping(self, node: Node) -> None:
        """Ping a contact and drop it if it no longer answers. The routing table calls this."""
        if await self.ping((node.ip, node.port)) != node.id:
            self.table.remove_contact(node)

    async def find(self, node: Node, key: bytes, *, value: bool) -> "list[Node] | bytes | None":
        """Ask `node` for contacts near `key`, or for the record at `key`.

        Args:
            node: The node to ask.
            key: A place in the DHT, 20 bytes.
            value: Ask for the record. A node without it answers with contacts.

        Returns:
            Contacts near `key`, or the bytes of a record, unchecked. None if there was no valid
            answer: then `node` has been dropped from the contacts.
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
        """Give `node` a record; return whether it holds this record or a newer one."""
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
        """Send a request and its repeat; return the decoded reply, or None if none came in time."""
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
            # None means "no reply", so a reply that decodes to None becomes an invalid one.
            future.set_result(() if body is None else body)

    def _judge(self, reply: object, address: Address) -> None:
        if reply is not None:
            self._counters.add("dht.malformed", address[0])

    def _parse_nodes(self, reply: list[Any]) -> list[Node] | None:
        """Return the contacts in a peer's reply that can be dialled; None if one is malformed."""
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
    """Return the body of a datagram, or `()`, which is no valid message, if it can't be read."""
    try:
        body: object = umsgpack.unpackb(datagram[_HEAD_SIZE_BYTES:])
    except _UNPACK_ERRORS:
        # Not an exception: an unreadable reply must end its caller's wait too.
        return ()
    return body


def _plain(addr: tuple[Any, ...]) -> Address:
    """Return host and port of a datagram's source, with an IPv4-mapped address as IPv4."""
    host, port = addr[:2]
    return host.removeprefix("::ffff:") if "." in host else host, port


def _checked(ip: str, port: int) -> Address | None:
    """Return the address if a datagram can be sent to it, else None."""
    try:
        parsed = ipaddress.ip_address(ip)
    except ValueError:
        return None
    if parsed.is_multicast or parsed.is_unspecified or isinstance(port, bool):
        return None
    return (ip, port) if 1 <= port <= 65535 else None
