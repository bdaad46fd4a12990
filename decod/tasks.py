"""Tasks that do not outlive those who started them, threads that do not outlive the process, and
pauses between attempts.
"""

import asyncio
import random
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


class TaskSet:
    """Tasks that end with their owner. Finished tasks are forgotten."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        await cancelled(*self._tasks)


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended. Their errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def beside(*works: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Do some work for as long as the context lasts."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        await cancelled(*tasks)


async def until_first(*waits: Awaitable[Any]) -> None:
    """Wait until one of some futures and coroutines is done. Cancel the other coroutines."""
    futures = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        own = (each for each, given in zip(futures, waits, strict=True) if each is not given)
        await cancelled(*own)


def in_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run `work` in a thread of its own; return a future of its result or exception.

    Cancelling the future does not stop the thread. The thread does not keep the process from
    ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # None only if T is.
        else:
            future.set_exception(error)

    def run() -> None:
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001 - raised again when the result is awaited.
            error = caught
        with suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future


async def to_its_end(work: Callable[[], T]) -> T:
    """Run `work` in a thread, and return its result. Even if cancelled, wait until it has ended.

    For threads that write where somebody else will write soon.
    """
    working = in_thread(work)
    try:
        return await asyncio.shield(working)
    finally:
        while not working.done():
            with suppress(asyncio.CancelledError):  # More than one may cancel.
                await asyncio.wait({working})
        await asyncio.gather(working, return_exceptions=True)


FIRST_S = 1.0
LONGEST_S = 60.0


class Backoff:
    """The pauses before attempts.

    Each pause is drawn between half its length and its full length, so that nodes that were cut off
    together do not come back together.

    Args:
        rng: Draws the pauses. If absent, one with a random seed.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random(secrets.randbits(64))  # noqa: S311 - no secret.
        self._length_s = FIRST_S

    def next_s(self) -> float:
        """Return the next pause, in seconds."""
        length_s, self._length_s = self._length_s, min(2 * self._length_s, LONGEST_S)
        return self._rng.uniform(length_s / 2, length_s)

    def reset(self) -> None:
        """Begin with short pauses again, after a time without failures."""
        self._length_s = FIRST_S
