"""What this daemon waits for: told on the page at once, and in its log if it lasts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from decod.tasks import beside

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
        self._begun_s: dict[object, tuple[str, float]] = {}

    @asynccontextmanager
    async def of(self, what: str) -> AsyncIterator[None]:
        """Say that something is waited for, for as long as the context lasts.

        Args:
            what: Goes on from the words "waiting for".
        """
        key, now_s = object(), asyncio.get_running_loop().time
        self._begun_s[key] = what, now_s()
        try:
            async with beside(self._keep_telling(key)):
                yield
        finally:
            del self._begun_s[key]

    async def _keep_telling(self, key: object) -> None:
        what, begun_s = self._begun_s[key]
        await asyncio.sleep(self._patience_s)
        while True:
            so_far_s = asyncio.get_running_loop().time() - begun_s
            self._note("wait.lasting", what=what, seconds=round(so_far_s))
            await asyncio.sleep(AGAIN_S)

    def describe(self) -> list[dict[str, Any]]:
        """Return what is waited for, as `decod status` shows it, the longest wait first."""
        if not self._begun_s:
            return []
        now_s = asyncio.get_running_loop().time()
        return [
            {"what": what, "age_s": round(now_s - begun_s, 1)}
            for what, begun_s in self._begun_s.values()
        ]
