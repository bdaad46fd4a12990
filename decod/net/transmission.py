"""The transmission of one batch of messages, or of one tensor, to one peer.

A failed attempt is repeated while the peer is unavailable. Repeats are harmless: messages name the
iteration, view or request that they belong to.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from decod.clocks import Stopwatch
from decod.ids import NodeId, RunId, TensorId
from decod.net import channel
from decod.net.channel import is_gone, reason_of
from decod.net.net_limits import Limits
from decod.net.rate_caps import Lane, Pace
from decod.net.stream import crc32_of, data_frame, frames_of
from decod.protocol.core.events import Fault
from decod.protocol.core.messages import (
    BackwardGradient,
    ForwardActivation,
    LinkProbe,
    Message,
    StageActivation,
    StageGradient,
)
from decod.protocol.core.messages.scopes import Way
from decod.wire import codec
from decod.wire.v1 import control_pb2, tensor_pb2

# --- shares of a link ----------------------------------------------------------------------------
# The share of a link that each of several overlapping transfers gets.
#
# With it, the rate of each transfer can be computed as if it had had the link to itself.


@dataclass(slots=True)
class LinkShare:
    """A clock that runs at 1/n of real time while n transfers are on their way to one peer.

    Between a transfer's start and end, the clock advances by the time that the transfer would have
    taken alone. This assumes that overlapping transfers get equal parts of the link.
    """

    num: int = 0
    """Transfers on their way."""
    _shown_s: float = 0.0
    _looked_s: float = 0.0

    def enter(self, now_s: float) -> float:
        """Begin a transfer; return the clock's time, to be passed to `leave`."""
        self._advance(now_s)
        self.num += 1
        return self._shown_s

    def leave(self, now_s: float, entered_s: float) -> float:
        """End a transfer; return the time that it would have taken alone, in seconds."""
        self._advance(now_s)
        self.num -= 1
        return self._shown_s - entered_s

    def _advance(self, now_s: float) -> None:
        if self.num:
            self._shown_s += (now_s - self._looked_s) / self.num
        self._looked_s = now_s


_log = logging.getLogger(__name__)

T = TypeVar("T")

_TIMED_SIZE_MAX_BYTES = 4096
"""A larger batch is not timed: its transfer would add to the link's latency."""

LEFT = "the peer has left"

_URGENT = (ForwardActivation, BackwardGradient, StageActivation, StageGradient, LinkProbe)
"""Messages whose tensors a pipeline waits for."""

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


def lane_of(message: Message) -> Lane:
    """Return where a message's tensor waits if the rate is capped."""
    return Lane.ACTIVATIONS if isinstance(message, _URGENT) else Lane.AVERAGES


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
