"""Tasks that do not outlive those who started them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
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
