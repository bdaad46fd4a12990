"""Strangers at the door: what is refused before it is read, and who loses the connection."""

import asyncio
from collections.abc import Awaitable
from itertools import pairwise

import grpc
import grpc.aio
import pytest

from decod.ids import NodeId, RunId
from decod.net import channel
from decod.net.ask import HelloRequest, hello
from decod.net.channel import UnansweredError
from decod.net.door import Connection, Door, plain_ip
from decod.net.net_limits import Counters, Limits, RateLimiter
from decod.net.reading import Turns
from decod.protocol.core import messages as m
from decod.wire import codec
from decod.wire.v1 import control_pb2
from tests.support.peers import ALICE, BOB, MEMBERS, OURS, RUN, Pair, open_to, with_pair
from tests.support.wire_shapes import DELIVER, REQUESTS, field
from tests.waiting import wait_until

HELLO = f"/{channel.ENROLL_SERVICE}/Hello"
GARBAGE = field(1, b"\xff")
SENDER = ALICE


def batch(*messages: m.Message) -> bytes:
    envelopes = [codec.encode(RUN, SENDER, 1, 1, message) for message in messages]
    return control_pb2.DeliverRequest(envelopes=envelopes).SerializeToString()


def pings(num: int) -> list[m.Message]:
    return [m.Ping(nonce) for nonce in range(num)]


def large(nonce: int) -> m.Message:
    """Returns a message that is too large to be read within the event loop."""
    nodes = tuple(
        NodeId(a + b + "a" * 50) for a in "abcdefgh" for b in "abcdefghijklmnopqrstuvwxyz"
    )
    return m.Differs(nonce, nodes)


async def status_of(call: Awaitable[bytes]) -> tuple[grpc.StatusCode, str]:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("method", [method for method in REQUESTS if method != HELLO])
@pytest.mark.parametrize("run_id", [None, RunId("x" * 26)])
def test_a_call_that_does_not_name_the_run_is_refused_before_its_body_comes(
    method: str, run_id: RunId | None
) -> None:
    async def test(both: Pair) -> None:
        async with open_to(both.address) as opened:
            metadata = channel.run_metadata(run_id) if run_id else None
            # The call has no body yet, and never gets one.
            call = opened.stream_unary(method)(metadata=metadata, timeout=20.0)
            code = grpc.StatusCode.FAILED_PRECONDITION
            assert await status_of(call) == (code, "E-REJ-003")
        assert both.server.counters.totals() == {"message.foreign": 1}

    with_pair(test)


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def test(both: Pair) -> None:
        async with open_to(both.address) as opened:
            call = opened.stream_unary(HELLO)(timeout=20.0)
            assert (await status_of(call))[0] is grpc.StatusCode.ABORTED

    with_pair(test, Limits(control_timeout_s=0.1))


def test_a_question_that_is_too_long_is_malformed() -> None:
    async def test(both: Pair) -> None:
        async with open_to(both.address) as opened:
            for method in REQUESTS:
                if method != DELIVER:
                    call = opened.unary_unary(method)(bytes(5000), metadata=OURS)
                    assert (await status_of(call))[0] is grpc.StatusCode.INVALID_ARGUMENT, method

    with_pair(test)


def test_a_host_has_no_more_calls_open_than_its_share() -> None:
    """A stranger that opens calls and sends nothing must not use up those of the members."""

    async def test(both: Pair) -> None:
        async with open_to(both.address) as opened:
            hanging = [opened.stream_unary(HELLO)(timeout=20.0) for _ in range(2)]
            await wait_until(lambda: both.server._door._num_open.total() == 2)
            more = opened.stream_unary(HELLO)(timeout=20.0)
            assert await status_of(more) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "E-NET-012")
            for call in hanging:
                call.cancel()
            await wait_until(lambda: not both.server._door._num_open)
            both.client.send(BOB, 1, m.Ping(1))
            await wait_until(lambda: both.bob.delivered)

    with_pair(test, Limits(rpcs_per_host_max=2))


def test_a_few_hosts_can_not_take_all_calls() -> None:
    async def test() -> None:
        door = Door(RUN, Counters(), Limits(concurrent_rpcs_max=100, rpcs_per_host_max=40))
        for number in range(5):
            host = f"10.0.0.{number}"
            while door.enter(host):
                pass
        assert [door._num_open[f"10.0.0.{number}"] for number in range(5)] == [40, 30, 15, 7, 4]
        assert door.enter("10.0.1.1"), "there is room for a member"
        door.leave("10.0.1.1")
        for _ in range(40):
            door.leave("10.0.0.0")
        assert door.enter("10.0.0.4")

    asyncio.run(test())


