"""The caps on a link: how long pieces wait, and what changes of the cap mean for them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from decod.net.client import PeerClient
from decod.net.rate_caps import Lane, Pace
from tests.support.peers import ACTIVATION, ALICE, BOB, MEMBERS, RUN, Pair, with_pair
from tests.unit.net.test_download import BIG, LIMITS, Bench, Holder, assert_is, payload
from tests.unit.net.test_download import run as run_download
from tests.waiting import wait_until

MIB = 1 << 20


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10.0))


def test_a_lower_cap_counts_for_pieces_that_wait() -> None:
    async def test() -> None:
        loop, pace = asyncio.get_running_loop(), Pace(100e6)
        start_s = loop.time()
        await pace.wait(1_000_000, Lane.STATES)
        second = asyncio.ensure_future(pace.wait(1000, Lane.STATES))
        await asyncio.sleep(0)
        pace.cap(5e6)
        await second
        # The first is on its way for a hundredth of a second, and now for twenty times as long.
        assert loop.time() - start_s >= 0.9 * 0.208

    run(test)


@pytest.mark.parametrize("cap", [None, 1e9])
def test_a_higher_cap_lets_pieces_go(cap: float | None) -> None:
    async def test() -> None:
        loop, pace = asyncio.get_running_loop(), Pace(1000.0)
        await pace.wait(100_000, Lane.STATES)
        waiting = [asyncio.ensure_future(pace.wait(10, lane)) for lane in Lane]
        await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        start_s = loop.time()
        pace.cap(cap)
        await asyncio.gather(*waiting)
        assert loop.time() - start_s < 1.0

    run(test)


def test_a_cap_that_comes_later_counts_from_then_on() -> None:
    async def test() -> None:
        loop, pace = asyncio.get_running_loop(), Pace()
        await pace.wait(1 << 40, Lane.STATES)
        pace.cap(1e6)
        start_s = loop.time()
        await pace.wait(100_000, Lane.STATES)
        await pace.wait(1, Lane.STATES)
        assert 0.09 <= loop.time() - start_s < 1.0
        pace.cap(None)
        await pace.wait(1 << 40, Lane.STATES)

    run(test)


@pytest.mark.parametrize("size_bytes", [MIB // 2, 2 * MIB + 1])
def test_a_download_cap_holds_over_all_senders(size_bytes: int) -> None:
    """For tensors of one message, and for those that come in a stream."""
    rate, num = 4 * MIB, 8 * MIB // size_bytes

    async def test(both: Pair) -> None:
        loop = asyncio.get_running_loop()
        both.bob.intake = Pace(rate)
        start_s = loop.time()
        second = PeerClient(MEMBERS[ALICE], RUN, both.alice)
        second.set_address(BOB, both.address)
        for token in range(num):
            sender = both.client if token % 2 else second
            sender.send_tensor(BOB, 1, ACTIVATION, memoryview(bytes(size_bytes)), token)
        await wait_until(lambda: len(both.alice.sent) == num)
        # The last piece of each sender's two streams is counted when it has arrived.
        pieces_s = 4 * min(size_bytes, MIB) / rate
        assert loop.time() - start_s >= num * size_bytes / rate - pieces_s
        assert len(both.bob.arrived) == num
        assert both.bob.late == both.alice.failed == []
        await second.close()

    with_pair(test)


def test_a_download_cap_holds_over_all_donors() -> None:
    rate = 8 * 1024 * 1024

    async def test(bench: Bench) -> None:
        bench.pace = Pace(rate)
        start_s = asyncio.get_running_loop().time()
        assert_is(await bench.fetch(), BIG)
        # The last frame of each donor is counted, and not waited for.
        frames_s = 2 * LIMITS.frame_size_bytes / rate
        assert asyncio.get_running_loop().time() - start_s >= payload(BIG) / rate - frames_s

    run_download(test, Holder("a", BIG), Holder("b", BIG))
