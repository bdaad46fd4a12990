"""The server of a node. Checks each incoming message and tensor, then hands it to a `PeerHandler`.

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

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import grpc
import grpc.aio

from decod.clocks import Stopwatch, wall_clock
from decod.errors import NetworkError
from decod.ids import NodeId, RunId
from decod.membership.certificates import Caller, Purpose, TlsIdentity
from decod.membership.credential import statement_message
from decod.membership.papers import Membership
from decod.membership.receipts import ReceiptAnswer
from decod.membership.registrar import Registrar
from decod.net import channel
from decod.net.address import join_address
from decod.net.ask import Found, HelloInfo, HelloRequest
from decod.net.block_transfer import BlockGiver, BlockReader
from decod.net.calls import Calls, Who
from decod.net.donor import StateBlob, StateDonor, StateRequest
from decod.net.door import (
    Context,
    Door,
    caller_in,
    ip_of,
    require_caller,
)
from decod.net.enrolment import EnrollmentGiver, RegisterKeeper
from decod.net.front_door import FrontDoor
from decod.net.net_limits import LIMITS, Counters, Limits
from decod.net.rate_caps import Pace, Paces
from decod.net.reading import MessageReader
from decod.net.reverse_keeper import ReverseKeeper
from decod.net.storing import PartWriter
from decod.net.tensor_intake import TensorHandler, TensorIntake
from decod.run.protocol_config import PROTOCOL_VERSION
from decod.wire import codec, validate
from decod.wire.codec import envelopes_of, read_envelope
from decod.wire.v1 import control_pb2, enroll_pb2, state_pb2

_log = logging.getLogger(__name__)


class PeerHandler(TensorHandler, Protocol):
    """The driver as the server sees it. All but `dial_back` and `state` must return at once."""

    pace: Pace
    """Caps the rate at which states and blocks of data leave."""

    def deliver(self, received: codec.Decoded) -> None:
        """Take a control message."""

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
        self._tensors: TensorIntake | None = None
        self.counters = Counters()
        """Counts by the peer's IP address: `message.malformed`, `message.foreign`,
        `message.forged`, `tensor.refused`, `tensor.corrupted`, `tensor.broken`, `rpc.failed`,
        `caller.refused`, `peer.dropped`, `connection.refused`: a connection over which no call
        came."""
        self._door = Door(run_id, self.counters, limits)
        self.on_fault = self._door.on_fault
        """Called with each event that is counted."""
        self._reader = MessageReader(membership, run_id, self._door, limits, self._watch)
        self.expiries = self._reader.expiries
        """The instants when the certificates end that other members have shown, in seconds of the
        Unix epoch."""
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
        calls = self._calls()
        server.add_generic_rpc_handlers((calls,))
        tensors = TensorIntake(self._handler, self._door, calls, self._reader, self._shown)
        calls_port = server.add_secure_port("127.0.0.1:0", channel.server_credentials(self._shown))
        front = FrontDoor(self._limits, self._door, tensors.serve)
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
        self._server, self._front, self._tensors = server, front, tensors
        self._reader.open()
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
        if self._tensors is not None:
            self._tensors.close()
            self._tensors = None
        self._reader.close()
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
            result = await self._reader.result(read, envelope)
            async with self._reader.turns:
                decoded = self._reader.checked(result, context, len(envelope))
                if decoded is None or not self._reader.is_heard(decoded, context):
                    num_dropped += 1
                else:
                    self._handler.deliver(decoded)
        return control_pb2.DeliverResponse(num_dropped=num_dropped).SerializeToString()

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
        async with self._reader.turns:
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
        async with self._reader.turns:
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
