"""The wish that this daemon leaves: it may come at any moment, and holds for all lives of its node.

    (the process has begun)  --a signal--> it ends, since it has nothing to leave: `decod.signals`
    (the event loop runs)    --a signal, or `decod drain`--> the node finishes its work and leaves
                             --SIGINT or SIGTERM, once more--> the process ends on the spot
    (the node has left)      --a signal--> nothing

The last is for the exit code: a signal that comes late must not turn it into a crash's.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

from decod.daemon.errors import EXIT_INTERRUPTED
from decod.driver.loop import run_loop
from decod.signals import LEAVE_SIGNALS, URGENT_SIGNALS, heeded_signals

T = TypeVar("T")


class LeftEarlyError(Exception):
    """This daemon is to leave, and has nothing to leave yet."""


class Leaving:
    """Whether this daemon is to leave. While the `with` block lasts, signals ask for it.

    Args:
        say: Takes lines for the operator's terminal.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = asyncio.Event()
        self.at_once: Callable[[], None] = _nothing
        """Ends what would outlive this process."""
        self._say = say
        self._num_signals = self._num_urgent = 0

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
        self._num_urgent += number in URGENT_SIGNALS
        if self._num_urgent > 1:
            self._say("stopped at once")
            self.at_once()
            os._exit(EXIT_INTERRUPTED)
        self._num_signals += 1
        if self._num_signals == 1:
            self._say("finishing what is in hand; press Ctrl-C again to stop at once")
        self.asked.set()

    async def unless_asked(self, work: Awaitable[T]) -> T:
        """Return what some work comes to.

        Raises:
            LeftEarlyError: This daemon is to leave first; the work is cancelled.
        """
        task = asyncio.ensure_future(work)
        asked = asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise LeftEarlyError
            return task.result()
        finally:
            for each in (task, asked):
                each.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)


def run_until_left(command: Coroutine[Any, Any, int], say: Callable[[str], None]) -> int:
    """Return the exit code of a command that runs nodes; 0 if it is to leave before the first."""
    try:
        return run_loop(command)
    except LeftEarlyError:
        say("left before anything had begun")
        return 0


def _nothing() -> None:
    """Stand in for what there is to end."""
