"""Signals that ask a node to leave, and their effect before the node can handle them.

Also the signal by which a process ends with the one that has started it. This module imports
nothing slow, because a signal may come during the other imports.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

LEAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; the system or a service manager; a closed terminal or lost connection to it."""

URGENT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""A second one of these means: at once. SIGHUP never does: a closed terminal sends it more than
once, and the end of a login session sends SIGTERM along with it."""

_PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`: which signal a process gets when its parent ends."""


def die_with_parent() -> None:
    """Have the kernel kill this process once its parent has ended, whatever it waits for then.

    Even a stopped process ends so, and gives its device's memory back. Only Linux does that. The
    parent is the thread that has started this process. If it has ended before, nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that a node heeds. Under `nohup`, SIGHUP is not one of them."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return URGENT_SIGNALS
    return LEAVE_SIGNALS


def leave_early() -> None:
    """Let these signals end the process in order, with exit code 0: there is nothing to leave yet.

    This holds until the event loop handles the signals.
    """
    for number in heeded_signals():
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    with suppress(OSError):  # The terminal itself may be gone.
        os.write(2, b"left before anything had begun\n")
    raise SystemExit(0)