def test_who_sends_garbage_for_a_while_loses_the_connection_and_nobody_else_does() -> None:
    """All come from one address, as nodes do that are behind one router."""

    async def test(both: Pair) -> None:
        both.client.send(BOB, 1, m.Ping(0))
        await wait_until(lambda: both.bob.delivered)
        async with open_to(both.address) as opened:
            deliver = opened.unary_unary(DELIVER)
            for _ in range(3):
                answer = await deliver(GARBAGE, metadata=OURS)
                assert control_pb2.DeliverResponse.FromString(answer).num_dropped == 1
            assert both.server.counters.total("peer.dropped") == 0
            # The fourth is over the limit. The call itself may still be answered.
            await status_of(deliver(GARBAGE, metadata=OURS))
            await wait_until(lambda: both.server.counters.total("peer.dropped"))
            await wait_until(lambda: opened.get_state() is not grpc.ChannelConnectivity.READY)
        both.client.send(BOB, 1, m.Ping(1))
        await wait_until(lambda: len(both.bob.delivered) == 2)
        assert both.alice.failed == []

    with_pair(test, Limits(faults_burst=3, faults_per_s=1e-6))


def test_one_large_message_with_a_fault_is_enough() -> None:
    async def test(both: Pair) -> None:
        async with open_to(both.address) as opened:
            garbage = field(1, b"\xff" * (2 << 20))
            await status_of(opened.unary_unary(DELIVER)(garbage, metadata=OURS))
            await wait_until(lambda: both.server.counters.total("peer.dropped"))

    with_pair(test)


def test_large_messages_keep_their_place_among_small_ones() -> None:
    async def test(both: Pair) -> None:
        sent = [*pings(3), large(1), *pings(2), large(2), large(3), m.Ping(9)]
        async with open_to(both.address) as opened:
            await opened.unary_unary(DELIVER)(batch(*sent), metadata=OURS)
        assert [message for _, _, message in both.bob.delivered] == sent

    with_pair(test)


def test_a_server_that_was_started_again_reads_large_messages() -> None:
    async def test(both: Pair) -> None:
        await both.server.stop(None)
        port = await both.server.start("127.0.0.1", 0)
        async with open_to(f"127.0.0.1:{port}") as opened:
            await opened.unary_unary(DELIVER)(batch(large(1)), metadata=OURS)
        assert len(both.bob.delivered) == 1

    with_pair(test)


def test_other_work_goes_on_between_the_messages_of_a_batch() -> None:
    async def test(both: Pair) -> None:
        passes = 0
        seen: list[int] = []

        def look() -> None:
            nonlocal passes
            passes += 1
            loop.call_soon(look)

        loop = asyncio.get_running_loop()
        both.bob.on_deliver = lambda _message: seen.append(passes)
        async with open_to(both.address) as opened:
            loop.call_soon(look)
            await opened.unary_unary(DELIVER)(batch(*pings(200)), metadata=OURS)
        assert len(seen) == 200
        assert all(later > earlier for earlier, later in pairwise(seen))

    with_pair(test, Limits(pass_max_s=0.0))


