"""The calls that a member which nobody can dial keeps open, and what they bring.

It holds a call open to each peer with which it deals, and to the hosts in between. A peer that
wants a connection says so on this call. The member then makes another call, and joins it to a
connection to its own server, on this host. What comes that way is a TLS connection like any other:
the server sees the peer's certificate, and checks all that it checks elsewhere.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import grpc.aio

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.membership.certificates import peer_name
from decod.membership.papers import Membership
from decod.net import channel
from decod.net.address import Address
from decod.net.net_limits import LIMITS, Limits
from decod.net.reverse_keeper import PIECE_MAX_BYTES, CallPipe, SocketPipe, splice
from decod.tasks import TaskSet, cancelled
from decod.wire import codec
from decod.wire.v1 import reverse_pb2

_log = logging.getLogger(__name__)

_OLD_CHANNEL_S = 60.0
"""The time that connections over a call may last after it was made anew."""


@dataclass(slots=True)
class _Peer:
    """A peer to which this node holds a call open, or tries to."""

    task: "asyncio.Task[None] | None" = None
    held: asyncio.Event = field(default_factory=asyncio.Event)
    renewed: asyncio.Event = field(default_factory=asyncio.Event)
    num_carried: int = 0


class ReverseHolder:
    """The calls that this node holds open.

    Args:
        membership: This node's.
        run_id: The run.
        address_of: Returns the address at which a peer is dialled; None if it is not known, or if
            nobody can dial the peer.
        limits: Numbers of calls, and timeouts.
    """

    def __init__(
        self,
        membership: Membership,
        run_id: RunId,
        address_of: Callable[[NodeId], str | None],
        limits: Limits = LIMITS,
    ) -> None:
        self._membership = membership
        self._metadata = channel.run_metadata(run_id)
        self._address_of = address_of
        self._limits = limits
        self._peers: OrderedDict[NodeId, _Peer] = OrderedDict()
        """The one that was dealt with last stands at the end."""
        self._carrying = TaskSet()
        self._server: Address | None = None

    @property
    def active(self) -> bool:
        """Return whether nobody can dial this node."""
        return self._server is not None

    @property
    def num_held(self) -> int:
        """The number of peers that know the call that is held open to them."""
        return sum(peer.held.is_set() for peer in self._peers.values())

    def start(self, server: Address) -> None:
        """Begin: nobody can dial this node.

        Args:
            server: Where its own server listens.
        """
        self._server = server

    def meet(self, node: NodeId) -> None:
        """Hold a call open to a peer from now on, if nobody can dial this node."""
        if self._server is None:
            return
        peer = self._peers.get(node)
        if peer is not None:
            self._peers.move_to_end(node)
            return
        if self._address_of(node) is None:
            return
        peer = self._peers[node] = _Peer()
        peer.task = asyncio.create_task(self._keep(node, peer))
        if len(self._peers) > self._limits.holds_kept_max:
            _, oldest = self._peers.popitem(last=False)
            assert oldest.task is not None
            oldest.task.cancel()

    async def held(self, node: NodeId, timeout_s: float) -> bool:
        """Hold a call open to a peer; return whether the peer knows of it in time."""
        self.meet(node)
        peer = self._peers.get(node)
        if peer is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await peer.held.wait()
        return peer is not None and peer.held.is_set()

    def renew(self) -> None:
        """Make all calls anew, since this node shows other papers from now on."""
        for peer in self._peers.values():
            peer.renewed.set()

    async def close(self) -> None:
        """End all calls, and the connections over them."""
        self._server = None
        peers = self._peers
        self._peers = OrderedDict()
        await cancelled(*(peer.task for peer in peers.values() if peer.task is not None))
        await self._carrying.close()

    async def _keep(self, node: NodeId, peer: _Peer) -> None:
        limits = self._limits
        loop = asyncio.get_running_loop()
        pause_s = limits.hold_pause_s
        try:
            while (address := self._address_of(node)) is not None:
                shown = self._membership.tls
                name = peer_name(node)
                opened = channel.open_channel(address, limits, shown, name)
                peer.renewed.clear()
                start_s = loop.time()
                try:
                    while not peer.renewed.is_set():
                        start_s = loop.time()
                        await self._hold(opened, node, peer)
                        if loop.time() - start_s < limits.hold_pause_s:
                            break  # The peer must not make this node call again and again.
                except (grpc.aio.AioRpcError, MalformedMessageError) as error:
                    _log.info("reverse.lost the call to %s has ended: %s", node, _reason(error))
                except asyncio.CancelledError:
                    await opened.close(None)
                    raise
                # In a task of its own: connections over it go on for a while.
                self._carrying.start(
                    opened.close(_OLD_CHANNEL_S if peer.renewed.is_set() else None)
                )
                lasted = loop.time() - start_s >= limits.hold_pause_s
                pause_s = limits.hold_pause_s if lasted else 2 * pause_s
                if not peer.renewed.is_set():
                    await asyncio.sleep(min(pause_s, limits.hold_pause_max_s))
        finally:
            if self._peers.get(node) is peer:
                del self._peers[node]

    async def _hold(self, opened: grpc.aio.Channel, node: NodeId, peer: _Peer) -> None:
        """Hold a call open until the peer ends it, or other papers are to be shown.

        The peer ends each after a while, to look at this node's papers again.
        """
        path = f"/{channel.REVERSE_SERVICE}/Hold"
        hold = opened.unary_stream(path, channel.as_is, channel.as_is)
        call = hold(reverse_pb2.HoldRequest().SerializeToString(), metadata=self._metadata)

        async def listen() -> None:
            while isinstance(message := await call.read(), bytes):
                response = codec.parse(reverse_pb2.HoldResponse, message)
                if not response.connection_id:
                    peer.held.set()
                elif peer.num_carried < self._limits.reverse_calls_per_node_max:
                    carrying = self._carry(opened, node, peer, response.connection_id)
                    self._carrying.start(carrying)

        listening = asyncio.create_task(listen())
        renewing = asyncio.create_task(peer.renewed.wait())
        try:
            await asyncio.wait((listening, renewing), return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                listening.result()
        finally:
            peer.held.clear()
            call.cancel()
            await cancelled(listening, renewing)

    async def _carry(
        self, opened: grpc.aio.Channel, node: NodeId, peer: _Peer, connection_id: bytes
    ) -> None:
        """Join a call to a connection to this node's server."""
        assert self._server is not None
        host, port = self._server
        source = (source_of(node), 0) if host == "127.0.0.1" else None
        path = f"/{channel.REVERSE_SERVICE}/Carry"
        carry = opened.stream_stream(path, channel.as_is, channel.as_is)
        head = reverse_pb2.CarryRequest(connection_id=connection_id)
        peer.num_carried += 1
        try:
            async with AsyncExitStack() as stack:
                near = SocketPipe(
                    *await asyncio.open_connection(
                        host, port, local_addr=source, limit=PIECE_MAX_BYTES
                    )
                )
                stack.push_async_callback(near.close)
                call = carry(None, metadata=self._metadata)
                far = CallPipe(call)
                stack.push_async_callback(far.close)
                await call.write(head.SerializeToString())
                await splice(near, far)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # The peer is gone, or has given up.
        except OSError as error:
            _log.warning("reverse.failed can't connect to this node's server: %s", error)
        except MalformedMessageError as error:
            _log.warning("reverse.failed a connection of %s: %s", node, error)
        finally:
            peer.num_carried -= 1


def source_of(node: NodeId) -> str:
    """Return the loopback address from which a peer's connections come to this node's server.

    Each has its own, as elsewhere. The server's limits on a host's calls and faults then concern
    that peer alone.
    """
    first, second, third = hashlib.sha256(node.encode()).digest()[:3]
    return f"127.{1 + first % 254}.{second}.{1 + third % 254}"


def _reason(error: Exception) -> str:
    return error.details() or "" if isinstance(error, grpc.aio.AioRpcError) else str(error)
