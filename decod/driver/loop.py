"""An event loop whose clock counts only the time in which this process ran.

A laptop sleeps, a virtual machine is paused, a process is stopped, a callback takes ten seconds, a
machine is so busy that the process is hardly scheduled. The peers did nothing wrong meanwhile, and
what they sent waits in the sockets. With an ordinary clock every deadline would have passed before
the first of their messages is read. Here all timers, timeouts and durations of the daemon stand
still with the process, and go on with it.

The loop turns again and again: it waits for sockets, at most until the next timer is due, and then
runs callbacks. The clock grants each turn the wait that was asked for, and `LATE_MAX_S` more for
each half. Whatever a turn takes beyond that is time in which the process did not run.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from typing_extensions import override

T = TypeVar("T")

LATE_MAX_S = 0.1
"""How much of a late wake-up, and of a turn's callbacks, counts as time in which this node ran."""

WAIT_MAX_S = 0.5
"""Longest wait of one turn. A process that is stopped while it waits loses no more than this."""


class RunningClock:
    """Seconds in which the loop turned, from wherever the given clock stands now.

    Args:
        now: A monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seen_s = self._shown_s = now()
        self._granted_s = LATE_MAX_S

    def __call__(self) -> float:
        now_s = self._now()
        step_s = min(now_s - self._seen_s, self._granted_s)
        self._seen_s = now_s
        self._granted_s -= step_s
        self._shown_s += step_s
        return self._shown_s

    def grant(self, wait_s: float) -> None:
        """The loop is about to do something that takes so long, or a little more."""
        self()
        self._granted_s = wait_s + LATE_MAX_S


class _Selector(selectors.DefaultSelector):
    """Tells a clock when the loop begins to wait, and when it has waited."""

    def __init__(self, clock: RunningClock) -> None:
        super().__init__()
        self._clock = clock

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        wait_s = WAIT_MAX_S if timeout is None else min(max(timeout, 0.0), WAIT_MAX_S)
        self._clock.grant(wait_s)
        ready = super().select(wait_s)
        self._clock.grant(0.0)
        return ready


class RunningLoop(asyncio.SelectorEventLoop):
    """A selector event loop with a `RunningClock`.

    Args:
        now: A monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._running_clock = RunningClock(now)
        super().__init__(_Selector(self._running_clock))

    @override
    def time(self) -> float:
        return self._running_clock()


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, in a loop of this kind."""
    with asyncio.Runner(loop_factory=RunningLoop) as runner:
        return runner.run(main)
