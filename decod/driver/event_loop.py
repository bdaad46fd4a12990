"""An event loop whose clock counts only the time in which this process ran.

A laptop sleeps, a virtual machine is paused, a process is stopped, a callback takes ten seconds, or
a busy machine hardly schedules the process. The peers did nothing wrong meanwhile, and their
messages wait in the sockets. With an ordinary clock, every deadline would have passed before the
first of these messages was read. With this clock, all timers, timeouts and durations of the daemon
pause with the process and continue with it.

Each turn of the loop has two halves: it waits for sockets, at most until the next timer is due, and
then runs callbacks. The clock grants each turn the wait that was asked for, and `LATE_MAX_S` more
for each half. The clock does not count the time beyond that: the process did not run then.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from typing_extensions import override

T = TypeVar("T")

LATE_MAX_S = 0.1
"""Most of a late wake-up, and of a turn's callbacks, that counts as time in which this node ran."""

WAIT_MAX_S = 0.5
"""Longest wait of one turn. A process that is stopped while it waits loses no more than this."""


class RunningClock:
    """A clock that counts the seconds in which the loop ran.

    Args:
        now: Returns monotonic seconds. This clock starts at its present value.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seen_s = self._shown_s = now()
        self._granted_s = LATE_MAX_S
        self.lost_s = 0.0
        """Seconds that did not count, all in all."""

    def __call__(self) -> float:
        now_s = self._now()
        step_s = min(now_s - self._seen_s, self._granted_s)
        self.lost_s += now_s - self._seen_s - step_s
        self._seen_s = now_s
        self._granted_s -= step_s
        self._shown_s += step_s
        return self._shown_s

    def grant(self, wait_s: float) -> None:
        """Let the clock advance by at most `wait_s + LATE_MAX_S` until the next call."""
        self()
        self._granted_s = wait_s + LATE_MAX_S


class _Selector(selectors.DefaultSelector):
    """A selector that tells a clock when a wait begins and ends."""

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


def _now_s() -> float:
    """Return monotonic seconds, which go on while the machine is suspended, if the system can."""
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_time is None else time.clock_gettime(boot_time)


class RunningLoop(asyncio.SelectorEventLoop):
    """A selector event loop with a `RunningClock`.

    Args:
        now: Returns monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = _now_s) -> None:
        self._running_clock = RunningClock(now)
        super().__init__(_Selector(self._running_clock))

    @override
    def time(self) -> float:
        return self._running_clock()

    @property
    def lost_s(self) -> float:
        """Seconds in which this process did not run, all in all."""
        return self._running_clock.lost_s


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, in a `RunningLoop`."""
    with asyncio.Runner(loop_factory=RunningLoop) as runner:
        return runner.run(main)
