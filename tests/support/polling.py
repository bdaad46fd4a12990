"""Waiting for another process in a test: look again and again, until a deadline."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LOOK_INTERVAL_S = 0.02
"""A look reads a file or asks a socket. This is often enough to be prompt, and still cheap."""

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
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what}\n{describe()}")
        _never.wait(_LOOK_INTERVAL_S)
