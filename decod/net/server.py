"""The gRPC server of a node: what comes in is checked here, then handed to a `PeerHandler`.

When a peer calls, the server must:
- hand over messages of one sender in the order in which it sent them;
- drop what is malformed or of another run, count it, and go on;
- ask for memory only after the size has been compared with the limits, and give it back whenever a
  tensor does not arrive whole;
- never let the text of an exception reach a peer: it gets a code, and if that is a bug its number;
  the log gets the rest.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from decod.errors import DecodError, MalformedMessageError, NetworkError
from decod.ids import NodeId, RunId
from decod.net import channel
from decod.net.address import join_address
from decod.net.block import BlockGiver
from decod.net.counters import Counters, PeerLog
from decod.net.donor import StateBlob, StateDonor, StateRequest
from decod.net.limits import LIMITS, Limits
from decod.net.peer import Context, host_of, ip_of
from decod.net.stream import Filler
from decod.protocol.follow_messages import Average
from decod.protocol.messages import (
    BULK_MESSAGES,
    BackwardGradient,
    ForwardActivation,
    LinkProbe,
    Message,
)
from decod.protocol.params import PROTOCOL_VERSION
from decod.stopwatch import Stopwatch
from decod.wire import codec, validate
from decod.wire.frame import split_head
from decod.wire.v1 import control_pb2, enroll_pb2, state_pb2, tensor_pb2

_log = logging.getLogger(__name__)

_WITH_TENSOR = (ForwardActivation, BackwardGradient, Average, LinkProbe)
"""Messages that mean nothing alone."""

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRequest:
    """What a stranger says of itself. Nothing of it is proven."""

    run_id: RunId | None = None
    """The run that it expects, or None for any."""
    sender: NodeId | None = None
    """None for a visitor that will not join."""
    sender_address: str = ""
    observed_address: str = ""
    """IP address, without port, that the call came from; empty if it can't be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloInfo:
    """What a node tells strangers about its run."""

    run_id: RunId
    manifest_json: str
    node_id: NodeId
    """The node that answered."""
    leader: NodeId | None = None
    leader_address: str = ""
    observed_address: str = ""
    """IP address of the asker, as the node sees it. The server fills it in."""


class PeerHandler(Protocol):
    """What the server hands to the driver. All but `state` must return at once."""

    @property
    def stopped(self) -> bool:
        """Whether this node has ended: what still comes is refused, and that is nobody's fault."""

    def deliver(self, sender: NodeId, term: int, message: Message) -> None:
        """Takes a control message."""

    def allocate(self, sender: NodeId, message: Message, size_bytes: int) -> memoryview | None:
        """Returns a writable buffer of exactly `size_bytes` for a tensor, or None to refuse it.

        The server owns it until it calls `tensor_arrived` or `tensor_failed`, one of them, once.
        """

    def tensor_arrived(
        self, sender: NodeId, term: int, message: Message, buffer: memoryview, seconds: float
    ) -> None:
        """Takes a whole tensor. `seconds` is the time since its header arrived."""

    def tensor_failed(self, buffer: memoryview) -> None:
        """Takes a buffer back whose tensor did not arrive; what it holds means nothing."""

    def hello(self, request: HelloRequest) -> HelloInfo | None:
        """Returns what a stranger may know, or None if this node knows too little itself."""

    def status(self) -> str:
        """Returns what this node knows of the run, as JSON."""

    async def state(self, request: StateRequest) -> StateBlob | str:
        """Returns a copy of a state, or why there is none, in at most 200 printable characters."""


