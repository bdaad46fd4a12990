"""One batch of messages, or one tensor, on its way to one peer.

A failed attempt is repeated while the peer is unavailable. Repeats are harmless: messages name the
iteration, view or request that they belong to.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from decod.clocks import Stopwatch
from decod.ids import NodeId, RunId, TensorId
from decod.membership.certificates import TlsIdentity, peer_name
from decod.net import channel
from decod.net.channel import is_gone, reason_of
from decod.net.net_limits import Limits
from decod.net.rate_caps import Lane, LinkShare, Pace, lane_of
from decod.net.stream import crc32_of
from decod.net.tensor_stream import CallerRefusedError, SentTensor, TensorSender
from decod.protocol.core.events import Fault
from decod.protocol.core.messages import LinkProbe, Message
from decod.protocol.core.messages.scopes import Way
from decod.wire import codec
from decod.wire.v1 import control_pb2, tensor_pb2

_log = logging.getLogger(__name__)

T = TypeVar("T")

_TIMED_SIZE_MAX_BYTES = 4096
"""A larger batch is not timed: its transfer would add to the link's latency."""

LEFT = "the peer has left"

_CONTROL_FAULTS = {
    grpc.StatusCode.UNAVAILABLE: Fault.LINK,
    grpc.StatusCode.DEADLINE_EXCEEDED: Fault.LINK,
}
_DELIVER = f"/{channel.CONTROL_SERVICE}/Deliver"
_NOT_TAKEN: dict[int, str] = {
    tensor_pb2.TENSOR_RESULT_REFUSED: "the receiver refused the tensor",
    tensor_pb2.TENSOR_RESULT_MALFORMED: "the receiver can't read the tensor",
    tensor_pb2.TENSOR_RESULT_CORRUPTED: "the tensor was altered on its way",
}


