"""The calling side: a channel for messages and a connection for tensors to every peer, with queues.

Theory of operation. `send` and `send_tensor` append to the peer's queue and return. Each peer has
one task for messages and up to two for tensors. A task runs until its queue is empty, so a silent
peer costs nothing but an empty queue. All messages that wait when the task runs travel in one call,
up to the size of a batch. Every accepted tensor ends in exactly one callback, and so does every
message that fails, unless the client is closed first.

Order: control messages to one peer arrive in the order of `send`. Tensors to one peer start in the
order of `send_tensor`, two at a time. There is no order between messages and tensors.

Failed attempts are repeated: see `decod.net.transmission`.
"""

import asyncio
import os
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import grpc
import grpc.aio

from decod.clocks import Stopwatch, wall_clock
from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId, TensorId
from decod.membership.certificates import peer_name
from decod.membership.papers import Membership
from decod.membership.statements import WayProofs
from decod.net import channel
from decod.net.net_limits import LIMITS, Limits
from decod.net.rate_caps import Pace
from decod.net.transmission import (
    LEFT,
    OutgoingMessage,
    OutgoingTensor,
    PeerLink,
    Transmission,
    TransmissionError,
)
from decod.planner.cost import transfer_rate
from decod.protocol.core.events import SendFailed, TensorSent
from decod.protocol.core.messages import LinkProbe, Message, WithTensor
from decod.protocol.core.messages.scopes import Way
from decod.wire import codec
from decod.wire.v1 import control_pb2

_OLD_CHANNEL_S = 60.0
"""The time that calls on a channel may last after another has taken its place."""

_NUM_PROBE_TRIPS = 3
"""Empty round trips before a probe's bytes. The first does not count: it may open the channel."""


class ClientHandler(Protocol):
    """The client's reports to the driver, made from the event loop and never from within `send`."""

    pace: Pace
    """Caps the rate at which tensors leave."""

    def on_tensor_sent(self, sent: TensorSent, message: Message) -> None:
        """The receiver has the whole tensor, which came with `message`.

        Its duration is without waiting in the queue, and without earlier attempts.
        """

    def on_send_failed(self, failed: SendFailed) -> None:
        """A message or tensor did not reach its receiver."""

    def on_latency(self, to: NodeId, seconds: float) -> None:
        """One small control call took `seconds`, there and back, while no tensor was on its way."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a probe of the link to a peer."""

    latency_s: float
    """Half of a round trip over the connection for tensors."""
    bandwidth_bytes_per_s: float


@dataclass(slots=True)
class _Peer:
    """One peer: its link, and what waits for it."""

    link: PeerLink
    sequence: "count[int]" = field(default_factory=lambda: count(1))
    messages: deque[OutgoingMessage] = field(default_factory=deque)
    tensors: deque[OutgoingTensor] = field(default_factory=deque)
    num_control_tasks: int = 0
    num_bulk_tasks: int = 0