def test_too_many_messages_in_a_batch_are_malformed_whatever_they_are() -> None:
    async def test(both: Pair) -> None:
        async with open_to(both.address) as opened:
            for request in (batch(*pings(257)), field(1, b"") * 2_000_000):
                call = opened.unary_unary(DELIVER)(request, metadata=OURS)
                assert (await status_of(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert both.bob.delivered == []
        assert both.server.counters.total("message.malformed") == 2

    with_pair(test)


def test_turns_are_given_in_the_order_of_asking() -> None:
    async def run() -> None:
        turns, order = Turns(0.0), list[tuple[str, int]]()

        async def work(name: str) -> None:
            for index in range(3):
                async with turns:
                    order.append((name, index))

        await asyncio.gather(*map(work, "abc"))
        assert order == [(name, index) for index in range(3) for name in "abc"]

    asyncio.run(run())


def test_who_gives_up_waiting_for_a_turn_blocks_nobody() -> None:
    async def run() -> None:
        turns = Turns(0.0)

        async def work() -> None:
            async with turns:
                pass

        await work()
        first, second = asyncio.create_task(work()), asyncio.create_task(work())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait_for(second, 5)

    asyncio.run(run())


def test_strangers_do_not_use_up_the_connections_that_members_need() -> None:
    """They connect, and say nothing, or nothing of the run."""

    async def test(both: Pair) -> None:
        both.client.send(BOB, 1, m.Ping(0))
        await wait_until(lambda: both.bob.delivered)
        port = int(both.address.rpartition(":")[2])
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        ends = [reader.read() for reader, _ in strangers]
        async with open_to(both.address) as opened, asyncio.timeout(20):
            # Over the limit at first, and dialled again until strangers have lost theirs.
            deliver = opened.unary_unary(DELIVER)
            await deliver(batch(m.Ping(1)), metadata=OURS, wait_for_ready=True)
            await asyncio.gather(*ends, return_exceptions=True)
        both.client.send(BOB, 1, m.Ping(2))
        await wait_until(lambda: len(both.bob.delivered) == 3)
        assert both.alice.failed == []
        assert both.server.counters.total("peer.dropped") >= 1
        for _, writer in strangers:
            writer.close()

    with_pair(test, Limits(connections_max=8, room_interval_s=0.05))


def test_a_host_may_begin_few_connections_at_a_time() -> None:
    """Those that it has go on."""

    async def test(both: Pair) -> None:
        both.client.send(BOB, 1, m.Ping(0))
        await wait_until(lambda: both.bob.delivered)
        host, _, port = both.address.rpartition(":")
        for _ in range(2):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
        both.client.send(BOB, 1, m.Ping(1))
        await wait_until(lambda: len(both.bob.delivered) == 2)

    with_pair(test, Limits(connects_burst=3, connects_per_s=1e-6))


def test_a_call_that_does_not_come_by_the_door_is_refused() -> None:
    """Other users of a host can reach the port on which gRPC listens there."""

    async def test(both: Pair) -> None:
        front = both.server._front
        assert front is not None
        async with open_to(f"127.0.0.1:{front._calls_port}") as opened:
            call = opened.unary_unary(DELIVER)(batch(m.Ping(1)), metadata=OURS)
            assert await status_of(call) == (grpc.StatusCode.PERMISSION_DENIED, "E-REJ-009")
        assert both.bob.delivered == []

    with_pair(test)


def test_a_connection_from_the_port_of_one_that_has_just_ended_is_known() -> None:
    async def test() -> None:
        door = Door(RUN, Counters(), Limits())
        old, new = (Connection("ipv4:192.0.2.1:7", 0.0) for _ in range(2))
        assert door.admit(old)
        assert door.admit(new)
        door.forget(old)
        assert door._connections == {new.peer: new}

    asyncio.run(test())


def test_a_node_that_has_no_room_for_a_stranger_may_have_some_later() -> None:
    async def test(both: Pair) -> None:
        both.client.send(BOB, 1, m.Ping(0))
        await wait_until(lambda: both.bob.delivered)
        with pytest.raises(UnansweredError, match=r"E-NET-003 .* closes new connections"):
            await hello(both.address, HelloRequest(), MEMBERS[ALICE])

    with_pair(test, Limits(connections_max=1))


@pytest.mark.parametrize(
    ("host", "plain"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:DB8::7", "2001:db8::7"),
        ("fe80::7%eth0", "fe80::7"),
        ("unix", ""),
    ],
)
def test_an_address_has_one_form(host: str, plain: str) -> None:
    assert plain_ip(host) == plain


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_source_is_limited_and_others_are_not() -> None:
    clock = Clock()
    limiter = RateLimiter(clock, rate_per_s=8, burst=5)
    assert [limiter.allow(("a", 1)) for _ in range(6)] == [True] * 5 + [False]
    assert limiter.allow(("b", 1))
    clock.now_s += 0.125
    assert [limiter.allow(("a", 1)) for _ in range(2)] == [True, False]


def test_what_costs_more_than_is_left_takes_nothing() -> None:
    limiter = RateLimiter(Clock(), rate_per_s=1, burst=5)
    assert [limiter.allow("a", cost) for cost in (3, 3, 2, 1)] == [True, False, True, False]
