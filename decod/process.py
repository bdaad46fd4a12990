"""Settings of this process: its standard streams, its signals and its garbage collector.

This module imports nothing slow, because it runs before anything else is loaded, and a signal may
come during the other imports.
"""

import gc
import os
import select
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn, TextIO

# Signals that ask a node to leave, and their effect before the node can handle them.

LEAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; the system or a service manager; a closed terminal or lost connection to it."""

URGENT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""A second one of these means: at once. SIGHUP never does: a closed terminal sends it more than
once, and the end of a login session sends SIGTERM along with it."""


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


# Standard streams that are closed when decod starts, or accept nothing more when it ends.

_STANDARD = (0, 1, 2)


def open_closed() -> None:
    """Redirect closed standard streams to nowhere.

    Otherwise the next file or socket would get their number, and a library's output would go into
    it.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            # This opens the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
    # Python has no objects for closed streams. These live as long as the process.
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def let_go() -> None:
    """Drop unwritable output, so that the interpreter does not end with its own exit code."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, number)
            os.close(nothing)


def takes_a_line(stream: TextIO) -> bool:
    """Return whether a short line can be written without waiting for a reader."""
    poll = select.poll()
    try:
        poll.register(stream, select.POLLOUT)
    except (OSError, ValueError):
        return True  # It is no file of this system, as in tests.
    return bool(poll.poll(0))


# Pauses of Python itself.

_SWITCH_INTERVAL_S = 0.001


def keep_pauses_short() -> None:
    """Make this process's pauses short. Call it once all modules are loaded.

    From time to time the garbage collector looks at every object, which stops the process for 20 ms
    or more. The objects that exist now live as long as the process, so the collector is told to
    ignore them.

    Threads hand over the interpreter every millisecond instead of every five, because the event
    loop shares it with the thread that reads large messages.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
