"""Two nodes on loopback sockets, with fakes of their drivers."""

import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from decod.driver.event_loop import run_loop
from decod.ids import FlowId, Iteration, MicrobatchId, NodeId, RunId
from decod.membership.certificates import MEMBER_NAME
from decod.membership.papers import Membership
from decod.membership.receipts import ReceiptAnswer
from decod.membership.statements import new_charter
from decod.net import channel
from decod.net.ask import Found, HelloInfo, HelloRequest
from decod.net.client import PeerClient
from decod.net.donor import StateBlob, StateRequest
from decod.net.net_limits import LIMITS, Limits
from decod.net.rate_caps import UNLIMITED, Pace
from decod.net.server import PeerServer
from decod.net.stream import IncomingRegion
from decod.protocol.core import messages as m
from decod.protocol.core.events import SendFailed, TensorSent
from decod.wire import codec
from decod.wire.v1 import tensor_pb2
from tests.support.members import data_node
from tests.support.sending import Sending, sending_to

RUN = RunId("r" * 26)
OURS = channel.run_metadata(RUN)
MEMBERS = {
    each.node_id: each for each in (data_node("alice"), data_node("bob"), data_node("carol"))
}
ALICE, BOB, CAROL = MEMBERS
ITERATION = Iteration(1, 1)
MICROBATCH = MicrobatchId(1, 0, 0)
FLOW = FlowId(ALICE, 0)
ACTIVATION = m.ForwardActivation(ITERATION, MICROBATCH, FLOW, (NodeId("r" * 52),))


def open_to(address: str, limits: Limits = LIMITS, by: Membership | None = None) -> Any:
    """Opens a channel to any member, as Alice or somebody else."""
    return channel.open_channel(address, limits, (by or MEMBERS[ALICE]).tls, MEMBER_NAME)


def no_receipts(_: NodeId) -> ReceiptAnswer:
    """Answers as a data node that has counted nothing."""
    return ReceiptAnswer(None, 0)


class FakeRegion:
    """Memory for a tensor. Counts the host's releases."""

    def __init__(self, host: "Host", size_bytes: int) -> None:
        self._host = host
        self.view = memoryview(bytearray(size_bytes))

    def release(self) -> None:
        self._host.num_given_back += 1


class Host:
    """Fakes the driver: keeps what it is told."""

    def __init__(self, pace: Pace = UNLIMITED) -> None:
        self.pace, self.intake = pace, UNLIMITED
        self.received: list[codec.Decoded] = []
        self.delivered: list[tuple[NodeId, int, m.Message]] = []
        self.arrived: list[tuple[NodeId, m.Message, bytes]] = []
        self.num_allocated = 0
        self.num_given_back = 0
        self.refuse_tensors = False
        self.stopped = False
        self.sent: list[tuple[NodeId, m.Message, object, int]] = []
        self.failed: list[tuple[NodeId, m.Message, object, str]] = []
        self.latencies_s: list[float] = []
        self.hellos: list[HelloRequest] = []
        self.info: HelloInfo | None = HelloInfo(
            run_id=RUN,
            manifest_json="{}",
            charter=new_charter(data_node("alice"), RUN, "{}"),
            node_id=BOB,
            leader=ALICE,
            leader_address="h:1",
        )
        self.blob: StateBlob | str = "not here"
        self.found = Found()
        self.late: list[NodeId] = []
        self.on_deliver: Callable[[m.Message], None] = lambda _message: None

    def deliver(self, received: codec.Decoded) -> None:
        self.on_deliver(received.message)
        self.received.append(received)
        self.delivered.append((received.sender, received.term, received.message))

    def allocate(self, received: codec.Decoded, size_bytes: int) -> IncomingRegion | None:
        if self.refuse_tensors:
            return None
        self.num_allocated += 1
        return FakeRegion(self, size_bytes)

    def tensor_arrived(self, received: codec.Decoded, region: IncomingRegion) -> None:
        assert received.term >= 1
        self.received.append(received)
        self.arrived.append((received.sender, received.message, bytes(region.view)))

    def tensor_late(self, sender: NodeId) -> None:
        self.late.append(sender)

    def hello(self, request: HelloRequest) -> HelloInfo | None:
        self.hellos.append(request)
        return self.info

    async def dial_back(self, request: HelloRequest) -> Found:
        return self.found

    def status(self) -> str:
        return '{"members":2}'

    async def state(self, request: StateRequest) -> StateBlob | str:
        return self.blob

    def on_tensor_sent(self, sent: TensorSent, message: m.Message) -> None:
        self.sent.append((sent.to, message, sent.tensor, sent.size_bytes))

    def on_send_failed(self, failed: SendFailed) -> None:
        self.failed.append((failed.to, failed.message, failed.tensor, failed.reason))

    def on_latency(self, to: NodeId, seconds: float) -> None:
        self.latencies_s.append(seconds)


class Pair:
    """Alice, who calls, and Bob, who listens."""

    def __init__(self, limits: Limits, bob: Host | None = None) -> None:
        self.alice, self.bob = Host(), bob or Host()
        self.server = PeerServer(MEMBERS[BOB], RUN, self.bob, limits=limits)
        self.client = PeerClient(MEMBERS[ALICE], RUN, self.alice, limits=limits)
        self.address = ""

    def sending(self) -> AbstractAsyncContextManager[Sending]:
        """A connection for tensors to Bob, by Alice."""
        return sending_to(self.address, MEMBERS[ALICE].tls)


@asynccontextmanager
async def pair(limits: Limits | None = None, bob: Host | None = None) -> AsyncIterator[Pair]:
    both = Pair(limits or Limits(), bob)
    port = await both.server.start("127.0.0.1", 0)
    both.address = f"127.0.0.1:{port}"
    both.client.set_address(BOB, both.address)
    try:
        yield both
    finally:
        await both.client.close()
        await both.server.stop(None)


def with_pair(
    test: Callable[[Pair], Awaitable[None]],
    limits: Limits | None = None,
    *,
    bob: Host | None = None,
) -> None:
    async def run() -> None:
        async with pair(limits, bob) as both:
            await test(both)

    run_loop(run())


def header(**changes: Any) -> bytes:
    envelope = codec.encode(RUN, ALICE, 1, 1, ACTIVATION)
    fields: dict[str, Any] = {"envelope": envelope, "size_bytes": 4, "crc32": zlib.crc32(b"good")}
    return tensor_pb2.TensorHeader(**{**fields, **changes}).SerializeToString()
