"""The gRPC server of a node. Checks each incoming message, then hands it to a `PeerHandler`.

When a peer calls, the server must:
- refuse a call that does not name this run before it reads the body, except for Hello;
- count the items of a message before it parses them, and never block the event loop for long;
- hand over the messages of one sender in the order in which they were sent;
- drop and count messages that are malformed or of another run, and end the connection of a peer
  that keeps sending them;
- ask for memory only after it has compared the size with the limits, and give the memory back
  whenever a tensor does not arrive whole;
- never send the text of an exception to a peer: the peer gets a code, and for a bug the number of
  its entry in the log.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from decod.clocks import Stopwatch, wall_clock
from decod.errors import MalformedMessageError, NetworkError
from decod.ids import NodeId, RunId
from decod.membership.certificates import Caller, Purpose, TlsIdentity
from decod.membership.credential import statement_message
from decod.membership.identity import name_of
from decod.membership.papers import Membership
from decod.membership.receipts import ReceiptAnswer
from decod.membership.registrar import Registrar
from decod.membership.statements import WayProofs
from decod.net import channel
from decod.net.address import join_address
from decod.net.ask import Found, HelloInfo, HelloRequest
from decod.net.block_transfer import BlockGiver, BlockReader
from decod.net.calls import Calls, Who
from decod.net.donor import StateBlob, StateDonor, StateRequest
from decod.net.door import (
    Context,
    Door,
    FarEnd,
    TensorCaller,
    caller_in,
    host_of,
    ip_of,
    proven_id,
    require_caller,
)
from decod.net.enrolment import EnrollmentGiver, RegisterKeeper
from decod.net.front_door import FrontDoor
from decod.net.net_limits import LIMITS, Counters, Limits
from decod.net.rate_caps import Lane, Pace, Paces, lane_of
from decod.net.reverse_keeper import ReverseKeeper
from decod.net.storing import PartWriter
from decod.net.stream import BrokenTensors, IncomingRegion, IncomingTensor
from decod.net.tensor_stream import TensorReceiver
from decod.net.tls_pipe import TlsPipe, server_context
from decod.protocol.core.messages import PASSES, LinkProbe, OfDataNodes, WithTensor
from decod.protocol.core.messages.membership_messages import Average
from decod.protocol.core.view import Role
from decod.run.protocol_config import PROTOCOL_VERSION
from decod.wire import codec, validate
from decod.wire.codec import Decoded, Header, envelopes_of, read_envelope, read_header
from decod.wire.v1 import control_pb2, enroll_pb2, state_pb2, tensor_pb2

# --- turns on the event loop ---------------------------------------------------------------------
# Turns on the event loop, so that no number of messages blocks it for long.


class Turns:
    """A limit on the work on messages in each pass of the event loop. Use it in `async with`.

    Once the time of a pass is used up, entering waits for a later pass. Waiting callers enter in
    the order in which they asked. The work inside must not await: no other caller gets a turn
    meanwhile.

    Args:
        pass_max_s: Time for work on messages in one pass. One piece of work may overrun it.
    """

    def __init__(self, pass_max_s: float) -> None:
        self._pass_max_s = pass_max_s
        self._lock = asyncio.Lock()
        self._begun_s = 0.0
        self._spent_s = 0.0
        """Time used since the last wait for a later pass. At least as much as in this pass."""

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        if self._spent_s >= self._pass_max_s:
            self._spent_s = 0.0
            try:
                await asyncio.sleep(0)
            except BaseException:
                self._lock.release()
                raise
        self._begun_s = perf_counter()

    async def __aexit__(self, *exc_info: object) -> None:
        self._spent_s += perf_counter() - self._begun_s
        self._lock.release()


_log = logging.getLogger(__name__)

_WITH_TENSOR = (*PASSES, Average, LinkProbe)
"""Messages that are valid only with a tensor."""

_EXPIRIES_MAX = 20_000
"""Members whose certificate's end is remembered; beyond that all are forgotten."""

R = TypeVar("R")


