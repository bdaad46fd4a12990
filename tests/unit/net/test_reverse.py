"""Members that nobody can dial: connections over calls that they hold open, and abuse of those."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest

from decod.driver.event_loop import run_loop
from decod.ids import NodeId
from decod.membership.papers import Membership
from decod.net import channel
from decod.net.client import PeerClient
from decod.net.net_limits import Limits
from decod.net.rate_caps import Pace, Paces
from decod.net.reverse_dialer import ReverseDialer
from decod.net.reverse_holder import ReverseHolder, source_of
from decod.net.reverse_keeper import PIECE_MAX_BYTES, ReverseKeeper
from decod.net.server import PeerServer
from decod.net.stream import data_frame
from decod.protocol.core import messages as m
from decod.wire.v1 import reverse_pb2
from tests.support.members import data_node, volunteer
from tests.support.peers import ACTIVATION, RUN, Host, open_to
from tests.waiting import wait_until

NODES = {each.node_id: each for each in (data_node("bob"), volunteer("ann"), volunteer("amy"))}
BOB, ANN, AMY = NODES
"""Bob can be dialled. Nobody can dial Ann and Amy."""
LIMITS = Limits(
    hold_pause_s=0.05,
    hold_wait_s=0.05,
    reverse_open_timeout_s=2.0,
    reverse_handshake_timeout_s=2.0,
)
TERM = 1


class Node:
    """One node with fakes of its driver, and all that it needs to be reached."""

    def __init__(self, membership: Membership, limits: Limits, paces: Paces | None = None) -> None:
        self.id, self.host = membership.node_id, Host()
        if paces is not None:
            self.host.pace, self.host.intake = paces.upload, paces.download
        self.server = PeerServer(membership, RUN, self.host, limits=limits)
        self.client = PeerClient(membership, RUN, self.host, limits=limits)
        self.hosts: list[tuple[NodeId, str]] = []
        self.dialer = ReverseDialer(membership, RUN, lambda _: self.hosts, limits)
        self.holder = ReverseHolder(membership, RUN, self.client.address_of, limits)
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def close(self) -> None:
        await self.client.close()
        await self.holder.close()
        await self.dialer.close()
        await self.server.stop(None)


@asynccontextmanager
async def living(limits: Limits = LIMITS) -> AsyncIterator[dict[NodeId, Node]]:
    """Bob, to whom Ann and Amy hold calls open."""
    nodes = {node: Node(membership, limits) for node, membership in NODES.items()}
    bob = nodes[BOB]
    try:
        for node in nodes.values():
            node.port = await node.server.start("127.0.0.1", 0)
        bob.dialer.start(bob.server.reverse)
        bob.server.reverse.start(passes_on=True)
        for hidden in (nodes[ANN], nodes[AMY]):
            hidden.client.set_address(BOB, bob.address)
            hidden.hosts = [(BOB, bob.address)]
            hidden.holder.start(("127.0.0.1", hidden.port))
            assert await hidden.holder.held(BOB, 5.0)
        yield nodes
    finally:
        for node in nodes.values():
            await node.close()


def with_nodes(
    test: Callable[[dict[NodeId, Node]], Awaitable[None]], limits: Limits = LIMITS
) -> None:
    async def run() -> None:
        async with living(limits) as nodes:
            await test(nodes)

    run_loop(run())


async def heard(node: Node, message: m.Message, sender: NodeId) -> None:
    await wait_until(lambda: (sender, TERM, message) in node.host.delivered, timeout_s=10.0)


def test_messages_and_tensors_reach_a_member_over_the_call_that_it_holds_open() -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        bob, ann = nodes[BOB], nodes[ANN]
        bob.client.set_address(ANN, bob.dialer.address_of(ANN))
        bob.client.send(ANN, TERM, m.Pong(7))
        await heard(ann, m.Pong(7), BOB)
        data = secrets.token_bytes(5 << 20)
        bob.client.send_tensor(ANN, TERM, ACTIVATION, memoryview(data), "token")
        await wait_until(lambda: ann.host.arrived, timeout_s=20.0)
        assert ann.host.arrived == [(BOB, ACTIVATION, data)]
        await wait_until(lambda: bob.host.sent, timeout_s=5.0)
        assert bob.host.sent == [(ANN, ACTIVATION, "token", len(data))]
        probed = await bob.client.probe(ANN, TERM, 1 << 16)
        assert probed is not None
        assert probed.bandwidth_bytes_per_s > 0
        assert not bob.dialer.goes_round(ANN)
        assert bob.server.reverse.num_passed_bytes == 0

    with_nodes(test)


def test_two_members_that_nobody_can_dial_talk_by_way_of_a_host_in_between() -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        ann, amy, bob = nodes[ANN], nodes[AMY], nodes[BOB]
        amy.client.set_address(ANN, amy.dialer.address_of(ANN))
        data = secrets.token_bytes(3 << 20)
        amy.client.send_tensor(ANN, TERM, ACTIVATION, memoryview(data), 1)
        await wait_until(lambda: ann.host.arrived, timeout_s=20.0)
        assert ann.host.arrived == [(AMY, ACTIVATION, data)]
        assert amy.dialer.goes_round(ANN)
        assert bob.server.reverse.num_passed_bytes > len(data)
        assert not bob.host.received, "a host in between reads nothing"

    with_nodes(test)


@pytest.mark.parametrize("capped", ["upload", "download"])
def test_caps_hold_for_what_is_passed_on(capped: str) -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        ann, amy = nodes[ANN], nodes[AMY]
        slow = Node(data_node("ben"), LIMITS, Paces(**{capped: Pace(4 << 20)}))
        slow.port = await slow.server.start("127.0.0.1", 0)
        slow.server.reverse.start(passes_on=True)
        try:
            ann.client.set_address(slow.id, slow.address)
            assert await ann.holder.held(slow.id, 5.0)
            amy.hosts = [(slow.id, slow.address)]
            amy.client.set_address(ANN, amy.dialer.address_of(ANN))
            begin_s, data = asyncio.get_running_loop().time(), bytes(2 << 20)
            amy.client.send_tensor(ANN, TERM, ACTIVATION, memoryview(data), 1)
            await wait_until(lambda: ann.host.arrived, timeout_s=20.0)
            assert asyncio.get_running_loop().time() - begin_s > 0.4
        finally:
            await slow.close()

    with_nodes(test)


@pytest.mark.parametrize("lie", ["stall", "garbage", "close"])
def test_a_host_in_between_that_passes_nothing_on_is_asked_last(
    monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    honest = ReverseKeeper._connect

    async def connect(self: ReverseKeeper, context: Any) -> None:
        if self not in liars:
            await honest(self, context)
            return
        await self._head(context)
        await context.write(reverse_pb2.ConnectResponse(connected=True).SerializeToString())
        if lie == "garbage":
            await context.write(data_frame(memoryview(b"x" * 1000)))
        if lie != "close":
            await asyncio.Event().wait()

    async def test(nodes: dict[NodeId, Node]) -> None:
        ann, amy, bob = nodes[ANN], nodes[AMY], nodes[BOB]
        liar = Node(data_node("lou"), LIMITS)
        liar.port = await liar.server.start("127.0.0.1", 0)
        liar.server.reverse.start(passes_on=True)
        liars.add(liar.server.reverse)
        try:
            amy.hosts = [(liar.id, liar.address), (BOB, bob.address)]
            amy.client.set_address(ANN, amy.dialer.address_of(ANN))
            amy.client.send(ANN, TERM, m.Pong(7))
            await wait_until(lambda: (AMY, TERM, m.Pong(7)) in ann.host.delivered, timeout_s=60.0)
            assert bob.server.reverse.num_passed_bytes > 0
        finally:
            await liar.close()

    liars = set[ReverseKeeper]()
    monkeypatch.setattr(ReverseKeeper, "_connect", connect)
    with_nodes(test)


def test_what_is_sent_while_the_host_in_between_is_lost_goes_by_way_of_the_next() -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        ann, amy = nodes[ANN], nodes[AMY]
        other = Node(data_node("ben"), LIMITS)
        other.port = await other.server.start("127.0.0.1", 0)
        other.server.reverse.start(passes_on=True)
        try:
            amy.client.set_address(ANN, amy.dialer.address_of(ANN))
            amy.client.send(ANN, TERM, m.Pong(1))
            await heard(ann, m.Pong(1), AMY)
            ann.client.set_address(other.id, other.address)
            assert await ann.holder.held(other.id, 5.0)
            amy.hosts.append((other.id, other.address))
            await nodes[BOB].server.stop(None)
            amy.client.send(ANN, TERM, m.Pong(2))
            await heard(ann, m.Pong(2), AMY)
            assert other.server.reverse.num_passed_bytes > 0
            assert not amy.host.failed
        finally:
            await other.close()

    with_nodes(test)


def test_a_member_holds_its_call_again_when_the_peer_is_back() -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        bob, ann = nodes[BOB], nodes[ANN]
        await bob.server.stop(None)
        await wait_until(lambda: ann.holder.num_held == 0, timeout_s=10.0)
        await bob.server.start("127.0.0.1", bob.port)
        await wait_until(lambda: ann.holder.num_held == 1, timeout_s=20.0)
        assert bob.server.reverse.holds(ANN)

    with_nodes(test)


def test_an_old_call_is_made_anew() -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        bob = nodes[BOB]
        seen: list[NodeId] = []
        bob.server.reverse.start(passes_on=True, on_held=seen.append)
        await wait_until(lambda: seen.count(ANN) >= 2, timeout_s=20.0)

    with_nodes(test, replace(LIMITS, hold_age_max_s=0.2))


def test_renewed_papers_are_shown_at_once() -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        bob, ann = nodes[BOB], nodes[ANN]
        seen: list[NodeId] = []
        bob.server.reverse.start(passes_on=True, on_held=seen.append)
        ann.holder.renew()
        await wait_until(lambda: ANN in seen, timeout_s=10.0)

    with_nodes(test)


def test_a_member_keeps_calls_to_those_that_it_dealt_with_last() -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        ann, bob = nodes[ANN], nodes[BOB]
        ann.client.set_address(AMY, nodes[AMY].address)
        assert await ann.holder.held(AMY, 5.0)
        await wait_until(lambda: not bob.server.reverse.holds(ANN), timeout_s=10.0)
        assert nodes[AMY].server.reverse.holds(ANN)

    with_nodes(test, replace(LIMITS, holds_kept_max=1))


# --- abuse ----------------------------------------------------------------------------------------


def reverse(opened: Any, method: str) -> Any:
    path = f"/{channel.REVERSE_SERVICE}/{method}"
    kind = opened.unary_stream if method == "Hold" else opened.stream_stream
    return kind(path, channel.as_is, channel.as_is)


async def code_of(call: Any) -> grpc.StatusCode:
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    return code


OURS = channel.run_metadata(RUN)


def test_nobody_can_take_the_connection_of_another_member() -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        bob = nodes[BOB]
        keeper = bob.server.reverse
        told = open_to(bob.address, by=NODES[ANN])
        hold = reverse(told, "Hold")(b"", metadata=OURS)
        # This Hold takes the place of the one that the member's own node keeps.
        assert reverse_pb2.HoldResponse.FromString(await hold.read()).connection_id == b""
        opening = asyncio.create_task(keeper.open(ANN))
        wanted = reverse_pb2.HoldResponse.FromString(await hold.read())
        thief = open_to(bob.address, by=NODES[AMY])
        stolen = reverse(thief, "Carry")(None, metadata=OURS)
        head = reverse_pb2.CarryRequest(connection_id=wanted.connection_id)
        await stolen.write(head.SerializeToString())
        assert await code_of(stolen) is grpc.StatusCode.INVALID_ARGUMENT
        assert not opening.done()
        own = reverse(told, "Carry")(None, metadata=OURS)
        await own.write(head.SerializeToString())
        pipe = await opening
        assert pipe is not None
        await own.write(data_frame(memoryview(b"mine")))
        assert bytes(await pipe.read()) == b"mine"
        # An id serves once.
        again = reverse(told, "Carry")(None, metadata=OURS)
        await again.write(head.SerializeToString())
        assert await code_of(again) is grpc.StatusCode.NOT_FOUND
        await pipe.close()
        await told.close()
        await thief.close()
        assert bob.server.counters.totals()["message.malformed"] == 1

    # Otherwise the member's own node makes its Hold anew meanwhile.
    with_nodes(test, replace(LIMITS, hold_pause_s=60.0, hold_pause_max_s=60.0))


@pytest.mark.parametrize(
    ("goal", "passes_on", "code"),
    [
        ("z" * 52, True, grpc.StatusCode.NOT_FOUND),
        ("not an id", True, grpc.StatusCode.INVALID_ARGUMENT),
        ("", True, grpc.StatusCode.INVALID_ARGUMENT),
        ("x" * 4096, True, grpc.StatusCode.INVALID_ARGUMENT),
        (str(ANN), False, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_a_connection_that_must_not_be_is_refused(
    goal: str, passes_on: bool, code: grpc.StatusCode
) -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        bob = nodes[BOB]
        bob.server.reverse.start(passes_on=passes_on)
        opened = open_to(bob.address, by=NODES[AMY])
        call = reverse(opened, "Connect")(None, metadata=OURS)
        await call.write(reverse_pb2.ConnectRequest(goal=goal).SerializeToString())
        assert await code_of(call) is code
        await opened.close()

    with_nodes(test)


def test_a_stranger_to_the_run_is_refused() -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        opened = open_to(nodes[BOB].address, by=NODES[AMY])
        other = channel.run_metadata("q" * 26)  # type: ignore[arg-type]
        for method in ("Hold", "Carry", "Connect"):
            call = (
                reverse(opened, method)(b"", metadata=other)
                if method == "Hold"
                else reverse(opened, method)(None, metadata=other)
            )
            assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION, method
        await opened.close()

    with_nodes(test)


@pytest.mark.parametrize(
    "piece",
    [data_frame(memoryview(bytes(PIECE_MAX_BYTES + 64))), b"", b"\x0a\x01x", b"\xff" * 9],
    ids=["too long", "empty", "another field", "no message"],
)
def test_a_bad_piece_ends_the_connection_and_is_counted(piece: bytes) -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        bob = nodes[BOB]
        opened = open_to(bob.address, by=NODES[AMY])
        call = reverse(opened, "Connect")(None, metadata=OURS)
        await call.write(reverse_pb2.ConnectRequest(goal=ANN).SerializeToString())
        assert reverse_pb2.ConnectResponse.FromString(await call.read()).connected
        await call.write(piece)
        assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert bob.server.counters.totals()["message.malformed"] == 1
        await opened.close()

    with_nodes(test)


def test_a_flood_of_connections_is_bounded() -> None:
    limits = replace(LIMITS, passed_max=3)

    async def test(nodes: dict[NodeId, Node]) -> None:
        bob = nodes[BOB]
        opened = open_to(bob.address, by=NODES[AMY])
        calls = []
        for _ in range(3):
            call = reverse(opened, "Connect")(None, metadata=OURS)
            await call.write(reverse_pb2.ConnectRequest(goal=ANN).SerializeToString())
            assert reverse_pb2.ConnectResponse.FromString(await call.read()).connected
            calls.append(call)
        one_more = reverse(opened, "Connect")(None, metadata=OURS)
        await one_more.write(reverse_pb2.ConnectRequest(goal=ANN).SerializeToString())
        assert await code_of(one_more) is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls.pop().cancel()

        async def room() -> bool:
            again = reverse(opened, "Connect")(None, metadata=OURS)
            await again.write(reverse_pb2.ConnectRequest(goal=ANN).SerializeToString())
            return isinstance(await again.read(), bytes)

        async with asyncio.timeout(10.0):
            while True:
                try:
                    assert await room()
                    break
                except grpc.aio.AioRpcError:
                    continue
        await opened.close()

    with_nodes(test, limits)


def test_few_members_may_hold_calls_open() -> None:
    """Ann and Amy hold theirs, and a third has no place."""

    async def test(nodes: dict[NodeId, Node]) -> None:
        bob = nodes[BOB]
        opened = open_to(bob.address, by=volunteer("abe"))
        call = reverse(opened, "Hold")(b"", metadata=OURS)
        assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert bob.server.reverse.num_holds == 2
        await opened.close()

    with_nodes(test, replace(LIMITS, holds_max=2))


def test_a_node_that_asks_for_many_connections_gets_few() -> None:
    """A peer that floods a member with wishes costs it no more than its number of calls."""
    limits = replace(LIMITS, reverse_calls_per_node_max=2, reverse_open_timeout_s=0.5)

    async def test(nodes: dict[NodeId, Node]) -> None:
        keeper = nodes[BOB].server.reverse
        pipes = await asyncio.gather(*(keeper.open(ANN) for _ in range(8)))
        # One call is the Hold itself.
        assert 1 <= len([pipe for pipe in pipes if pipe is not None]) <= 2

    with_nodes(test, limits)


def test_a_banned_member_keeps_no_connection() -> None:
    async def test(nodes: dict[NodeId, Node]) -> None:
        bob = nodes[BOB]
        opened = open_to(bob.address, by=NODES[AMY])
        call = reverse(opened, "Connect")(None, metadata=OURS)
        await call.write(reverse_pb2.ConnectRequest(goal=ANN).SerializeToString())
        assert reverse_pb2.ConnectResponse.FromString(await call.read()).connected
        bob.server.reverse.cut(AMY)
        # At once, for it makes the call anew soon: nobody has told it that it is banned.
        assert not bob.server.reverse.holds(AMY)
        while await call.read() is not grpc.aio.EOF:
            pass
        assert bob.server.reverse.holds(ANN)
        await opened.close()

    with_nodes(test)


def test_each_peer_has_a_loopback_address_of_its_own() -> None:
    sources = {source_of(node) for node in (ANN, AMY, BOB)}
    assert len(sources) == 3
    assert all(source.startswith("127.") for source in sources)


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff", reverse_pb2.HoldResponse(connection_id=b"x" * 64)]
)
def test_a_peer_that_says_nonsense_on_a_held_call_harms_nobody(garbage: Any) -> None:
    """The member makes the call anew, after a pause, or makes a call that the peer refuses."""
    data = garbage if isinstance(garbage, bytes) else garbage.SerializeToString()

    async def test(nodes: dict[NodeId, Node]) -> None:
        bob, ann = nodes[BOB], nodes[ANN]
        keeper = bob.server.reverse

        async def tell(hold: Any, context: Any) -> None:
            for _ in range(100):
                await context.write(data)
            await asyncio.Event().wait()

        honest, keeper._tell = keeper._tell, tell  # type: ignore[method-assign]
        ann.holder.renew()
        again = asyncio.Event()
        keeper.start(passes_on=True, on_held=lambda node: again.set() if node == ANN else None)
        await asyncio.wait_for(again.wait(), 10.0)
        keeper._tell = honest  # type: ignore[method-assign]
        ann.holder.renew()

        async def opened() -> bool:
            pipe = await keeper.open(ANN)
            return pipe is not None

        async with asyncio.timeout(20.0):
            while not await opened():
                await keeper.wait_held(ANN, 1.0)

    with_nodes(test)
