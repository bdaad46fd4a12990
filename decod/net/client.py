"""The calling side: a control channel and a bulk channel to every peer, each with its queue.

Theory of operation. `send` and `send_tensor` append to the peer's queue and return. Each peer has
one task for messages and up to two for tensors. A task runs until its queue is empty, so a silent
peer costs nothing but an empty queue. All messages that wait when the task runs travel in one call,
up to the size of a batch. Every accepted tensor ends in exactly one callback, and so does every
message that fails, unless the client is closed first.

Order: control messages to one peer arrive in the order of `send`. Tensors to one peer start in the
order of `send_tensor`, two at a time. There is no order between messages and tensors.
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

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.net import channel
from decod.net.failure import reason_of
from decod.net.limits import LIMITS, Limits
from decod.net.share import LinkShare
from decod.net.stream import crc32_of, frames_of
from decod.planner.cost import transfer_rate
from decod.protocol.core.events import Fault, SendFailed
from decod.protocol.core.messages import BULK_MESSAGES, LinkProbe, Message
from decod.protocol.core.messages.forwarding import Way
from decod.stopwatch import Stopwatch
from decod.wire import codec
from decod.wire.frame import data_frame
from decod.wire.v1 import control_pb2, tensor_pb2

_log = logging.getLogger(__name__)

T = TypeVar("T")

_TIMED_SIZE_MAX_BYTES = 4096
"""A larger batch is not timed: its transfer would add to the link's latency."""

_NUM_PROBE_TRIPS = 3
"""Empty round trips before a probe's bytes. The first does not count: it may open the channel."""

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

_LEFT = "the peer has left"

_DELIVER = f"/{channel.CONTROL_SERVICE}/Deliver"
_PUSH = f"/{channel.TENSOR_SERVICE}/Push"
_PUSH_FAILURES = {
    tensor_pb2.PUSH_STATE_REFUSED: "the receiver refused the tensor",
    tensor_pb2.PUSH_STATE_MALFORMED: "the receiver can't read the tensor",
    tensor_pb2.PUSH_STATE_CORRUPTED: "the tensor was altered on its way",
}


class ClientHandler(Protocol):
    """The client's reports to the driver, made from the event loop and never from within `send`."""

    def on_tensor_sent(
        self,
        to: NodeId,
        message: Message,
        token: object,
        *,
        seconds: float,
        size_bytes: int,
        share: float,
    ) -> None:
        """The receiver has the whole tensor.

        Args:
            to: The receiver.
            message: Its bulk message.
            token: As given to `send_tensor`.
            seconds: Time from its first byte to the answer, without waiting in the queue and
                without earlier attempts.
            size_bytes: Size of the tensor.
            share: The part of the link that it had beside other tensors to this peer, in (0, 1].
        """

    def on_send_failed(self, failed: SendFailed, token: object) -> None:
        """A message or tensor did not reach its receiver. `token` is None for a control message."""

    def on_latency(self, to: NodeId, seconds: float) -> None:
        """One small control call took `seconds`, there and back, while no tensor was on its way."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a probe of the link to a peer."""

    latency_s: float
    """Half of a round trip over the tensor channel."""
    bandwidth_bytes_per_s: float


@dataclass(slots=True)
class _Control:
    message: Message
    way: Way | None
    envelope: control_pb2.Envelope


@dataclass(slots=True)
class _Bulk:
    message: Message
    way: Way | None
    envelope: control_pb2.Envelope
    data: memoryview
    token: object
    crc32: int | None = None
    cut_off: bool = False
    """The receiver ended the last attempt before all data was written."""


@dataclass(slots=True)
class _Link:
    """The channels and queues of one peer at one address."""

    node_id: NodeId
    address: str
    control: grpc.aio.Channel
    bulk: grpc.aio.Channel
    sequence: "count[int]" = field(default_factory=lambda: count(1))
    messages: deque[_Control] = field(default_factory=deque)
    tensors: deque[_Bulk] = field(default_factory=deque)
    num_control_tasks: int = 0
    num_bulk_tasks: int = 0
    share: LinkShare = field(default_factory=LinkShare)
    called: bool = False
    """A control call has succeeded, so the connection is open."""


