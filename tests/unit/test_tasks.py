"""Threads that write where somebody else will write soon."""

import asyncio
import threading

import pytest

from decod.tasks import to_its_end


def test_who_is_cancelled_waits_until_the_thread_has_ended() -> None:
    """However often: the second one comes from whoever waits for the first."""

    async def test() -> None:
        begun, may_end = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            may_end.wait(20)

        waiting = asyncio.create_task(to_its_end(work))
        await asyncio.to_thread(begun.wait, 20)
        for _ in range(3):
            waiting.cancel()
            await asyncio.sleep(0)
            assert not waiting.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(test())


def test_the_result_or_error_of_the_thread_is_given() -> None:
    async def test() -> None:
        assert await to_its_end(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await to_its_end(lambda: 1 // 0)

    asyncio.run(test())
