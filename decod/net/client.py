"""The calling side: a control channel and a bulk channel to every peer, each with its queue.

Theory of operation. `send` and `send_tensor` append to the peer's queue and return. Each peer has
one task for messages and up to two for tensors. A task runs until its queue is empty, so a silent
peer costs nothing but an empty queue. All messages that wait when the task runs travel in one call,
up to the size of a batch. Every accepted tensor ends in exactly one callback, and so does every
message that fails, unless the client is closed first.

Order: control messages to one peer arrive in the order of `send`. Tensors to one peer start in the
order of `send_tensor`, two at a time. There is no order between messages and tensors.

A failed attempt is repeated while the peer is unavailable. Repeats are harmless: messages name the
iteration, view or request that they belong to.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from decod.clocks import Stopwatch, wall_clock
from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId, TensorId
from decod.membership.certificates import peer_name
from decod.membership.papers import Membership
from decod.membership.statements import WayProofs
from decod.net import channel
from decod.net.channel import is_gone, reason_of
from decod.net.net_limits import LIMITS, Limits
from decod.net.rate_caps import Lane, LinkShare, Pace, lane_of
from decod.net.stream import crc32_of, data_frame, frames_of
from decod.planner.cost import transfer_rate
from decod.protocol.core.events import Fault, SendFailed, TensorSent
from decod.protocol.core.messages import LinkProbe, Message, WithTensor
from decod.protocol.core.messages.scopes import Way
from decod.wire import codec
from decod.wire.v1 import control_pb2, tensor_pb2

_log = logging.getLogger(__name__)

# --- one transmission ----------------------------------------------------------------------------
# One batch of messages, or one tensor, on its way to one peer.


T = TypeVar("T")

_TIMED_SIZE_MAX_BYTES = 4096
"""A larger batch is not timed: its transfer would add to the link's latency."""

LEFT = "the peer has left"

_CONTROL_FAULTS = {
    grpc.StatusCode.UNAVAILABLE: Fault.LINK,
    grpc.StatusCode.DEADLINE_EXCEEDED: Fault.LINK,
}
_PUSH_FAULTS = {
    grpc.StatusCode.UNAVAILABLE: Fault.LINK,
    grpc.StatusCode.DEADLINE_EXCEEDED: Fault.RATE,
    # The receiver's timeout passed before this node's.
    grpc.StatusCode.ABORTED: Fault.RATE,
}

_DELIVER = f"/{channel.CONTROL_SERVICE}/Deliver"
_PUSH = f"/{channel.TENSOR_SERVICE}/Push"
_PUSH_FAILURES = {
    tensor_pb2.PUSH_STATE_REFUSED: "the receiver refused the tensor",
    tensor_pb2.PUSH_STATE_MALFORMED: "the receiver can't read the tensor",
    tensor_pb2.PUSH_STATE_CORRUPTED: "the tensor was altered on its way",
}


