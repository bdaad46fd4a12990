"""Waiting for another process in a test: look again and again, until a deadline."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LOOK_INTERVAL_S = 0.02
_LOOK_INTERVAL_MAX_S = 0.2
_LOOK_SHARE = 0.05
"""Time between two looks, as a share of the time waited so far. A look reads a file, asks a daemon
for its status, or starts a command. It takes the processor from what is waited for."""

_never = threading.Event()


def wait_for(
    look: Callable[[], T],
    what: str,
    *,
    timeout_s: float,
    describe: Callable[[], str] = str,
) -> T:
    """Return the first true result of `look`.

    Args:
        look: May raise: a test that can no longer succeed should say so at once.
        what: Name of the awaited thing, for the message of a failure.
        timeout_s: A generous limit. It is reached only if the test fails.
        describe: Returns what there is to see when the time is up.

    Raises:
        AssertionError: The time is up.
    """
    start_s = time.monotonic()
    while True:
        found = look()
        if found:
            return found
        waited_s = time.monotonic() - start_s
        if waited_s > timeout_s:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what}\n{describe()}")
        pause_s = max(_LOOK_INTERVAL_S, _LOOK_SHARE * waited_s)
        _never.wait(min(pause_s, _LOOK_INTERVAL_MAX_S))