class PeerServer:
    """Serves peers on one TCP port.

    Args:
        node_id: This node. Messages that claim to come from it are dropped.
        run_id: Messages of other runs are dropped.
        handler: Takes what has been checked.
        counters: Counts by the peer's IP address: `message.malformed`, `message.foreign`,
            `tensor.refused`, `tensor.corrupted`, `tensor.broken`, `rpc.failed`.
        watch: Measures what is done to messages and tensors here.
    """

    def __init__(
        self,
        node_id: NodeId,
        run_id: RunId,
        handler: PeerHandler,
        *,
        counters: Counters | None = None,
        limits: Limits = LIMITS,
        watch: Stopwatch | None = None,
    ) -> None:
        self._node_id = node_id
        self._run_id = run_id
        self._handler = handler
        self._limits = limits
        self._watch = watch or Stopwatch()
        self._server: grpc.aio.Server | None = None
        self._num_streams: Counter[NodeId] = Counter()
        self._error_ids = count(1)
        self._peer_log = PeerLog(_log, lambda: asyncio.get_running_loop().time())
        self.counters = counters or Counters()
        self.donor = StateDonor(run_id, handler.state, self._count, limits, self._watch)
        self.blocks = BlockGiver(run_id, self._count, limits)

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port (0 chooses a free one).

        Raises:
            NetworkError: The port is in use, or the address is not this host's (E-NET-002).
        """
        server = grpc.aio.server(
            options=channel.server_options(self._limits),
            maximum_concurrent_rpcs=self._limits.concurrent_rpcs_max,
        )
        server.add_generic_rpc_handlers(self._rpc_handlers())
        try:
            bound_port = server.add_insecure_port(join_address(host, port))
        except RuntimeError as error:
            await server.stop(None)
            raise NetworkError(
                f"can't listen on {join_address(host, port)}",
                why="the port is in use, or the address is not one of this host's",
                fix="end the other program, or choose another with --listen HOST:PORT",
                code="E-NET-002",
            ) from error
        await server.start()
        self._server = server
        return bound_port

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, lets running ones finish for `grace_s` seconds, then breaks them."""
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None
        self.donor.close()

    def _rpc_handlers(self) -> "tuple[grpc.GenericRpcHandler[Any, Any], ...]":
        # No serializers: bytes are parsed within the handlers, where our own error handling holds.
        unary, fill, pour = (
            grpc.unary_unary_rpc_method_handler,
            grpc.stream_unary_rpc_method_handler,
            grpc.unary_stream_rpc_method_handler,
        )
        methods = (
            (channel.CONTROL_SERVICE, "Deliver", unary(self._guard(self._deliver))),
            (channel.TENSOR_SERVICE, "Push", fill(self._guard(self._push))),
            (channel.ENROLL_SERVICE, "Hello", unary(self._guard(self._hello))),
            (channel.STATE_SERVICE, "Describe", unary(self._guard(self.donor.describe))),
            (channel.STATE_SERVICE, "Fetch", pour(self._guard(self.donor.fetch))),
            (channel.STATE_SERVICE, "Release", unary(self._guard(self.donor.release))),
            (channel.STATE_SERVICE, "ReadBlock", unary(self._guard(self.blocks.give))),
            (channel.STATE_SERVICE, "ReadStatus", unary(self._guard(self._read_status))),
        )
        return tuple(
            grpc.method_handlers_generic_handler(service, {name: method})
            for service, name, method in methods
        )

    def _guard(
        self, method: Callable[[R, Context], Awaitable[T]]
    ) -> Callable[[R, Context], Awaitable[T]]:
        """Wraps a method so that its errors become codes; see the module's docstring."""

        async def guarded(request: R, context: Context) -> T:
            host = host_of(context)
            try:
                return await method(request, context)
            except MalformedMessageError as error:
                self._count("message.malformed", host, error.what)
                status, text = grpc.StatusCode.INVALID_ARGUMENT, error.code
            except (TimeoutError, grpc.aio.BaseError, grpc.RpcError) as error:
                self._count("rpc.failed", host, type(error).__name__)
                status, text = grpc.StatusCode.ABORTED, "E-NET-006"
            except DecodError as error:
                # It has a name, so it is no bug: a kept state has made room for a newer one, say.
                self._count("rpc.failed", host, f"{error.what}: {error.why}")
                status, text = grpc.StatusCode.INTERNAL, error.code
            except Exception:  # noqa: BLE001 - gRPC would send its text to the peer.
                error_id = next(self._error_ids)
                self.counters.add("rpc.failed", host)
                _log.exception("rpc.failed %s error id %d", host, error_id)
                status, text = grpc.StatusCode.INTERNAL, f"E-INT-001 {error_id}"
            await context.abort(status, text)
            raise AssertionError("abort raises")

        return guarded

    def _count(self, name: str, host: str, reason: str) -> None:
        self.counters.add(name, host)
        self._peer_log.warn(host, name, reason)

    def _accept(self, envelope: control_pb2.Envelope, host: str) -> codec.Decoded | None:
        """Returns the message of an envelope, or None after counting what is wrong with it."""
        try:
            with self._watch.measure("serialize"):
                decoded = codec.decode(envelope)
        except MalformedMessageError as error:
            self._count("message.malformed", host, f"{error.what}: {error.why}")
            return None
        if decoded.run_id != self._run_id or decoded.sender == self._node_id:
            self._count("message.foreign", host, f"run {decoded.run_id}, from {decoded.sender}")
            return None
        return decoded

    async def _deliver(self, data: bytes, context: Context) -> bytes:
        with self._watch.measure("serialize"):
            request = codec.parse(control_pb2.DeliverRequest, data)
        host = host_of(context)
        num_dropped = 0
        for envelope in request.envelopes:
            decoded = self._accept(envelope, host)
            if decoded is None:
                num_dropped += 1
            elif isinstance(
                decoded.message, (ForwardActivation, BackwardGradient, Average, LinkProbe)
            ):
                num_dropped += 1
                what = f"{type(decoded.message).__name__} without its tensor"
                self._count("message.malformed", host, what)
            else:
                self._handler.deliver(decoded.sender, decoded.term, decoded.message)
        return control_pb2.DeliverResponse(num_dropped=num_dropped).SerializeToString()

    async def _push(self, _requests: object, context: Context) -> bytes:
        state = await self._receive_tensor(context)
        return tensor_pb2.PushResponse(state=state).SerializeToString()

    async def _receive_tensor(self, context: Context) -> tensor_pb2.PushState:
        host = host_of(context)
        async with asyncio.timeout(self._limits.frame_timeout_s):
            first = await _read(context)
        head, data = split_head(first or b"")
        with self._watch.measure("serialize"):
            request = codec.parse(tensor_pb2.PushRequest, head)
        header = request.header
        decoded = self._accept(header.envelope, host)
        if decoded is None:
            return tensor_pb2.PUSH_STATE_MALFORMED
        if not isinstance(decoded.message, BULK_MESSAGES) or not 0 <= header.crc32 < 2**32:
            self._count("message.malformed", host, "no header of a tensor")
            return tensor_pb2.PUSH_STATE_MALFORMED
        sender = decoded.sender
        buffer = None
        if (
            0 <= header.size_bytes <= self._limits.tensor_size_max_bytes
            and self._num_streams[sender] < self._limits.streams_per_sender_max
        ):
            buffer = self._handler.allocate(sender, decoded.message, header.size_bytes)
        if buffer is None:
            reason = f"{type(decoded.message).__name__} of {header.size_bytes} bytes"
            if self._handler.stopped:
                _log.debug("tensor.refused %s: %s, as this node has ended", host, reason)
            else:
                self._count("tensor.refused", host, reason)
            return tensor_pb2.PUSH_STATE_REFUSED
        assert buffer.nbytes == header.size_bytes, f"{buffer.nbytes} != {header.size_bytes}"
        self._num_streams[sender] += 1
        try:
            return await self._fill(context, buffer, header, data or request.data, decoded)
        finally:
            self._num_streams[sender] -= 1
            if not self._num_streams[sender]:
                del self._num_streams[sender]

    async def _fill(
        self,
        context: Context,
        buffer: memoryview,
        header: tensor_pb2.TensorHeader,
        data: memoryview | bytes,
        decoded: codec.Decoded,
    ) -> tensor_pb2.PushState:
        """Receives the rest of a tensor into `buffer`, and gives that to the handler either way."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        filler = Filler(
            buffer.cast("B"),
            crc32=header.crc32,
            frame_size_max_bytes=self._limits.frame_size_bytes,
            watch=self._watch,
        )
        arrived = False
        try:
            if not data:
                await context.send_initial_metadata((channel.CONSENT,))
            filler.add(data)
            async with asyncio.timeout_at(start_s + self._limits.stream_timeout_s(buffer.nbytes)):
                while (frame := await self._next_frame(context)) is not None:
                    filler.add_frame(frame)
            arrived = filler.complete and filler.intact
        finally:
            if not arrived:
                self._handler.tensor_failed(buffer)
        if arrived:
            seconds = loop.time() - start_s
            self._handler.tensor_arrived(
                decoded.sender, decoded.term, decoded.message, buffer, seconds
            )
            return tensor_pb2.PUSH_STATE_RECEIVED
        if not filler.complete:
            self._count("tensor.broken", host_of(context), "it ended before its size was reached")
            return tensor_pb2.PUSH_STATE_MALFORMED
        self._count("tensor.corrupted", host_of(context), "its checksum does not hold")
        return tensor_pb2.PUSH_STATE_CORRUPTED

    async def _next_frame(self, context: Context) -> bytes | None:
        async with asyncio.timeout(self._limits.frame_timeout_s):
            return await _read(context)

    async def _hello(self, data: bytes, context: Context) -> bytes:
        request = codec.parse(enroll_pb2.HelloRequest, data)
        response = enroll_pb2.HelloResponse(protocol_version=PROTOCOL_VERSION, run_id=self._run_id)
        # The version first: another version's other fields may mean something else.
        if request.protocol_version != PROTOCOL_VERSION:
            response.refusal = enroll_pb2.HELLO_REFUSAL_VERSION_DIFFERS
            return response.SerializeToString()
        checked = _checked_hello(request)
        if checked.run_id not in (None, self._run_id):
            response.refusal = enroll_pb2.HELLO_REFUSAL_RUN_DIFFERS
            return response.SerializeToString()
        checked = replace(checked, observed_address=ip_of(context))
        info = self._handler.hello(checked)
        if info is None:
            response.refusal = enroll_pb2.HELLO_REFUSAL_NOT_READY
            return response.SerializeToString()
        response.manifest_json = info.manifest_json
        response.leader_id = info.leader or ""
        response.leader_address = info.leader_address if info.leader else ""
        response.observed_address = checked.observed_address
        response.node_id = info.node_id
        return response.SerializeToString()

    async def _read_status(self, data: bytes, context: Context) -> bytes:
        request = codec.parse(state_pb2.ReadStatusRequest, data)
        run_id = validate.run_id("run_id", request.run_id)
        validate.node_id("sender_id", request.sender_id)
        if run_id != self._run_id:
            self._count("message.foreign", host_of(context), f"run {run_id}")
            return state_pb2.ReadStatusResponse().SerializeToString()
        status = self._handler.status()
        return state_pb2.ReadStatusResponse(status_json=status).SerializeToString()


async def _read(context: Context) -> bytes | None:
    """Returns the next message of a client's stream, or None at its end."""
    message: object = await context.read()
    return message if isinstance(message, bytes) else None


def _checked_hello(request: enroll_pb2.HelloRequest) -> HelloRequest:
    address = request.sender_address
    return HelloRequest(
        run_id=validate.run_id("run_id", request.run_id) if request.run_id else None,
        sender=validate.node_id("sender_id", request.sender_id) if request.sender_id else None,
        sender_address=validate.address("sender_address", address) if address else "",
    )
