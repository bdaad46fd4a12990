"""Work in a thread that does not keep the process from ending."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run `work` in a thread of its own; return a future of its result or exception.

    Cancelling the future does not stop the thread.
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
