"""Turns on the event loop, so that no number of messages blocks it for long."""

import asyncio
from time import perf_counter


class Turns:
    """A limit on the work on messages in each pass of the event loop. Use it in `async with`.

    Once the time of a pass is used up, entering waits for a later pass. Waiting callers enter in
    the order in which they asked. The work inside must not await: no other caller gets a turn
    meanwhile.

    Args:
        pass_max_s: Time for work on messages in one pass. One piece of work may overrun it.
    """

    def __init__(self, pass_max_s: float) -> None:
        self._pass_max_s = pass_max_s
        self._lock = asyncio.Lock()
        self._begun_s = 0.0
        self._spent_s = 0.0
        """Time used since the last wait for a later pass. At least as much as in this pass."""

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        if self._spent_s >= self._pass_max_s:
            self._spent_s = 0.0
            try:
                await asyncio.sleep(0)
            except BaseException:
                self._lock.release()
                raise
        self._begun_s = perf_counter()

    async def __aexit__(self, *exc_info: object) -> None:
        self._spent_s += perf_counter() - self._begun_s
        self._lock.release()
