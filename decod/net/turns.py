"""Shares the event loop out, so that no number of messages holds it for long."""

import asyncio
from time import perf_counter


class Turns:
    """Gives work on messages a limited part of each pass of the event loop. Use in `async with`.

    Once that time is used up, entering waits for a later pass, in the order of asking. The work
    itself must not wait: nobody else gets a turn meanwhile.

    Args:
        pass_max_s: Time for such work in one pass. One piece of work may overrun it.
    """

    def __init__(self, pass_max_s: float) -> None:
        self._pass_max_s = pass_max_s
        self._lock = asyncio.Lock()
        self._begun_s = 0.0
        self._spent_s = 0.0
        """Since the last wait for another pass: at least as much as in this one."""

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
