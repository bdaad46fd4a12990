"""Virtual time: a queue of callbacks, hosts' clocks that may stop, and a trace of what happens."""

import gc
import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from decod.journal.event_specs import render_note

_Entry = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Kernel:
    """A queue of callbacks in virtual time.

    Attributes:
        now_s: The present instant of virtual time. It starts at 0 and never goes back.
        num_events: How many callbacks have run.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._queue: list[_Entry] = []
        self._sequence = 0

    def at(self, time_s: float, callback: Callable[..., None], *args: Any) -> None:
        """Plan `callback(*args)` for `time_s`; a past instant means now."""
        self._sequence += 1
        if time_s < self.now_s:
            time_s = self.now_s
        heapq.heappush(self._queue, (time_s, self._sequence, callback, args))

    def after(self, delay_s: float, callback: Callable[..., None], *args: Any) -> None:
        """Plan `callback(*args)` for `delay_s` from now."""
        self.at(self.now_s + delay_s, callback, *args)

    @property
    def next_s(self) -> float | None:
        """When the next callback is due. None: nothing is planned."""
        return self._queue[0][0] if self._queue else None

    def run(self, *, until_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Run callbacks in order until `done()`, until `until_s`, or until none is left.

        Returns:
            Whether `done()` was reached.
        """
        queue = self._queue
        heappop = heapq.heappop
        while not done():
            if not queue or queue[0][0] > until_s:
                return False
            self.now_s, _, callback, args = heappop(queue)
            self.num_events += 1
            callback(*args)
        return True


def seeded(seed: int, *path: object) -> random.Random:
    """Return the random generator for one purpose. Generators do not disturb each other.

    Args:
        seed: The run's seed.
        path: The purpose, such as `"link", 3, 5`.
    """
    # Seeding by text goes through SHA-512, which is the same in every process.
    return random.Random("/".join(str(part) for part in (seed, *path)))  # noqa: S311


_STALL_COUNTS_S = 0.6
"""How much of a stall a daemon counts as running time: one wait of its event loop, plus the most
that the wait may end late. A test compares it with `decod.driver.event_loop`."""

_EPSILON_S = 1e-9
"""Tolerance for rounding: instants are converted to the host's clock and back."""


class HostClock:
    """Shows the core's time on one host.

    Args:
        kernel: The run's kernel; its instants are world time.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._behind_s = 0.0
        """How far the clock lags behind world time, without the present stop."""
        self._stopped_s: float | None = None
        """World time at which it stopped. None: it runs."""
        self._until_s = 0.0
        """World time at which the present or last stop ends."""
        self._least_s = 0.0
        """The latest time that it has shown."""

    @property
    def now_s(self) -> float:
        """The host's time. It never goes back."""
        stopped_s = self._stopped_s
        instant_s = self._kernel.now_s if stopped_s is None else stopped_s
        return max(self._least_s, instant_s - self._behind_s)

    def stop(self, duration_s: float) -> None:
        """Stop the clock for a while. The host itself goes on."""
        self._until_s = max(self._until_s, self._kernel.now_s + duration_s)
        if self._stopped_s is None:
            self._stopped_s = self._kernel.now_s
        self._kernel.at(self._until_s, self._go_on)

    def _go_on(self) -> None:
        if self._stopped_s is not None and self._kernel.now_s >= self._until_s:
            self._behind_s += self._kernel.now_s - self._stopped_s
            self._stopped_s = None

    def stalled_since(self, before_s: float) -> float:
        """Take in a stall that began when the clock showed `before_s`. Little of it counts.

        Returns:
            How much of it does not.
        """
        lost_s = max(0.0, self.now_s - before_s - _STALL_COUNTS_S)
        self._behind_s += lost_s
        return lost_s

    def instant_of(self, time_s: float) -> float:
        """Return the world's instant at which this clock will show `time_s`, as known now."""
        from_s = self._kernel.now_s if self._stopped_s is None else self._until_s
        return from_s + max(0.0, time_s - self.now_s)

    def reaches(self, time_s: float) -> bool:
        """Return whether the clock shows a time. A near miss counts, and sets the clock to it."""
        reached = time_s <= self.now_s + _EPSILON_S
        if reached:
            self._least_s = max(self._least_s, time_s)
        return reached


_Happened = tuple[float, str, str, Mapping[str, object]]


class Trace:
    """Collects events with virtual time and host. Lines are rendered only when they are read.

    Attributes:
        counts: Number of occurrences of each event.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._entries: list[_Happened] = []
        self._lines: list[str] = []

    def add(self, now_s: float, name: str, event: str, fields: Mapping[str, object]) -> None:
        """Keep one event. Do not change its fields afterwards."""
        self.counts[event] += 1
        self._entries.append((now_s, name, event, fields))

    @property
    def lines(self) -> list[str]:
        """All lines so far. Two runs are equal if their lines are equal."""
        self._lines += map(_line, self._entries[len(self._lines) :])
        return self._lines

    def of(self, event: str) -> list[str]:
        """Return the lines of one kind of event."""
        return [_line(entry) for entry in self._entries if entry[2] == event]

    @override
    def __str__(self) -> str:
        return "\n".join(self.lines)


def _line(entry: _Happened) -> str:
    now_s, name, event, fields = entry
    return f"{now_s:12.6f} {name:<8} {render_note(event, fields)}"


@contextmanager
def core_stopwatch() -> Iterator[Callable[[], float]]:
    """Yield a stopwatch in seconds of this thread's processor time, without garbage collection.

    A collection goes through the objects of all simulated nodes, so it belongs to no core.
    """
    collecting_s = 0.0

    def collected(phase: str, _: dict[str, int]) -> None:
        nonlocal collecting_s
        collecting_s += time.thread_time() if phase == "stop" else -time.thread_time()

    gc.callbacks.append(collected)
    try:
        yield lambda: time.thread_time() - collecting_s
    finally:
        gc.callbacks.remove(collected)
