"""Tensors whose connection breaks, and the upload cap."""

import asyncio
import os
import zlib
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pytest

from decod.driver.event_loop import run_loop
from decod.ids import TensorId
from decod.net.client import PeerClient
from decod.net.net_limits import MIB, Limits
from decod.net.rate_caps import Lane, LinkShare, Pace
from decod.net.tensor_stream import POSITION, RESULT, RESUMES, TensorSender
from decod.net.transmission import LEFT
from decod.wire.v1 import tensor_pb2
from tests.support.peers import ACTIVATION, ALICE, BOB, MEMBERS, RUN, Pair, header, with_pair
from tests.support.proxy import Ends, Proxy
from tests.waiting import wait_until

_CHUNK_BYTES = 64 * 1024


class BreakingLink(Proxy):
    """The first connections break after some bytes.

    Args:
        port: Where connections go.
        breaks: After how many bytes to the port each connection breaks, in order.
    """

    def __init__(self, port: int, breaks: list[int]) -> None:
        super().__init__(port)
        self._breaks = breaks
        self.carried: list[int] = []
        """Bytes that each connection has carried to the port."""

    def carry(self, ends: Ends) -> Iterator[Coroutine[None, None, None]]:
        """Return what carries bytes there, and back."""
        number = len(self.carried)
        self.carried.append(0)
        yield self._there(ends, number)
        yield self._back(ends)

    async def _there(self, ends: Ends, number: int) -> None:
        limit = self._breaks[number] if number < len(self._breaks) else 1 << 62
        with suppress(ConnectionError):
            while chunk := await ends.near.read(_CHUNK_BYTES):
                self.carried[number] += len(chunk)
                ends.to.write(chunk)
                await ends.to.drain()
                if self.carried[number] >= limit:
                    break
        ends.to.close()
        ends.back.close()

    async def _back(self, ends: Ends) -> None:
        with suppress(ConnectionError):
            while chunk := await ends.far.read(_CHUNK_BYTES):
                ends.back.write(chunk)
                await ends.back.drain()
        ends.back.close()


def test_a_tensor_goes_on_where_its_connection_broke() -> None:
    async def test(both: Pair) -> None:
        link = BreakingLink(int(both.address.rpartition(":")[2]), [20 * MIB, 10 * MIB])
        data = os.urandom(48 * MIB)
        async with link.serving() as address:
            both.client.set_address(BOB, address)
            both.client.send_tensor(BOB, 1, ACTIVATION, memoryview(data), "big")
            await wait_until(lambda: both.alice.sent or both.alice.failed)
            await both.client.close()
        assert both.alice.failed == []
        assert both.bob.arrived == [(ALICE, ACTIVATION, data)]
        assert (both.bob.num_allocated, both.bob.num_given_back) == (1, 0)
        assert len(link.carried) == 3
        # What was on its way when a connection broke is sent again, and nothing else.
        assert sum(link.carried) < len(data) + 24 * MIB

    with_pair(test)


def test_a_slow_tensor_goes_on_where_its_connection_broke() -> None:
    """The receiver has read all that has come, and waits for more."""

    async def test(both: Pair) -> None:
        link = BreakingLink(int(both.address.rpartition(":")[2]), [3 * MIB])
        data = os.urandom(4 * MIB)
        both.alice.pace = Pace(4 * MIB)
        capped = PeerClient(MEMBERS[ALICE], RUN, both.alice)
        async with link.serving() as address:
            capped.set_address(BOB, address)
            capped.send_tensor(BOB, 1, ACTIVATION, memoryview(data), "slow")
            await wait_until(lambda: both.alice.sent or both.alice.failed)
            await capped.close()
        assert both.bob.arrived == [(ALICE, ACTIVATION, data)]
        assert (both.bob.num_allocated, both.bob.num_given_back) == (1, 0)
        # It has whole pieces, of 1 MiB each here.
        assert link.carried[1] < 3.5 * MIB

    with_pair(test)


@pytest.mark.parametrize(
    ("rest", "state"),
    [
        (bytes(range(4, 8)), tensor_pb2.TENSOR_RESULT_RECEIVED),
        (bytes(4), tensor_pb2.TENSOR_RESULT_CORRUPTED),
        (bytes(2), tensor_pb2.TENSOR_RESULT_MALFORMED),
        (bytes(5), None),
    ],
)
def test_who_goes_on_with_a_tensor_can_only_end_it_as_it_was_announced(
    rest: bytes, state: int | None
) -> None:
    whole = bytes(range(8))
    first = header(size_bytes=8, crc32=zlib.crc32(whole))

    async def test(both: Pair) -> None:
        async with both.sending() as sending:
            await sending.head(first)
            await sending.piece(whole[:4])
            await sending.piece(b"")
            malformed = tensor_pb2.TENSOR_RESULT_MALFORMED
            assert await sending.answer() == (RESULT, malformed)
            await sending.head(first, RESUMES)
            assert await sending.answer() == (POSITION, 4)
            await sending.piece(rest)
            if len(rest) < 4:
                await sending.piece(b"")
            if state is None:
                with pytest.raises(ConnectionError):
                    await sending.answer()
            else:
                assert await sending.answer() == (RESULT, state)
        assert len(both.bob.arrived) == (state == tensor_pb2.TENSOR_RESULT_RECEIVED)
        await both.server.stop(0)
        assert len(both.bob.arrived) + both.bob.num_given_back == both.bob.num_allocated == 1

    with_pair(test)