class PeerHandler(Protocol):
    """The driver as the server sees it. All but `dial_back` and `state` must return at once."""

    pace: Pace
    """Caps the rate at which states and blocks of data leave."""
    intake: Pace
    """Caps the rate at which tensors and messages are taken."""

    @property
    def stopped(self) -> bool:
        """Return whether this node has ended. Tensors that still come are refused without a
        warning."""

    def deliver(self, received: codec.Decoded) -> None:
        """Take a control message."""

    def allocate(self, received: codec.Decoded, size_bytes: int) -> IncomingRegion | None:
        """Return memory of exactly `size_bytes` for a tensor, or None to refuse it.

        The server owns it, until `tensor_arrived` or until it releases it.
        """

    def tensor_arrived(self, received: codec.Decoded, region: IncomingRegion) -> None:
        """Take a whole tensor over, with its memory."""

    def tensor_late(self, sender: NodeId) -> None:
        """Note that a tensor of `sender` came too slowly and was given up."""

    def hello(self, request: HelloRequest) -> HelloInfo | None:
        """Return the answer to a stranger, or None if this node can't describe its run yet."""

    async def dial_back(self, request: HelloRequest) -> Found:
        """Dial a node that has said who and where it is; return what was found out about it."""

    def status(self) -> str:
        """Return the status of the run as this node sees it, as JSON."""

    async def state(self, request: StateRequest) -> StateBlob | str:
        """Return a copy of a state, or why there is none: at most 200 printable characters."""


@dataclass(frozen=True, slots=True)
class DataServices:
    """The services that a data node has for others, and no relay has."""

    registrar: Registrar
    """Admits nodes."""
    read_block: BlockReader
    """Reads a block of data for another data node."""
    receipt_of: Callable[[NodeId], ReceiptAnswer]
    """Returns the receipt for a member's work, if there is some."""