class TransmissionError(Exception):
    """Sending has failed for good. The text is the reason that the core gets."""

    def __init__(self, reason: str, fault: Fault = Fault.NONE, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.fault = fault
        self.gone = gone


class _CutOffError(Exception):
    """The receiver ended a stream while data was being written. The reason is not known yet."""


@dataclass(slots=True)
class OutgoingMessage:
    """A control message."""

    message: Message
    way: Way | None
    envelope: control_pb2.Envelope


@dataclass(slots=True)
class OutgoingTensor:
    """A tensor with its bulk message."""

    message: Message
    way: Way | None
    envelope: control_pb2.Envelope
    data: memoryview
    tensor: TensorId | None
    """Its name, for the sender. None for a probe."""
    crc32: int | None = None
    begun: bool = False
    """Data was sent already, so the receiver may have some of it, or does not want it."""

    @property
    def lane(self) -> Lane:
        """The lane in which it waits if uploads are capped."""
        return lane_of(self.message)


@dataclass(slots=True)
class PeerLink:
    """The channels to one peer at one address."""

    node_id: NodeId
    address: str
    control: grpc.aio.Channel
    bulk: grpc.aio.Channel
    share: LinkShare = field(default_factory=LinkShare)
    called: bool = False
    """A control call has succeeded, so the connection is open."""

    async def close(self) -> None:
        """Close both channels. Calls that are on their way fail."""
        await self.control.close(None)
        await self.bulk.close(None)


class Transmission:
    """The calls that carry messages and tensors, with their retries.

    Args:
        run_id: Named in every call.
        limits: Sizes, timeouts, and delays between attempts.
        watch: Measures the time spent on serializing and copying.
        on_latency: Is told how long a small control call took, there and back, while no tensor was
            on its way.
        pace: Caps the rate at which tensors leave.
    """

    def __init__(
        self,
        run_id: RunId,
        limits: Limits,
        watch: Stopwatch,
        on_latency: Callable[[NodeId, float], None],
        pace: Pace,
    ) -> None:
        self._metadata = channel.run_metadata(run_id)
        self._probe_metadata = channel.probe_metadata(run_id)
        self._limits = limits
        self._watch = watch
        self._on_latency = on_latency
        self._pace = pace

    async def deliver(self, link: PeerLink, batch: list[OutgoingMessage]) -> None:
        """Send control messages in one call.

        Raises:
            TransmissionError: They did not arrive.
        """
        deliver = partial(self._deliver, link, batch)
        await self._with_retries(deliver, self._limits.control_timeout_s, _CONTROL_FAULTS)

    async def push(self, link: PeerLink, item: OutgoingTensor) -> tuple[float, float]:
        """Push a tensor; return the seconds that this took and its share of the link, in (0, 1].

        Raises:
            TransmissionError: It did not arrive.
        """
        timeout_s = self._limits.stream_timeout_s(len(item.data))
        async with self._pace.tensor(item.lane):
            push = partial(self._push, link, item)
            return await self._with_retries(push, timeout_s, _PUSH_FAULTS)

    async def _deliver(self, link: PeerLink, batch: list[OutgoingMessage]) -> None:
        with self._watch.measure("serialize"):
            request = control_pb2.DeliverRequest(envelopes=[item.envelope for item in batch])
            data = request.SerializeToString()
        deliver = link.control.unary_unary(_DELIVER, channel.as_is, channel.as_is)
        loop = asyncio.get_running_loop()
        # Time the call only if the connection is open, the batch small, and no tensor in the way.
        self._pace.charge(len(data))
        timed = link.called and len(data) <= _TIMED_SIZE_MAX_BYTES and not link.share.num
        start_s = loop.time()
        answer = await deliver(
            data, timeout=self._limits.control_timeout_s, metadata=self._metadata
        )
        link.called = True
        if timed and not link.share.num:
            self._on_latency(link.node_id, loop.time() - start_s)
        response = codec.parse(control_pb2.DeliverResponse, answer)
        if response.num_dropped:
            # Both sides check with the same table, so their version or their run differs.
            _log.warning(
                "message.dropped %s dropped %d of %d messages",
                link.node_id,
                response.num_dropped,
                len(batch),
            )

    async def _push(self, link: PeerLink, item: OutgoingTensor) -> tuple[float, float]:
        if item.crc32 is None:
            item.crc32 = await crc32_of(item.data, self._watch)
        with self._watch.measure("serialize"):
            header = tensor_pb2.TensorHeader(
                envelope=item.envelope, size_bytes=len(item.data), crc32=item.crc32
            )
            first = tensor_pb2.PushRequest(header=header).SerializeToString()
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        entered_s = link.share.enter(start_s)
        try:
            answer = await self._push_whole(link, first, item)
        finally:
            seconds = loop.time() - start_s
            alone_s = link.share.leave(start_s + seconds, entered_s)
        response = codec.parse(tensor_pb2.PushResponse, answer)
        if response.state != tensor_pb2.PUSH_STATE_RECEIVED:
            raise TransmissionError(
                _PUSH_FAILURES.get(response.state, "the receiver did not take it")
            )
        return seconds, alone_s / seconds if alone_s > 0 else 1.0

    async def _push_whole(self, link: PeerLink, first: bytes, item: OutgoingTensor) -> bytes:
        timeout_s = self._limits.stream_timeout_s(len(item.data))
        if len(item.data) > self._pace.frame_bytes(self._limits):
            return await self._push_frames(link, first, item, timeout_s)
        # On the wire, a stream of one message equals a unary call, which costs half as much here.
        with self._watch.measure("copy"):
            frame = data_frame(item.data, head=first) if item.data else first
        await self._pace.wait(len(frame), item.lane)
        push = link.bulk.unary_unary(_PUSH, channel.as_is, channel.as_is)
        answer: bytes = await push(frame, timeout=timeout_s, metadata=self._metadata_of(item))
        return answer

    def _metadata_of(self, item: OutgoingTensor) -> tuple[tuple[str, str], ...]:
        return self._probe_metadata if isinstance(item.message, LinkProbe) else self._metadata

    async def _push_frames(
        self, link: PeerLink, first: bytes, item: OutgoingTensor, timeout_s: float
    ) -> bytes:
        """Stream a tensor; return the receiver's answer.

        The first attempt sends data without waiting for the receiver's consent. The next one waits
        for it, and goes on where the first one broke off. Or it gets a refusal: gRPC hides why a
        receiver has ended a stream during which data was written.
        """
        push = link.bulk.stream_unary(_PUSH, channel.as_is, channel.as_is)
        call = push(None, timeout=timeout_s, metadata=self._metadata_of(item))
        try:
            await call.write(first)
            # Without consent there is no position: the answer is a refusal.
            position: int | None = 0
            if item.begun:
                position = channel.consented(await call.initial_metadata(), len(item.data))
            if position is not None:
                item.begun = True
                rest = item.data[position:]
                for frame in frames_of(rest, self._pace.frame_bytes(self._limits), self._watch):
                    await self._pace.wait(len(frame), item.lane)
                    async with asyncio.timeout(self._limits.frame_timeout_s):
                        await call.write(frame)
            await call.done_writing()
        except asyncio.InvalidStateError:
            pass  # The receiver answered before the end of the stream. The answer says why.
        except TimeoutError:
            call.cancel()
            raise TransmissionError("it takes data too slowly", Fault.RATE) from None
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INTERNAL:
                raise
            raise _CutOffError from None
        answer: bytes = await call
        return answer

    async def _with_retries(
        self,
        attempt: Callable[[], Coroutine[Any, Any, T]],
        timeout_s: float,
        faults: Mapping[grpc.StatusCode, Fault],
    ) -> T:
        """Return the result of `attempt`, repeated while the peer is unavailable.

        Args:
            attempt: Makes one try.
            timeout_s: The deadline that `attempt` gives gRPC.
            faults: Maps a status code to the kind of fault that the core is told.

        Raises:
            TransmissionError: The last attempt failed, or an attempt failed in a way that a repeat
                can't mend.
        """
        num_refused = 0
        for delay_s in (*self._limits.retry_delays_s, None):
            try:
                return await _while_running(attempt, timeout_s)
            except grpc.aio.UsageError:
                raise TransmissionError(LEFT) from None
            except asyncio.CancelledError:
                # A closed channel cancels its calls, but not this task.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise TransmissionError(LEFT) from None
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                num_refused += "refused" in details
                if (
                    error.code() is not grpc.StatusCode.UNAVAILABLE
                    or delay_s is None
                    or num_refused > self._limits.refused_retries_max
                ):
                    fault = faults.get(error.code(), Fault.NONE)
                    raise TransmissionError(reason_of(error), fault, gone=is_gone(error)) from None
                await asyncio.sleep(delay_s)
            except _CutOffError:
                if delay_s is None:
                    raise TransmissionError("the receiver broke off") from None
                await asyncio.sleep(delay_s)
        raise AssertionError("the last delay is None")


async def _while_running(attempt: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
    """Return the result of `attempt`, repeated at once if this process was suspended meanwhile.

    gRPC's deadlines pass while the process is stopped or its loop is blocked, but the loop's clock
    does not advance then. A deadline that passed this way says nothing about the peer.
    """
    loop = asyncio.get_running_loop()
    while True:
        start_s = loop.time()
        try:
            return await attempt()
        except grpc.aio.AioRpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if not late or loop.time() - start_s > timeout_s / 2:
                raise


# --- queues --------------------------------------------------------------------------------------

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
    """Half of a round trip over the tensor channel."""
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
        control, bulk = self._open(node, address)
        link = PeerLink(node_id=node, address=address, control=control, bulk=bulk)
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
            for old in (link.control, link.bulk):
                self._own(old.close(_OLD_CHANNEL_S))
            link.control, link.bulk = self._open(node, link.address)
            link.called = False

    def _open(self, node: NodeId, address: str) -> tuple[grpc.aio.Channel, grpc.aio.Channel]:
        """Return new channels to a node: for control, and for tensors."""
        shown = self._membership.tls
        name = peer_name(node)
        limits = self._limits
        control = channel.open_channel(address, limits, shown, name)
        return control, channel.open_channel(address, limits, shown, name)

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
        """Time empty round trips and one transfer over the tensor channel; None if that failed.

        The bytes are random, so that nothing on the way can compress them. They share the channel
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
