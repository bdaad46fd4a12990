"""What this daemon waits for: told on the page at once, and in its log if it lasts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from decod.tasks import beside
from decod.texts import size_text, span

PATIENCE_S = 2.0
"""A wait that lasts for longer is told."""

AGAIN_S = 30.0
"""It is told again so often."""


class OpenWaits:
    """Keeps account of what is waited for.

    Args:
        note: Takes the name of an event, and its fields as keywords.
        patience_s: A wait that lasts for longer is told.
    """

    def __init__(self, note: Callable[..., None], patience_s: float = PATIENCE_S) -> None:
        self._note, self._patience_s = note, patience_s
        self._open: list[_Wait] = []

    @asynccontextmanager
    async def of(self, what: str, num_bytes: int = 0) -> AsyncIterator[Callable[[int], None]]:
        """Say that something is waited for, for as long as the context lasts.

        Args:
            what: Goes on from the words "waiting for".
            num_bytes: All that is to come, if that is known.

        Yields:
            A function that takes the number of bytes that have come since the last call.
        """
        wait = _Wait(what, asyncio.get_running_loop().time(), num_bytes)
        self._open.append(wait)
        try:
            async with beside(self._keep_telling(wait)):
                yield wait.advance
        finally:
            self._open.remove(wait)

    async def _keep_telling(self, wait: "_Wait") -> None:
        await asyncio.sleep(self._patience_s)
        while True:
            so_far_s = asyncio.get_running_loop().time() - wait.begun_s
            self._note("wait.lasting", what=wait.text(so_far_s), seconds=round(so_far_s))
            await asyncio.sleep(AGAIN_S)

    def describe(self) -> list[dict[str, Any]]:
        """Return what is waited for, as `decod status` shows it, the longest wait first."""
        if not self._open:
            return []
        now_s = asyncio.get_running_loop().time()
        return [
            {"what": wait.text(now_s - wait.begun_s), "age_s": round(now_s - wait.begun_s, 1)}
            for wait in self._open
        ]


@dataclass(slots=True, eq=False)
class _Wait:
    """What is waited for since when."""

    what: str
    begun_s: float
    num_bytes: int
    num_arrived: int = 0

    def advance(self, num_bytes: int) -> None:
        self.num_arrived += num_bytes

    def text(self, so_far_s: float) -> str:
        """Return what is waited for, and how much of it has come."""
        if not self.num_bytes:
            return self.what
        text = f"{self.what}, {size_text(self.num_arrived)} of {size_text(self.num_bytes)}"
        if not self.num_arrived:
            return text
        left_s = so_far_s * (self.num_bytes - self.num_arrived) / self.num_arrived
        return f"{text}, {span(left_s)} left"
