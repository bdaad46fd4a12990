"""Signals that ask a node to leave, and what they do before the node can take them.

Nothing that takes time is imported here: a signal may come while everything else still is.
"""

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import NoReturn

LEAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; the system or a service manager; a terminal that is closed, or a connection to it."""

URGENT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""A second one of these means: at once. SIGHUP never does: a terminal that is closed sends it more
than once, and a login session that ends sends SIGTERM along with it."""


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that a node heeds: under `nohup` SIGHUP is not one of them."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return URGENT_SIGNALS
    return LEAVE_SIGNALS


def leave_early() -> None:
    """Have these signals end the process, in order and with exit code 0: it has nothing to leave.

    This holds until the event loop takes the signals.
    """
    for number in heeded_signals():
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    with suppress(OSError):  # The terminal may be what is gone.
        os.write(2, b"left before anything had begun\n")
    raise SystemExit(0)