def test_only_so_many_broken_tensors_are_kept() -> None:
    async def test(both: Pair) -> None:
        async with both.sending() as sending:
            for size in range(10, 20):
                await sending.head(header(size_bytes=size))
                await sending.piece(b"some")
                await sending.piece(b"")
                await sending.answer()
        assert both.bob.num_given_back == 6
        await both.server.stop(0)
        assert both.bob.num_given_back == 10

    with_pair(test, Limits(broken_max=4))


def test_no_lane_keeps_another_waiting_for_long() -> None:
    async def test() -> None:
        pace, order = Pace(1e6), list[str]()

        async def send(lane: Lane, num: int) -> None:
            for _ in range(num):
                await pace.wait(2_000, lane)
                order.append(lane.value)

        states = [asyncio.create_task(send(Lane.STATES, 4)) for _ in range(4)]
        await asyncio.gather(send(Lane.ACTIVATIONS, 4), send(Lane.AVERAGES, 4), *states)
        assert order[:12].count("activations") == order[:12].count("averages") == 4
        assert len(order) == 24

    run_loop(test())


def test_who_gives_up_waiting_takes_nothing_of_the_rate() -> None:
    async def test() -> None:
        pace, loop = Pace(1e6), asyncio.get_running_loop()
        start_s = loop.time()
        await pace.wait(10_000, Lane.STATES)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await pace.wait(100_000_000, Lane.STATES)
        await pace.wait(10, Lane.STATES)
        assert loop.time() - start_s < 10

    run_loop(test())


def test_memory_of_a_tensor_that_nobody_goes_on_with_is_given_back() -> None:
    async def test(both: Pair) -> None:
        link = BreakingLink(int(both.address.rpartition(":")[2]), [4 * MIB])
        async with link.serving() as address:
            both.client.set_address(BOB, address)
            both.client.send_tensor(BOB, 1, ACTIVATION, memoryview(bytes(16 * MIB)), "big")
            await wait_until(lambda: link.carried and link.carried[0] >= 4 * MIB)
            await both.client.close()
        await wait_until(lambda: both.bob.num_given_back == 1)
        assert both.bob.arrived == []

    with_pair(test, Limits(broken_kept_s=0.05))


def test_an_upload_cap_holds_over_all_peers_and_any_second() -> None:
    rate = 4 * MIB

    async def test(both: Pair) -> None:
        loop = asyncio.get_running_loop()
        both.alice.pace = Pace(rate)
        capped = PeerClient(MEMBERS[ALICE], RUN, both.alice)
        capped.set_address(BOB, both.address)
        start_s = loop.time()
        for token in range(4):
            capped.send_tensor(BOB, 1, ACTIVATION, memoryview(bytes(2 * MIB)), token)
        await wait_until(lambda: len(both.alice.sent) == 4)
        # The last piece leaves a piece's time before its own has passed.
        assert loop.time() - start_s >= 8 * MIB / rate - 0.3
        assert len(both.bob.arrived) == 4
        await capped.close()

    with_pair(test)


def test_tensors_that_overlap_share_the_link() -> None:
    """Alone for 1 s, in halves for 2 s, the second alone for 1 s more: 2 s of link for each."""
    share = LinkShare()
    first = share.enter(10.0)
    second = share.enter(11.0)
    assert share.leave(13.0, first) == pytest.approx(2.0)
    assert share.leave(14.0, second) == pytest.approx(2.0)
    alone = share.enter(20.0)
    assert share.leave(21.5, alone) == pytest.approx(1.5)


def test_a_small_tensor_has_all_its_time_behind_a_large_one() -> None:
    """Otherwise it would say that a healthy peer is slow."""
    limits = Limits(rate_grace_s=0.2, rate_min_bytes_per_s=MIB)

    async def test(both: Pair) -> None:
        both.alice.pace = Pace(8 * MIB)
        client = PeerClient(MEMBERS[ALICE], RUN, both.alice, limits=limits)
        client.set_address(BOB, both.address)
        for tensor, size in (("large", 8 * MIB), ("small", 64)):
            client.send_tensor(BOB, 1, ACTIVATION, memoryview(bytes(size)), TensorId(tensor))
        await client.flush(timeout_s=20.0)
        await client.close()
        assert [tensor for _, _, tensor, _ in both.alice.sent] == ["large", "small"]
        assert both.alice.failed == []

    with_pair(test, limits)


def test_nothing_is_sent_to_a_peer_that_is_forgotten_while_it_is_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled, go_on = asyncio.Event(), asyncio.Event()
    dial = TensorSender.dial

    async def slowly(*given: Any) -> TensorSender:
        sender = await dial(*given)
        dialled.set()
        await go_on.wait()
        return sender

    monkeypatch.setattr(TensorSender, "dial", slowly)

    async def test(both: Pair) -> None:
        both.client.send_tensor(BOB, 1, ACTIVATION, memoryview(b"good"), TensorId("t"))
        await dialled.wait()
        both.client.forget(BOB)
        go_on.set()
        await wait_until(lambda: both.alice.failed)
        assert both.alice.failed[0][3] == LEFT
        await wait_until(lambda: not both.server._door._connections)
        assert both.bob.arrived == []

    with_pair(test)
