"""The journal of a node: one stream of what it notes, and the views that follow the stream.

A view takes each entry in the event loop: the run's progress, its history, recent events, the log,
the audit log, the table of iterations, metrics. A view that keeps something on a disk does so
through a `Spool`, because the event loop must never wait for a disk.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Generic, Protocol, Self, TypeVar

from decod.clocks import wall_clock
from decod.tasks import cancelled, in_thread
from decod.texts import why_of

T = TypeVar("T")

BATCH_MAX = 256
"""Items in one write, so that a disk with little room takes some."""
RETRY_S = 60.0
"""How long after a failure the disk is tried again."""
END_S = 5.0
"""How long the end of a node waits for a disk that hangs."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One thing that a node has noted."""

    event: str
    """Its name, from `event_specs`."""
    fields: Mapping[str, Any]
    time_s: float
    """Seconds of the Unix epoch."""
    now_s: float
    """Monotonic seconds."""


class JournalView(Protocol):
    """Follows the journal."""

    def take(self, entry: JournalEntry) -> None:
        """Take in one entry. Never waits and never raises."""


class TakeNote(Protocol):
    """Notes an event."""

    def __call__(self, event: str, **fields: object) -> None: ...


class Journal:
    """The stream of one node's entries.

    Args:
        views: Take each entry, in this order.
    """

    def __init__(self, *views: JournalView) -> None:
        self._views = list(views)

    def follow(self, *views: JournalView) -> None:
        """Have these views take each entry from now on, behind the others."""
        self._views += views

    def note(self, event: str, **fields: object) -> None:
        """Record that something has happened."""
        entry = JournalEntry(event, fields, wall_clock(), time.monotonic())
        for view in self._views:
            view.take(entry)


# --- disks --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which a disk did not take all items."""

    since_s: float | None = None
    """When the disk began to fail, in seconds of the Unix epoch; None if it did not fail."""
    reason: str = ""
    num_lost: int = 0
    """Items for which there was no room in memory."""

    def __bool__(self) -> bool:
        return self.since_s is not None or self.num_lost > 0


class Spool(Generic[T]):
    """Hands items to a disk in their order. Use it in `async with`; items may come before that.

    Items wait in memory until a thread has written them. If the disk is full, fails or hangs, the
    node works on, and the disk is tried again. Beyond a limit, new items are lost, and counted.

    Args:
        write: Writes some items, all or none. It also gets the outage that lies before them.
            Called in a thread. Raises OSError.
        close: Ends the file. Called in a thread.
        waiting_max: Items that wait at most.
        retry_s: Time from a failure to the next try.
    """

    def __init__(
        self,
        write: Callable[[Sequence[T], Outage], object],
        close: Callable[[], object],
        *,
        waiting_max: int,
        retry_s: float = RETRY_S,
    ) -> None:
        self._write, self._close = write, close
        self._waiting_max, self._retry_s = waiting_max, retry_s
        self._waiting: deque[T] = deque()
        self._outage = Outage()
        self._wake = asyncio.Event()
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.on_failed: list[Callable[[Outage], None]] = []
        """Called when the disk begins to fail."""
        self.on_restored: list[Callable[[Outage], None]] = []
        """Called when the disk takes items again."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, item: T) -> None:
        """Take an item. Never waits and never raises."""
        if len(self._waiting) < self._waiting_max:
            self._waiting.append(item)
            self._wake.set()
        else:
            self._outage = replace(self._outage, num_lost=self._outage.num_lost + 1)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._ending.set()
        self._wake.set()
        await asyncio.wait({self._task}, timeout=END_S)
        await cancelled(self._task)

    async def _keep(self) -> None:
        """Write what comes, until the end."""
        while self._waiting or not self._ending.is_set():
            if not self._waiting:
                await self._wake.wait()
                self._wake.clear()
            elif not await self._write_some():
                if self._ending.is_set():
                    return
                await _within(self._ending, self._retry_s)
        with suppress(OSError):
            await in_thread(self._close)

    async def _write_some(self) -> bool:
        """Write items that wait; return whether the disk took them."""
        items, outage = list(islice(self._waiting, BATCH_MAX)), self._outage
        self._outage = Outage()
        try:
            await in_thread(partial(self._write, items, outage))
        except OSError as error:
            lasts = outage.since_s is not None
            self._outage = Outage(
                outage.since_s or wall_clock(),
                why_of(error),
                outage.num_lost + self._outage.num_lost,
            )
            for tell in () if lasts else self.on_failed:
                tell(self._outage)
            return False
        for _ in items:
            self._waiting.popleft()
        for tell in self.on_restored if outage else ():
            tell(outage)
        return True


async def _within(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, but no longer than `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
