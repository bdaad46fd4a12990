"""Dialling members that nobody can dial: by the calls that they hold open.

To the client of this node, such a member has an address like all others: that of a local socket
which only this process may use. This node joins each connection there to one of the member. It uses
the call that the member holds open to this node, or else a host in between. TLS begins at the
client and ends at the member, whose certificate proves who it is.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc.aio

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.membership.certificates import peer_name
from decod.membership.papers import Membership
from decod.memory_files import new_local_socket, remove_local_socket, remove_orphans
from decod.net import channel
from decod.net.address import LOCAL
from decod.net.net_limits import LIMITS, Limits
from decod.net.reverse_keeper import (
    PIECE_MAX_BYTES,
    CallPipe,
    Pipe,
    ReverseKeeper,
    SocketPipe,
    splice,
)
from decod.tasks import TaskSet
from decod.wire import codec
from decod.wire.v1 import reverse_pb2

_BACKLOG = 16

_TRUST_BYTES = 100
"""The bytes that a client sends once it knows the other end: its certificate, and the head of
HTTP/2. If the handshake fails, it sends an alert, which is shorter."""

HostsBetween = Callable[[NodeId], Sequence[tuple[NodeId, str]]]
"""Returns the hosts that may pass on connections to a member, and their addresses, best first."""


class ReverseDialer:
    """The members that nobody can dial, as this node connects to them.

    Args:
        membership: This node's.
        run_id: The run.
        hosts_between: Which hosts to ask for a connection, if the member holds no call open here.
        limits: Timeouts.
    """

    def __init__(
        self,
        membership: Membership,
        run_id: RunId,
        hosts_between: HostsBetween,
        limits: Limits = LIMITS,
    ) -> None:
        self._membership = membership
        self._metadata = channel.run_metadata(run_id)
        self._hosts_between = hosts_between
        self._limits = limits
        self._sockets: dict[NodeId, tuple[str, asyncio.Task[None]]] = {}
        """The address of each member, and what listens there."""
        self._channels: dict[tuple[NodeId, str], grpc.aio.Channel] = {}
        """Channels to hosts in between."""
        self._tasks = TaskSet()
        self._vain_s: dict[tuple[NodeId, NodeId], float] = {}
        """The instant when a host last led to no handshake with a member, on the loop's clock."""
        self._roundabout: Counter[NodeId] = Counter()
        """The number of open connections to each member pass through another host."""
        self._keeper: ReverseKeeper | None = None

    def start(self, keeper: ReverseKeeper) -> None:
        """Begin: others can dial this node, so it may need no other host.

        Args:
            keeper: Keeps the calls that members hold open to this node.
        """
        self._keeper = keeper

    def address_of(self, node: NodeId) -> str:
        """Return the address at which the client of this node dials a member."""
        if node not in self._sockets:
            if not self._sockets:
                remove_orphans()  # Of nodes that were killed.
            opened, path = new_local_socket()
            opened.settimeout(0.0)
            opened.listen(_BACKLOG)
            listening = self._tasks.start(self._listen(node, opened))
            listening.add_done_callback(lambda _: remove_local_socket(opened, path))
            self._sockets[node] = (f"{LOCAL}{path}", listening)
        return self._sockets[node][0]

    def goes_round(self, node: NodeId) -> bool:
        """Return whether an open connection to a member passes through another host."""
        return self._roundabout[node] > 0

    def forget(self, node: NodeId) -> None:
        """Take no more connections for a member."""
        self._vain_s = {way: at_s for way, at_s in self._vain_s.items() if node not in way}
        _, listening = self._sockets.pop(node, ("", None))
        if listening is not None:
            listening.cancel()

    def renew(self) -> None:
        """Dial hosts in between anew, since this node shows other papers from now on."""
        old = self._channels
        self._channels = {}
        for opened in old.values():
            self._tasks.start(opened.close(60.0))

    async def close(self) -> None:
        """End all connections."""
        await self._tasks.close()
        self._sockets.clear()
        for opened in self._channels.values():
            await opened.close(None)
        self._channels.clear()

    async def _listen(self, node: NodeId, opened: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted, _ = await loop.sock_accept(opened)
            self._tasks.start(self._connect(node, accepted))

    async def _connect(self, node: NodeId, accepted: socket.socket) -> None:
        """Join a connection of the client to one of the member, for as long as both last."""
        streams = await asyncio.open_unix_connection(sock=accepted, limit=PIECE_MAX_BYTES)
        async with AsyncExitStack() as stack:
            near = SocketPipe(*streams)
            # Without a way, the client is told at once that nobody can be reached.
            stack.push_async_callback(near.close)
            host = None
            far = await self._direct(node)
            if far is None:
                host, far = await self._by_way_of_another(node)
                if far is None:
                    return
                self._roundabout[node] += 1
                stack.callback(self._roundabout.subtract, (node,))
            stack.push_async_callback(far.close)
            with suppress(MalformedMessageError):
                # The client finds its connection broken, and dials again.
                if host is None:
                    await splice(near, far)
                else:
                    await self._go_round(near, far, (node, host))

    async def _go_round(self, near: Pipe, far: Pipe, way: tuple[NodeId, NodeId]) -> None:
        """Join a connection to one by way of another host, if the ends find each other there."""
        loop = asyncio.get_running_loop()
        self._vain_s[way] = loop.time()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.reverse_handshake_timeout_s) as deadline:

                def trust() -> None:
                    deadline.reschedule(None)
                    self._vain_s.pop(way, None)

                await splice(_Handshake(near, trust), far)

    async def _direct(self, node: NodeId) -> Pipe | None:
        keeper = self._keeper
        if keeper is None or not await keeper.wait_held(node, self._limits.hold_wait_s):
            return None
        return await keeper.open(node)

    async def _by_way_of_another(self, node: NodeId) -> tuple[NodeId | None, Pipe | None]:
        """Return a host that says that it passes a connection on, and the connection.

        Those that have last done so in vain are asked last.
        """
        hosts = self._hosts_between(node)
        for host, address in sorted(hosts, key=lambda each: self._vain_s.get((node, each[0]), 0.0)):
            if (pipe := await self._asked(host, address, node)) is not None:
                return host, pipe
        return None, None

    async def _asked(self, host: NodeId, address: str, goal: NodeId) -> Pipe | None:
        """Ask a host for a connection to a member."""
        path = f"/{channel.REVERSE_SERVICE}/Connect"
        connect = self._channel(host, address).stream_stream(path, channel.as_is, channel.as_is)
        call = connect(None, metadata=self._metadata)
        connected = False
        try:
            async with asyncio.timeout(self._limits.reverse_open_timeout_s):
                await call.write(reverse_pb2.ConnectRequest(goal=goal).SerializeToString())
                message: Any = await call.read()
            if isinstance(message, bytes):
                connected = codec.parse(reverse_pb2.ConnectResponse, message).connected
        except (grpc.aio.BaseError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # The next host is asked.
        except (TimeoutError, MalformedMessageError):
            pass
        finally:
            if not connected:
                call.cancel()
        return CallPipe(call) if connected else None

    def _channel(self, host: NodeId, address: str) -> grpc.aio.Channel:
        key = (host, address)
        if key not in self._channels:
            shown = self._membership.tls
            self._channels[key] = channel.open_channel(
                address, self._limits, shown, peer_name(host)
            )
        return self._channels[key]


class _Handshake:
    """A pipe to the client of this node that tells when the client trusts the other end.

    Args:
        pipe: The pipe.
        trust: Called then, once.
    """

    def __init__(self, pipe: Pipe, trust: Callable[[], None]) -> None:
        self._pipe = pipe
        self._trust = trust
        self._answered = False
        self._num_sent_bytes = 0

    async def read(self) -> memoryview | bytes:
        data = await self._pipe.read()
        if self._answered and self._num_sent_bytes <= _TRUST_BYTES:
            self._num_sent_bytes += len(data)
            if self._num_sent_bytes > _TRUST_BYTES:
                self._trust()
        return data

    async def write(self, data: memoryview | bytes) -> None:
        self._answered = True
        await self._pipe.write(data)

    async def close(self) -> None:
        await self._pipe.close()