class PeerServer:
    """The server of one TCP port. It may be started again after it was stopped.

    Args:
        membership: This node's: what it shows to callers, and whom it believes. Messages that claim
            to come from this node are dropped.
        run_id: This run. Messages of other runs are dropped.
        handler: Takes the checked messages and tensors.
        limits: Sizes, timeouts and numbers of calls.
        watch: Measures the time spent on parsing and copying.
        services: What a data node does for others. None at a relay.
    """

    def __init__(
        self,
        membership: Membership,
        run_id: RunId,
        handler: PeerHandler,
        *,
        limits: Limits = LIMITS,
        watch: Stopwatch | None = None,
        services: DataServices | None = None,
    ) -> None:
        self._membership = membership
        self._node_id = membership.node_id
        self._registrar = None if services is None else services.registrar
        self._receipt_of = None if services is None else services.receipt_of
        self._run_id = run_id
        self._handler = handler
        self._limits = limits
        self._watch = watch or Stopwatch()
        self._server: grpc.aio.Server | None = None
        self._front: FrontDoor | None = None
        self._called: Calls | None = None
        self._tls: tuple[TlsIdentity, ssl.SSLContext] | None = None
        """What this node shows now, and the context that was made for it."""
        self.counters = Counters()
        """Counts by the peer's IP address: `message.malformed`, `message.foreign`,
        `message.forged`, `tensor.refused`, `tensor.corrupted`, `tensor.broken`, `rpc.failed`,
        `caller.refused`, `peer.dropped`, `connection.refused`: a connection over which no call
        came."""
        self._door = Door(run_id, self.counters, limits)
        self.on_fault = self._door.on_fault
        """Called with each event that is counted."""
        self._turns = Turns(limits.pass_max_s)
        self._proofs = WayProofs(membership, run_id, wall_clock)
        self.expiries: dict[NodeId, float] = {}
        """The instants when the certificates end that other members have shown, in seconds of the
        Unix epoch."""
        self._broken = BrokenTensors(limits)
        self._reader: ThreadPoolExecutor | None = None
        """Parses large messages, one at a time."""
        self.donor = StateDonor(
            run_id, handler.state, self._door.blame, limits, self._watch, handler.pace
        )
        self.parts = PartWriter(self.donor, handler.pace)
        paces = Paces(upload=handler.pace, download=handler.intake)
        self.reverse = ReverseKeeper(limits, paces, membership.bans.allowed)
        """Connections to members that nobody can dial."""
        self._blocks = BlockGiver(
            run_id,
            self._door.blame,
            limits,
            handler.pace,
            None if services is None else services.read_block,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. If `port` is 0, the system chooses a free one.

        Raises:
            NetworkError: The port is in use, or the address is not this host's (E-NET-002).
        """
        server = grpc.aio.server(
            options=channel.server_options(self._limits),
            maximum_concurrent_rpcs=self._limits.concurrent_rpcs_max,
        )
        self._called = self._calls()
        server.add_generic_rpc_handlers((self._called,))
        calls_port = server.add_secure_port("127.0.0.1:0", channel.server_credentials(self._shown))
        front = FrontDoor(self._limits, self._door, self._serve_tensors)
        try:
            bound_port = front.start(host, port, calls_port)
        except OSError as error:
            await server.stop(None)
            raise NetworkError(
                f"can't listen on {join_address(host, port)}",
                why="the port is in use, or the address is not one of this host's",
                fix="end the other program, or choose another with --listen HOST:PORT",
                code="E-NET-002",
            ) from error
        await server.start()
        self._server, self._front = server, front
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="decod-read")
        self.donor.open()
        return bound_port

    def _shown(self) -> TlsIdentity:
        """Return what this node shows in handshakes, and whom it believes by then."""
        own = self._membership.tls
        if self._registrar is None:
            return own
        return replace(own, anchors=own.anchors + self._registrar.anchors())

    def _uninvited(self, caller: Caller) -> str:
        """Return why the holder of a join token may not come in; empty if it may."""
        if self._registrar is None:
            return f"{caller.node_id} has a token, and this node admits nobody"
        return self._registrar.uninvited(caller)

    async def stop(self, grace_s: float) -> None:
        """Stop taking calls, and give running ones `grace_s` seconds to finish."""
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None
        if self._front is not None:
            await self._front.stop()
            self._front = None
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)
        self._broken.close()
        self.donor.close()

    def _calls(self) -> Calls:
        limits = self._limits
        calls = Calls(self._door, limits, self._membership.bans, self._uninvited)
        batch = limits.message_size_max_bytes
        question = limits.request_size_max_bytes
        deliver = calls.once(self._deliver, size_max_bytes=batch)
        calls.add(f"/{channel.CONTROL_SERVICE}/Deliver", deliver)
        hello = calls.once(self._hello, size_max_bytes=question)
        calls.open_to_all(f"/{channel.ENROLL_SERVICE}/Hello", hello, Who.INVITED)
        if self._registrar is not None:
            giver = EnrollmentGiver(self._registrar)
            enroll = calls.once(giver.give, size_max_bytes=question)
            calls.open_to_all(f"/{channel.ENROLL_SERVICE}/Enroll", enroll, Who.CERTIFIED)
            keeper = RegisterKeeper(self._run_id, self._door.blame, self._registrar)
            exchange = calls.once(keeper.exchange, size_max_bytes=limits.register_size_max_bytes)
            calls.add(f"/{channel.STATE_SERVICE}/ExchangeTokens", exchange, Who.DATA_NODE)
        for name, method, who in (
            ("Describe", self.donor.describe, Who.MEMBER),
            ("Release", self.donor.release, Who.MEMBER),
            # Prepared data need not be public, so volunteers don't get it.
            ("ReadBlock", self._blocks.give, Who.DATA_NODE),
            ("ReadStatus", self._read_status, Who.MEMBER),
            ("ReadReceipt", self._read_receipt, Who.MEMBER),
        ):
            answer = calls.once(method, size_max_bytes=question)
            calls.add(f"/{channel.STATE_SERVICE}/{name}", answer, who)
        self.reverse.serve(calls)
        fetch = calls.once(self.donor.fetch, size_max_bytes=question)
        calls.add_stream(f"/{channel.STATE_SERVICE}/Fetch", fetch)
        store = calls.once(self.parts.write, size_max_bytes=question)
        calls.add_stream(f"/{channel.STATE_SERVICE}/Store", store)
        return calls

    async def _deliver(self, data: bytes, context: Context) -> bytes:
        num_dropped = 0
        self._handler.intake.charge(len(data))
        read = partial(read_envelope, receiver=self._node_id)
        for envelope in envelopes_of(data, self._limits.batch_length_max):
            result = await self._result(read, envelope)
            async with self._turns:
                decoded = self._checked(result, context, len(envelope))
                if decoded is None or not self._is_heard(decoded, context):
                    num_dropped += 1
                else:
                    self._handler.deliver(decoded)
        return control_pb2.DeliverResponse(num_dropped=num_dropped).SerializeToString()

    async def _result(self, read: Callable[[bytes], R], data: bytes) -> Callable[[], R]:
        """Return a function that returns or raises what `read(data)` does.

        A large message has been parsed in a thread by then. A small one is parsed when the returned
        function is called, so that the time counts against this message's turn.
        """
        if len(data) <= self._limits.inline_size_max_bytes:
            return partial(read, data)
        assert self._reader is not None
        future = self._reader.submit(read, data)
        with suppress(MalformedMessageError):
            await asyncio.wrap_future(future)
        return future.result

    def _checked(self, result: Callable[[], R], context: FarEnd, size_bytes: int) -> R | None:
        """Return the result of reading a message, or count its fault and return None."""
        try:
            with self._watch.measure("serialize"):
                return result()
        except MalformedMessageError as error:
            reason = f"{error.what}: {error.why}"
            self._door.blame("message.malformed", context, reason, size_bytes=size_bytes)
            return None

    def _is_heard(self, decoded: Decoded, context: FarEnd, *, with_tensor: bool = False) -> bool:
        """Return whether a message comes from another node of this run and is of the expected
        kind."""
        caller = caller_in(context)
        assert caller is not None, "others are refused before this"
        self._see(caller)
        if decoded.run_id != self._run_id:
            self._door.blame("message.foreign", context, f"run {decoded.run_id}")
            return False
        if decoded.sender == self._node_id or decoded.sender != caller.node_id:
            reason = f"it says that it is from {decoded.sender}, and {caller.node_id} has sent it"
            self._door.blame("message.forged", context, reason)
            return False
        message = decoded.message
        if fault := self._fault_of(decoded, caller):
            self._door.blame("message.forged", context, fault)
            return False
        if with_tensor:
            fits = isinstance(message, WithTensor)
        else:
            fits = not isinstance(message, _WITH_TENSOR)
        if not fits:
            what = f"{type(message).__name__} {'with' if with_tensor else 'without'} a tensor"
            self._door.blame("message.malformed", context, what)
        return fits

    def _fault_of(self, decoded: Decoded, caller: Caller) -> str:
        """Return why nobody who may say a message has said it; empty if somebody has."""
        message = decoded.message
        way = decoded.way
        is_data = caller.is_data
        kind = type(message).__name__
        if way is not None and decoded.sender != way.origin:
            try:
                is_data = self._proofs.author_of(message, way).role is Role.DATA
            except MalformedMessageError as error:
                return f"{kind} that {way.origin} is said to have sent: {error.what}"
        if isinstance(message, OfDataNodes) and not is_data:
            who = "a volunteer" if way is None else f"{name_of(way.origin)}, a volunteer"
            return f"{kind} of {who}"
        return ""

    def _see(self, caller: Caller) -> None:
        """Remember when a member's certificate ends."""
        if len(self.expiries) >= _EXPIRIES_MAX:
            self.expiries.clear()
        self.expiries[caller.node_id] = caller.expires_s

    async def _serve_tensors(self, connection: socket.socket, peer: str) -> None:
        """Take tensors over a connection until it ends."""
        pipe = TlsPipe(connection, self._tls_context())
        caller = TensorCaller(peer)
        try:
            async with asyncio.timeout(self._limits.handshake_timeout_s):
                caller.certificate = await pipe.shake_hands()
            receiver = TensorReceiver(pipe, self._limits)
            while True:
                size = await receiver.head()
                if not await self._take_tensor(receiver, size, caller):
                    return
        except MalformedMessageError as error:
            self._door.blame("message.malformed", caller, error.what)
        except TimeoutError:
            if caller.certificate:
                self._door.note("rpc.failed", caller, "TimeoutError")
        finally:
            pipe.close()

    def _tls_context(self) -> ssl.SSLContext:
        shown = self._shown()
        if self._tls is None or self._tls[0] != shown:
            self._tls = shown, server_context(shown)
        return self._tls[1]

    async def _take_tensor(
        self, receiver: TensorReceiver, header_size: int, caller: TensorCaller
    ) -> bool:
        """Take a tensor; return whether the caller may send another one."""
        assert self._called is not None
        refusal = self._called.refusal(caller)
        source = host_of(caller), proven_id(caller), channel.TENSOR_SERVICE
        if not refusal and not self._door.enter(*source):
            await receiver.refuse(channel.TOO_MANY)
            return False
        if refusal:
            await receiver.refuse(refusal)
            return False
        self._door.know(caller)
        try:
            head = await receiver.header(header_size)
            state = await self._receive_tensor(receiver, head, caller)
        except TimeoutError:
            if not receiver.probes and (who := caller_in(caller)) is not None:
                self._handler.tensor_late(who.node_id)
            raise
        finally:
            self._door.leave(*source)
        if state is not None:
            await receiver.result(state)
        return True

    async def _receive_tensor(
        self, receiver: TensorReceiver, head: bytes, caller: TensorCaller
    ) -> tensor_pb2.TensorResult | None:
        """Return how a tensor ended. None: its sender has been told already."""
        result = await self._result(partial(read_header, receiver=self._node_id), head)
        async with self._turns:
            header = self._checked(result, caller, len(head))
        if header is None or not self._is_heard(header.decoded, caller, with_tensor=True):
            # Nobody knows how much follows.
            await receiver.result(tensor_pb2.TENSOR_RESULT_MALFORMED)
            raise ConnectionAbortedError("a tensor without a header that can be read")
        decoded = header.decoded
        tensor = self._begun(head, header)
        if tensor is None:
            reason = f"{type(decoded.message).__name__} of {header.size_bytes} bytes"
            if self._handler.stopped:
                host = host_of(caller)
                _log.debug("tensor.refused %s: %s, as this node has ended", host, reason)
            else:
                self._door.note("tensor.refused", caller, reason)
            await receiver.result(tensor_pb2.TENSOR_RESULT_REFUSED)
            intake, lane = self._handler.intake, lane_of(decoded.message)
            await receiver.skip(header.size_bytes, lambda num: intake.wait(num, lane))
            return None
        try:
            whole = await self._fill(receiver, tensor, lane_of(decoded.message))
        except (MalformedMessageError, TimeoutError):
            tensor.region.release()
            raise
        except BaseException:
            self._broken.keep(head, tensor)
            raise
        if not whole:
            self._broken.keep(head, tensor)
            return tensor_pb2.TENSOR_RESULT_MALFORMED
        if not tensor.intact:
            tensor.region.release()
            self._door.note("tensor.corrupted", caller, "its checksum does not hold")
            return tensor_pb2.TENSOR_RESULT_CORRUPTED
        self._handler.tensor_arrived(decoded, tensor.region)
        return tensor_pb2.TENSOR_RESULT_RECEIVED

    def _begun(self, head: bytes, header: Header) -> IncomingTensor | None:
        """Return the beginning of a tensor: what has arrived of it before, or memory for it."""
        if (broken := self._broken.take(head)) is not None:
            return broken
        if not 0 <= header.size_bytes <= self._limits.tensor_size_max_bytes:
            return None
        region = self._handler.allocate(header.decoded, header.size_bytes)
        if region is None:
            return None
        return IncomingTensor(
            region,
            size_bytes=header.size_bytes,
            crc32=header.crc32,
            watch=self._watch,
        )

    async def _fill(self, receiver: TensorReceiver, tensor: IncomingTensor, lane: Lane) -> bool:
        """Receive the rest of a tensor, no faster than the node's download cap allows."""
        intake = self._handler.intake

        async def arrived(num_bytes: int) -> None:
            tensor.arrived(num_bytes)
            await intake.wait(num_bytes, lane)

        if not receiver.resumes:
            tensor.begin_again()
        async with asyncio.timeout(self._limits.stream_timeout_s(tensor.size_bytes)):
            return await receiver.fill(tensor.region.view, tensor.position, arrived)

    async def _hello(self, data: bytes, context: Context) -> bytes:
        request = codec.parse(enroll_pb2.HelloRequest, data)
        response = enroll_pb2.HelloResponse(protocol_version=PROTOCOL_VERSION, run_id=self._run_id)
        # Check the version first: the other fields of another version may mean something else.
        if request.protocol_version != PROTOCOL_VERSION:
            response.refusal = enroll_pb2.HELLO_REFUSAL_VERSION_DIFFERS
            return response.SerializeToString()
        checked = _checked_hello(request, context)
        if checked.run_id not in (None, self._run_id):
            response.refusal = enroll_pb2.HELLO_REFUSAL_RUN_DIFFERS
            return response.SerializeToString()
        checked = replace(checked, observed_address=ip_of(context))
        async with self._turns:
            info = self._handler.hello(checked)
        if info is None:
            response.refusal = enroll_pb2.HELLO_REFUSAL_NOT_READY
            return response.SerializeToString()
        found = Found()
        if checked.sender is not None and checked.sender_address:
            found = await self._handler.dial_back(checked)
        if found.twin_address:
            response.refusal = enroll_pb2.HELLO_REFUSAL_IDENTITY_SHARED
            response.twin_address = found.twin_address
            return response.SerializeToString()
        response.manifest_json = info.manifest_json
        response.leader_id = info.leader or ""
        response.leader_address = info.leader_address if info.leader else ""
        response.observed_address = checked.observed_address
        response.node_id = info.node_id
        response.charter.CopyFrom(statement_message(info.charter))
        response.unreached = validate.clip_reason(found.unreached)
        bans = self._membership.bans
        if checked.bans is not None and checked.bans < bans.version:
            response.bans = bans.present.statement
        response.clock_ms = int(wall_clock() * 1000)
        response.start = self._membership.host.start
        return response.SerializeToString()

    async def _read_status(self, data: bytes, context: Context) -> bytes:
        request = codec.parse(state_pb2.ReadStatusRequest, data)
        run_id = validate.run_id("run_id", request.run_id)
        require_caller("sender_id", request.sender_id, context)
        if run_id != self._run_id:
            self._door.blame("message.foreign", context, f"run {run_id}")
            return state_pb2.ReadStatusResponse().SerializeToString()
        async with self._turns:
            status = self._handler.status()
        return state_pb2.ReadStatusResponse(status_json=status).SerializeToString()

    async def _read_receipt(self, data: bytes, context: Context) -> bytes:
        request = codec.parse(state_pb2.ReadReceiptRequest, data)
        caller = require_caller("sender_id", request.sender_id, context)
        response = state_pb2.ReadReceiptResponse()
        if validate.run_id("run_id", request.run_id) != self._run_id:
            self._door.blame("message.foreign", context, f"run {request.run_id}")
        elif self._receipt_of is not None:
            answer = self._receipt_of(caller)
            response.iteration = answer.iteration
            if answer.receipt is not None:
                response.receipt.CopyFrom(statement_message(answer.receipt))
        return response.SerializeToString()


def _checked_hello(request: enroll_pb2.HelloRequest, context: Context) -> HelloRequest:
    address = request.sender_address
    sender = request.sender_id
    caller = caller_in(context)
    member = caller is not None and caller.purpose is Purpose.PEER
    if (sender or address) and not member:
        # Nobody is dialled back who is no member.
        raise validate.malformed("sender_id", sender, allowed="none: the caller is no member")
    twin = request.twin_address if sender else ""
    return HelloRequest(
        run_id=validate.run_id("run_id", request.run_id) if request.run_id else None,
        sender=require_caller("sender_id", sender, context) if sender else None,
        sender_address=validate.address("sender_address", address) if address else "",
        bans=validate.number("bans", request.bans) if request.HasField("bans") and member else None,
        start=validate.number("start", request.start) if sender else 0,
        twin_address=validate.address("twin_address", twin) if twin else "",
    )