class PeerClient:
    """The sender of control messages and tensors to all peers.

    Args:
        node_id: This node, named as the sender of every message.
        run_id: Named in every message.
        handler: Is told how each send ended.
        limits: Sizes, timeouts, and lengths of queues.
        watch: Measures the time spent on serializing and copying.
    """

    def __init__(
        self,
        node_id: NodeId,
        run_id: RunId,
        handler: ClientHandler,
        *,
        limits: Limits = LIMITS,
        watch: Stopwatch | None = None,
    ) -> None:
        self._node_id = node_id
        self._run_id = run_id
        self._metadata = channel.run_metadata(run_id)
        self._tensor_metadata = channel.tensor_metadata(run_id, node_id)
        self._handler = handler
        self._limits = limits
        self._watch = watch or Stopwatch()
        self._links: dict[NodeId, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def set_address(self, node: NodeId, address: str) -> None:
        """Set the address at which `node` is dialled.

        If it replaces another address, waiting messages and tensors go to the new one, in the same
        order. Those already on their way to the old address may arrive or fail.
        """
        old = self._links.get(node)
        if old is not None and old.address == address:
            return
        link = _Link(
            node_id=node,
            address=address,
            control=channel.open_channel(address, self._limits),
            bulk=channel.open_channel(address, self._limits),
        )
        self._links[node] = link
        if old is not None:
            link.sequence = old.sequence
            link.messages.extend(old.messages)
            link.tensors.extend(old.tensors)
            self._retire(old)
            self._run_tasks(link)

    def address_of(self, node: NodeId) -> str | None:
        """Return the address at which `node` is dialled, or None if it has none."""
        link = self._links.get(node)
        return link.address if link else None

    def forget(self, node: NodeId) -> None:
        """Close the channels to `node`. Messages and tensors that wait or are on their way fail."""
        link = self._links.pop(node, None)
        if link is not None:
            waiting: list[_Control | _Bulk] = [*link.messages, *link.tensors]
            for item in waiting:
                self._fail_soon(node, item, _LEFT)
            self._retire(link)

    def send(self, to: NodeId, term: int, message: Message, way: Way | None = None) -> None:
        """Queue a control message and return at once. For the arguments see `send_tensor`."""
        link = self._links.get(to)
        envelope = self._encode(link, term, message, way)
        item = _Control(message, way, envelope)
        if link is None:
            self._fail_soon(to, item, "its address is unknown")
        elif len(link.messages) >= self._limits.queue_length_max:
            self._fail_soon(to, item, "too many messages wait for it")
        elif envelope.ByteSize() > self._limits.batch_size_max_bytes:
            self._fail_soon(to, item, f"the message has {envelope.ByteSize()} bytes")
        else:
            link.messages.append(item)
            self._run_tasks(link)

    def send_tensor(
        self,
        to: NodeId,
        term: int,
        message: Message,
        data: memoryview,
        token: object = None,
        way: Way | None = None,
    ) -> None:
        """Queue a tensor with its bulk message and return at once.

        Args:
            to: The receiver.
            term: The term of this node's view.
            message: Says what the tensor is.
            data: The bytes, contiguous. They are read, not copied: they must not change until a
                callback has been called with `token`.
            token: Any object. It is passed to the callback.
            way: Origin and goal of a tensor that goes by way of a third member; else None.
        """
        assert isinstance(message, BULK_MESSAGES), message
        link = self._links.get(to)
        envelope = self._encode(link, term, message, way)
        item = _Bulk(message, way, envelope, data.cast("B"), token)
        if link is None:
            self._fail_soon(to, item, "its address is unknown")
        elif len(link.tensors) >= self._limits.queue_length_max:
            self._fail_soon(to, item, "too many tensors wait for it")
        else:
            link.tensors.append(item)
            self._run_tasks(link)

    async def probe(self, to: NodeId, term: int, size_bytes: int) -> Probed | None:
        """Time empty round trips and one transfer over the tensor channel; None if that failed.

        The bytes are random, so that nothing on the way can compress them. They share the channel
        with tensors, and the result is corrected for that.
        """
        link = self._links.get(to)
        if link is None:
            return None
        envelope = self._encode(link, term, LinkProbe())

        async def push(data: bytes) -> tuple[float, float]:
            item = _Bulk(LinkProbe(), None, envelope, memoryview(data), None)
            return await self._push_with_retries(link, item)

        try:
            trips = [await push(b"") for _ in range(_NUM_PROBE_TRIPS)]
            latency_s = min(seconds for seconds, _ in trips[1:]) / 2
            seconds, share = await push(os.urandom(size_bytes))
        except (_FailedError, MalformedMessageError):
            return None
        rate = transfer_rate(size_bytes, duration_s=seconds, latency_s=latency_s, share=share)
        return Probed(latency_s, rate)

    def _encode(
        self, link: _Link | None, term: int, message: Message, way: Way | None = None
    ) -> control_pb2.Envelope:
        sequence = next(link.sequence) if link else 0
        with self._watch.measure("serialize"):
            return codec.encode(self._run_id, self._node_id, term, sequence, message, way)

    async def flush(self, *, timeout_s: float) -> None:
        """Wait until everything queued has arrived or failed, for at most `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel all sends and close all channels. No callback is called for what is dropped."""
        self._closed = True
        links, self._links = list(self._links.values()), {}
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in links:
            await link.control.close(None)
            await link.bulk.close(None)

    def _run_tasks(self, link: _Link) -> None:
        if link.messages and link.num_control_tasks == 0:
            link.num_control_tasks += 1
            self._own(self._send_messages(link))
        while link.num_bulk_tasks < min(self._limits.streams_per_peer, len(link.tensors)):
            link.num_bulk_tasks += 1
            self._own(self._send_tensors(link))

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

    def _retire(self, link: _Link) -> None:
        link.messages.clear()
        link.tensors.clear()

        async def close() -> None:
            await link.control.close(None)
            await link.bulk.close(None)

        self._own(close())

    def _fail_soon(self, to: NodeId, item: _Control | _Bulk, reason: str) -> None:
        asyncio.get_running_loop().call_soon(self._fail, to, item, _FailedError(reason))

    def _fail(self, to: NodeId, item: _Control | _Bulk, error: "_FailedError") -> None:
        if not self._closed:
            token = item.token if isinstance(item, _Bulk) else None
            reason, fault = str(error), error.fault
            failed = SendFailed(to, item.message, reason, way=item.way, fault=fault)
            self._handler.on_send_failed(failed, token)

    # --- control ----------------------------------------------------------------------------

    async def _send_messages(self, link: _Link) -> None:
        try:
            while link.messages:
                batch = self._take_batch(link)
                try:
                    deliver = partial(self._deliver, link, batch)
                    timeout_s = self._limits.control_timeout_s
                    await self._with_retries(deliver, timeout_s, _CONTROL_FAULTS)
                except _FailedError as error:
                    # Fail the messages behind it too: they would wait as long, and the core may
                    # have another way.
                    batch += link.messages
                    link.messages.clear()
                    for item in batch:
                        self._fail(link.node_id, item, error)
        finally:
            link.num_control_tasks -= 1

    def _take_batch(self, link: _Link) -> list[_Control]:
        batch: list[_Control] = []
        room_bytes = self._limits.batch_size_max_bytes
        while link.messages and len(batch) < self._limits.batch_length_max:
            # Every envelope is preceded by a tag of one byte and a length of at most 5.
            room_bytes -= link.messages[0].envelope.ByteSize() + 6
            if batch and room_bytes < 0:
                break
            batch.append(link.messages.popleft())
        return batch

    async def _deliver(self, link: _Link, batch: list[_Control]) -> None:
        with self._watch.measure("serialize"):
            request = control_pb2.DeliverRequest(envelopes=[item.envelope for item in batch])
            data = request.SerializeToString()
        deliver = link.control.unary_unary(_DELIVER, channel.as_is, channel.as_is)
        loop = asyncio.get_running_loop()
        # Time the call only if the connection is open, the batch small, and no tensor in the way.
        timed = link.called and len(data) <= _TIMED_SIZE_MAX_BYTES and not link.share.num
        start_s = loop.time()
        answer = await deliver(
            data, timeout=self._limits.control_timeout_s, metadata=self._metadata
        )
        link.called = True
        if timed and not link.share.num and not self._closed:
            self._handler.on_latency(link.node_id, loop.time() - start_s)
        response = codec.parse(control_pb2.DeliverResponse, answer)
        if response.num_dropped:
            # Both sides check with the same table, so their version or their run differs.
            _log.warning(
                "message.dropped %s dropped %d of %d messages",
                link.node_id,
                response.num_dropped,
                len(batch),
            )

    # --- bulk -------------------------------------------------------------------------------

    async def _send_tensors(self, link: _Link) -> None:
        try:
            while link.tensors:
                item = link.tensors.popleft()
                try:
                    seconds, share = await self._push_with_retries(link, item)
                except _FailedError as error:
                    self._fail(link.node_id, item, error)
                    continue
                if not self._closed:
                    self._handler.on_tensor_sent(
                        link.node_id,
                        item.message,
                        item.token,
                        seconds=seconds,
                        size_bytes=len(item.data),
                        share=share,
                    )
        finally:
            link.num_bulk_tasks -= 1

    async def _push_with_retries(self, link: _Link, item: _Bulk) -> tuple[float, float]:
        timeout_s = self._limits.stream_timeout_s(len(item.data))
        return await self._with_retries(partial(self._push, link, item), timeout_s, _PUSH_FAULTS)

    async def _push(self, link: _Link, item: _Bulk) -> tuple[float, float]:
        """Push a tensor; return the seconds that this took and its share of the link, in (0, 1]."""
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
            raise _FailedError(_PUSH_FAILURES.get(response.state, "the receiver did not take it"))
        return seconds, alone_s / seconds if alone_s > 0 else 1.0

    async def _push_whole(self, link: _Link, first: bytes, item: _Bulk) -> bytes:
        timeout_s = self._limits.stream_timeout_s(len(item.data))
        if len(item.data) > self._limits.frame_size_bytes:
            return await self._push_frames(link, first, item, timeout_s)
        # On the wire, a stream of one message equals a unary call, which costs half as much here.
        with self._watch.measure("copy"):
            frame = data_frame(item.data, head=first) if item.data else first
        push = link.bulk.unary_unary(_PUSH, channel.as_is, channel.as_is)
        answer: bytes = await push(frame, timeout=timeout_s, metadata=self._metadata_of(item))
        return answer

    def _metadata_of(self, item: _Bulk) -> tuple[tuple[str, str], ...]:
        return self._metadata if isinstance(item.message, LinkProbe) else self._tensor_metadata

    async def _push_frames(self, link: _Link, first: bytes, item: _Bulk, timeout_s: float) -> bytes:
        """Stream a tensor; return the receiver's answer.

        The first attempt sends data without waiting for the receiver's consent. If the receiver
        cuts it off, gRPC hides the reason, so the next attempt waits for consent or a refusal.
        """
        push = link.bulk.stream_unary(_PUSH, channel.as_is, channel.as_is)
        call = push(None, timeout=timeout_s, metadata=self._metadata_of(item))
        try:
            await call.write(first)
            if not item.cut_off or channel.CONSENT in (await call.initial_metadata()):
                for frame in frames_of(item.data, self._limits.frame_size_bytes, self._watch):
                    async with asyncio.timeout(self._limits.frame_timeout_s):
                        await call.write(frame)
            await call.done_writing()
        except asyncio.InvalidStateError:
            pass  # The receiver answered before the end of the stream. The answer says why.
        except TimeoutError:
            call.cancel()
            raise _FailedError("it takes data too slowly", Fault.RATE) from None
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INTERNAL:
                raise
            item.cut_off = True
            raise _CutOffError from None
        answer: bytes = await call
        return answer

    # --- retries ----------------------------------------------------------------------------

    async def _with_retries(
        self,
        attempt: Callable[[], Coroutine[Any, Any, T]],
        timeout_s: float,
        faults: Mapping[grpc.StatusCode, Fault],
    ) -> T:
        """Return the result of `attempt`, repeated while the peer is unavailable.

        Repeats are harmless: messages name the iteration, view or request that they belong to.

        Args:
            attempt: Makes one try.
            timeout_s: The deadline that `attempt` gives gRPC.
            faults: Maps a status code to the kind of fault that the core is told.

        Raises:
            _FailedError: The last attempt failed, or an attempt failed in a way that a repeat can't
                mend.
        """
        num_refused = 0
        for delay_s in (*self._limits.retry_delays_s, None):
            try:
                return await _while_running(attempt, timeout_s)
            except grpc.aio.UsageError:
                raise _FailedError(_LEFT) from None
            except asyncio.CancelledError:
                # A closed channel cancels its calls, but not this task.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise _FailedError(_LEFT) from None
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                num_refused += "refused" in details
                if (
                    error.code() is not grpc.StatusCode.UNAVAILABLE
                    or delay_s is None
                    or num_refused > self._limits.refused_retries_max
                ):
                    fault = faults.get(error.code(), Fault.NONE)
                    raise _FailedError(reason_of(error), fault) from None
                await asyncio.sleep(delay_s)
            except _CutOffError:
                if delay_s is None:
                    raise _FailedError("the receiver broke off") from None
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


class _FailedError(Exception):
    """Sending has failed for good. The text is the reason that the core gets."""

    def __init__(self, reason: str, fault: Fault = Fault.NONE) -> None:
        super().__init__(reason)
        self.fault = fault


class _CutOffError(Exception):
    """The receiver ended a stream while data was being written. The reason is not known yet."""