class TransmissionError(Exception):
    """Sending has failed. The text is the reason that the core gets.

    Args:
        reason: See above.
        fault: The kind of fault that the core is told.
        gone: Whether the peer is not where it was called.
        passes: Whether another attempt may succeed.
    """

    def __init__(
        self,
        reason: str,
        fault: Fault = Fault.NONE,
        *,
        gone: bool = False,
        passes: bool = False,
    ) -> None:
        super().__init__(reason)
        self.fault = fault
        self.gone = gone
        self.passes = passes

    @classmethod
    def of(cls, error: Exception) -> "TransmissionError":
        """Return what the failure of a call or connection means."""
        match error:
            case TransmissionError():
                return error
            case grpc.aio.AioRpcError():
                fault = _CONTROL_FAULTS.get(error.code(), Fault.NONE)
                passes = error.code() is grpc.StatusCode.UNAVAILABLE
                return cls(reason_of(error), fault, gone=is_gone(error), passes=passes)
            case OSError():
                reason = channel.reason_of_os(error)
                return cls(reason, Fault.LINK, gone=reason in channel.GONE, passes=True)
            case CallerRefusedError():
                told = str(error)
                return cls(channel.TOO_MANY_OPEN if told == channel.TOO_MANY else told)
        # gRPC's channel is closed.
        return cls(LEFT)


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
    shown: TlsIdentity
    """What this node shows on new connections."""
    share: LinkShare = field(default_factory=LinkShare)
    called: bool = False
    """A control call has succeeded, so the connection is open."""
    sender: TensorSender | None = None
    """The connection for tensors. None: there was no tensor yet."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a tensor is written. The next one is written while its result is awaited."""
    closed: bool = False

    async def close(self) -> None:
        """Close both connections. What is on its way fails."""
        self.closed = True
        await self.control.close(None)
        if self.sender is not None:
            await self.sender.close()


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
        await self._with_retries(lambda: _while_running(deliver, self._limits.control_timeout_s))

    async def push(self, link: PeerLink, item: OutgoingTensor) -> tuple[float, float]:
        """Push a tensor; return the seconds that this took and its share of the link, in (0, 1].

        Raises:
            TransmissionError: It did not arrive.
        """
        async with self._pace.tensor(item.lane):
            return await self._with_retries(partial(self._push, link, item))

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
            ).SerializeToString()
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                async with link.writing:
                    sender = await self._sender_of(link)
                    # What is ahead of a tensor takes none of its time.
                    start_s = loop.time()
                    limit.reschedule(start_s + self._limits.stream_timeout_s(len(item.data)))
                    sent, entered_s = await self._begin(link, sender, header, item)
                try:
                    result = await sent.result
                finally:
                    seconds = loop.time() - start_s
                    alone_s = link.share.leave(start_s + seconds, entered_s)
        except TimeoutError:
            if limit.expired():
                raise TransmissionError(channel.LATE, Fault.RATE) from None
            raise
        if result != tensor_pb2.TENSOR_RESULT_RECEIVED:
            raise TransmissionError(_NOT_TAKEN.get(result, "the receiver did not take it"))
        return seconds, alone_s / seconds if alone_s > 0 else 1.0

    async def _begin(
        self, link: PeerLink, sender: TensorSender, header: bytes, item: OutgoingTensor
    ) -> tuple[SentTensor, float]:
        """Send a tensor; return it, and when it began to share the link."""
        loop = asyncio.get_running_loop()
        entered_s = link.share.enter(loop.time())
        try:
            return await self._write(sender, header, item), entered_s
        except BaseException:
            link.share.leave(loop.time(), entered_s)
            # Half a tensor: nothing else can follow on this connection.
            await sender.close()
            raise

    async def _sender_of(self, link: PeerLink) -> TensorSender:
        """Return the connection to a peer, a new one if it has none that works."""
        while not link.closed:
            if link.sender is not None and not link.sender.broken:
                return link.sender
            shown = link.shown
            link.sender = await TensorSender.dial(
                link.address, shown, peer_name(link.node_id), self._limits
            )
            # Meanwhile the peer may have left, or this node may have other papers.
            if link.shown != shown:
                await link.sender.close()
        if link.sender is not None:
            await link.sender.close()
        raise TransmissionError(LEFT)

    async def _write(self, sender: TensorSender, header: bytes, item: OutgoingTensor) -> SentTensor:
        """Send a tensor. It goes on where an attempt before has broken off."""
        probes = isinstance(item.message, LinkProbe)
        sent = await sender.begin(header, resumes=item.begun, probes=probes)
        position: int | None = 0
        if item.begun:
            position = await sent.position
        if position is None or not 0 <= position <= len(item.data):
            return sent
        item.begun = True
        rest, size = item.data[position:], self._pace.frame_bytes(self._limits)
        for start in range(0, len(rest), size):
            piece = rest[start : start + size]
            await self._pace.wait(len(piece), item.lane)
            if sent.result.done():
                # It is not wanted.
                await sender.piece(memoryview(b""))
                break
            try:
                async with asyncio.timeout(self._limits.frame_timeout_s):
                    await sender.piece(piece)
            except TimeoutError:
                raise TransmissionError("it takes data too slowly", Fault.RATE) from None
        return sent

    async def _with_retries(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `attempt`, repeated while the peer can't be reached.

        Raises:
            TransmissionError: The last attempt failed, or an attempt failed in a way that a repeat
                can't mend.
        """
        num_refused = 0
        for delay_s in (*self._limits.retry_delays_s, None):
            try:
                return await attempt()
            except asyncio.CancelledError:
                # A closed channel cancels its calls, but not this task.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise TransmissionError(LEFT) from None
            except _FAILURES as error:
                failure = TransmissionError.of(error)
            num_refused += str(failure) == channel.REFUSED
            is_enough = num_refused > self._limits.refused_retries_max
            if delay_s is None or is_enough or not failure.passes:
                raise failure from None
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


_FAILURES = (
    TransmissionError,
    CallerRefusedError,
    grpc.aio.AioRpcError,
    grpc.aio.UsageError,
    OSError,
)
