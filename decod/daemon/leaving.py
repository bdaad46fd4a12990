"""The request that this daemon leaves. It may come at any moment, and holds for all later lives.

    (the process has begun)  --a signal--> it ends, since it has nothing to leave: `decod.process`
    (the event loop runs)    --a signal, or `decod drain`--> the node finishes its work and leaves
                             --SIGINT or SIGTERM, once more--> the process ends on the spot
    (the node has left)      --a signal--> nothing

Signals after the node has left are ignored, so that they can't change the exit code into that of a
crash.
"""

import asyncio
import math
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

from decod.driver.event_loop import run_loop
from decod.exit_codes import ExitCode
from decod.process import LEAVE_SIGNALS, URGENT_SIGNALS, heeded_signals
from decod.tasks import cancelled, until_first

T = TypeVar("T")

_ONE_PRESS_S = 0.2
"""Urgent signals that come this close together count as one: `timeout` passes each on twice."""


class LeftEarlyError(Exception):
    """This daemon was asked to leave before it had a run to leave."""


class Leaving:
    """The request to leave. While the `with` block lasts, signals make it.

    Args:
        say: Takes lines for the operator's terminal.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = asyncio.Event()
        self._kill: Callable[[], None] = _nothing
        self._say = say
        self._num_signals = self._num_urgent = 0
        self._urgent_s = -math.inf
        """When the last urgent signal came."""

    def kills(self, kill: Callable[[], None]) -> None:
        """Call `kill` before an end on the spot. It kills a process that would outlive this one."""
        self._kill = kill

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in heeded_signals():
            loop.add_signal_handler(number, self._signalled, number)
        return self

    def __exit__(self, *exc_info: object) -> None:
        loop = asyncio.get_running_loop()
        for number in LEAVE_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _signalled(self, number: signal.Signals) -> None:
        now_s = asyncio.get_running_loop().time()
        if number in URGENT_SIGNALS and now_s - self._urgent_s >= _ONE_PRESS_S:
            self._num_urgent += 1
            self._urgent_s = now_s
        if self._num_urgent > 1:
            self._say("stopped at once")
            self._kill()
            os._exit(ExitCode.INTERRUPTED)
        self._num_signals += 1
        if self._num_signals == 1:
            self._say("finishing what is in hand; press Ctrl-C again to stop at once")
        self.asked.set()

    async def unless_asked(self, work: Awaitable[T]) -> T:
        """Do some work and return its result.

        Raises:
            LeftEarlyError: This daemon is asked to leave first. The work is cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            await until_first(task, self.asked.wait())
            if not task.done():
                raise LeftEarlyError
            return task.result()
        finally:
            await cancelled(task)


def run_until_left(command: Coroutine[Any, Any, int], say: Callable[[str], None]) -> int:
    """Run a command that runs nodes; return its exit code, or 0 if it left before it began."""
    try:
        return run_loop(command)
    except LeftEarlyError:
        say("left before anything had begun")
        return 0


def _nothing() -> None:
    """Do nothing: there is no process to kill yet."""