class PeerClient:
    """The sender of control messages and tensors to all peers.

    Args:
        membership: This node's: what it shows to others, and whom it believes.
        run_id: Named in every message.
        handler: Is told how each send ended.
        limits: Sizes, timeouts, and lengths of queues.
        watch: Measures the time spent on serializing and copying.
    """

    def __init__(
        self,
        membership: Membership,
        run_id: RunId,
        handler: ClientHandler,
        *,
        limits: Limits = LIMITS,
        watch: Stopwatch | None = None,
    ) -> None:
        self._membership = membership
        self._node_id = membership.node_id
        self._run_id = run_id
        self._proofs = WayProofs(membership, run_id, wall_clock)
        self._handler = handler
        self._limits = limits
        self._watch = watch = watch or Stopwatch()
        self._transmission = Transmission(run_id, limits, watch, self._timed, handler.pace)
        self._peers: dict[NodeId, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def set_address(self, node: NodeId, address: str) -> None:
        """Set the address at which `node` is dialled.

        If it replaces another address, waiting messages and tensors go to the new one, in the same
        order. Those already on their way to the old address may arrive or fail.
        """
        old = self._peers.get(node)
        if old is not None and old.link.address == address:
            return
        link = PeerLink(node, address, self._open(node, address), self._membership.tls)
        self._peers[node] = peer = _Peer(link)
        if old is not None:
            peer.sequence = old.sequence
            peer.messages.extend(old.messages)
            peer.tensors.extend(old.tensors)
            self._retire(old)
            self._run_tasks(peer)

    def redial(self, only: NodeId | None = None) -> None:
        """Use new channels to all peers, since this node shows other papers from now on.

        Calls that are on their way end on the old ones.

        Args:
            only: The one peer to which there is another way from now on. None: all of them.
        """
        for node, peer in self._peers.items():
            if only not in (None, node):
                continue
            link = peer.link
            self._own(link.control.close(_OLD_CHANNEL_S))
            link.control, link.shown = self._open(node, link.address), self._membership.tls
            link.called = False
            if link.sender is not None:
                self._own(link.sender.retire(_OLD_CHANNEL_S))
                link.sender = None

    def _open(self, node: NodeId, address: str) -> grpc.aio.Channel:
        """Return a new channel to a node for control messages."""
        return channel.open_channel(address, self._limits, self._membership.tls, peer_name(node))

    def address_of(self, node: NodeId) -> str | None:
        """Return the address at which `node` is dialled, or None if it has none."""
        peer = self._peers.get(node)
        return peer.link.address if peer else None

    def forget(self, node: NodeId) -> None:
        """Close the channels to `node`. Messages and tensors that wait or are on their way fail."""
        peer = self._peers.pop(node, None)
        if peer is not None:
            waiting: list[OutgoingMessage | OutgoingTensor] = [*peer.messages, *peer.tensors]
            for item in waiting:
                self._fail_soon(node, item, LEFT)
            self._retire(peer)

    def send(self, to: NodeId, term: int, message: Message, way: Way | None = None) -> None:
        """Queue a control message and return at once. For the arguments see `send_tensor`."""
        peer = self._peers.get(to)
        envelope = self._encode(peer, term, message, way)
        item = OutgoingMessage(message, way, envelope)
        if peer is None:
            self._fail_soon(to, item, "its address is unknown")
        elif len(peer.messages) >= self._limits.queue_length_max:
            self._fail_soon(to, item, "too many messages wait for it")
        elif envelope.ByteSize() > self._limits.batch_size_max_bytes:
            self._fail_soon(to, item, f"the message has {envelope.ByteSize()} bytes")
        else:
            peer.messages.append(item)
            self._run_tasks(peer)

    def send_tensor(
        self,
        to: NodeId,
        term: int,
        message: Message,
        data: memoryview,
        tensor: TensorId,
        way: Way | None = None,
    ) -> None:
        """Queue a tensor with its bulk message and return at once.

        Args:
            to: The receiver.
            term: The term of this node's view.
            message: Says what the tensor is.
            data: The bytes, contiguous. They are read, not copied: they must not change until a
                callback has been called with `tensor`.
            tensor: Its name, for the callback.
            way: Origin and goal of a tensor that goes by way of a third member; else None.
        """
        assert isinstance(message, WithTensor), message
        peer = self._peers.get(to)
        envelope = self._encode(peer, term, message, way)
        item = OutgoingTensor(message, way, envelope, data.cast("B"), tensor)
        if peer is None:
            self._fail_soon(to, item, "its address is unknown")
        elif len(peer.tensors) >= self._limits.queue_length_max:
            self._fail_soon(to, item, "too many tensors wait for it")
        else:
            peer.tensors.append(item)
            self._run_tasks(peer)

    async def probe(self, to: NodeId, term: int, size_bytes: int) -> Probed | None:
        """Time empty round trips and a transfer over the connection for tensors.

        None: that failed.

        The bytes are random, so that nothing on the way can compress them. They share the link
        with tensors, and the result is corrected for that.
        """
        peer = self._peers.get(to)
        if peer is None:
            return None
        envelope = self._encode(peer, term, LinkProbe())

        async def push(data: bytes) -> tuple[float, float]:
            item = OutgoingTensor(LinkProbe(), None, envelope, memoryview(data), None)
            return await self._transmission.push(peer.link, item)

        try:
            trips = [await push(b"") for _ in range(_NUM_PROBE_TRIPS)]
            latency_s = min(seconds for seconds, _ in trips[1:]) / 2
            seconds, share = await push(os.urandom(size_bytes))
        except (TransmissionError, MalformedMessageError):
            return None
        rate = transfer_rate(size_bytes, duration_s=seconds, latency_s=latency_s, share=share)
        return Probed(latency_s, rate)

    def _encode(
        self, peer: _Peer | None, term: int, message: Message, way: Way | None = None
    ) -> control_pb2.Envelope:
        sequence = next(peer.sequence) if peer else 0
        if way is not None and way.origin == self._node_id:
            way = self._proofs.proven(message, way)
        with self._watch.measure("serialize"):
            return codec.encode(self._run_id, self._node_id, term, sequence, message, way)

    async def flush(self, *, timeout_s: float) -> None:
        """Wait until everything queued has arrived or failed, for at most `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel all sends and close all channels. No callback is called for what is dropped."""
        self._closed = True
        peers = list(self._peers.values())
        self._peers = {}
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in peers:
            await peer.link.close()

    def _run_tasks(self, peer: _Peer) -> None:
        if peer.messages and peer.num_control_tasks == 0:
            peer.num_control_tasks += 1
            self._own(self._send_messages(peer))
        while peer.num_bulk_tasks < min(self._limits.streams_per_peer, len(peer.tensors)):
            peer.num_bulk_tasks += 1
            self._own(self._send_tensors(peer))

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task whose exception, a bug, reaches the loop's handler."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                context = {"message": "bug in sending to a peer", "exception": error, "task": task}
                task.get_loop().call_exception_handler(context)

        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(done)

    def _retire(self, peer: _Peer) -> None:
        peer.messages.clear()
        peer.tensors.clear()
        self._own(peer.link.close())

    def _fail_soon(self, to: NodeId, item: OutgoingMessage | OutgoingTensor, reason: str) -> None:
        asyncio.get_running_loop().call_soon(self._fail, to, item, TransmissionError(reason))

    def _fail(
        self, to: NodeId, item: OutgoingMessage | OutgoingTensor, error: TransmissionError
    ) -> None:
        if not self._closed:
            failed = SendFailed(
                to,
                item.message,
                str(error),
                tensor=item.tensor if isinstance(item, OutgoingTensor) else None,
                way=item.way,
                fault=error.fault,
                gone=error.gone,
            )
            self._handler.on_send_failed(failed)

    def _timed(self, node: NodeId, seconds: float) -> None:
        if not self._closed:
            self._handler.on_latency(node, seconds)

    async def _send_messages(self, peer: _Peer) -> None:
        try:
            while peer.messages:
                batch = self._take_batch(peer)
                try:
                    await self._transmission.deliver(peer.link, batch)
                except TransmissionError as error:
                    # Fail the messages behind it too: they would wait as long, and the core may
                    # have another way.
                    batch += peer.messages
                    peer.messages.clear()
                    for item in batch:
                        self._fail(peer.link.node_id, item, error)
        finally:
            peer.num_control_tasks -= 1

    def _take_batch(self, peer: _Peer) -> list[OutgoingMessage]:
        batch: list[OutgoingMessage] = []
        room_bytes = self._limits.batch_size_max_bytes
        while peer.messages and len(batch) < self._limits.batch_length_max:
            # Every envelope is preceded by a tag of one byte and a length of at most 5.
            room_bytes -= peer.messages[0].envelope.ByteSize() + 6
            if batch and room_bytes < 0:
                break
            batch.append(peer.messages.popleft())
        return batch

    async def _send_tensors(self, peer: _Peer) -> None:
        try:
            while peer.tensors:
                item = peer.tensors.popleft()
                try:
                    seconds, share = await self._transmission.push(peer.link, item)
                except TransmissionError as error:
                    self._fail(peer.link.node_id, item, error)
                    continue
                if not self._closed:
                    assert item.tensor is not None, "only a probe has no name"
                    sent = TensorSent(
                        peer.link.node_id, item.tensor, len(item.data), seconds, share
                    )
                    self._handler.on_tensor_sent(sent, item.message)
        finally:
            peer.num_bulk_tasks -= 1
