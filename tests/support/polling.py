"""Waiting in a test for what another process does: look again and again, until a deadline."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LOOK_INTERVAL_S = 0.02
"""A look reads a file or asks a socket: often enough to be prompt, seldom enough to be cheap."""

_never = threading.Event()


def wait_for(
    look: Callable[[], T],
    what: str,
    *,
    timeout_s: float,
    describe: Callable[[], str] = str,
) -> T:
    """Returns the first thing that `look` returns which is true.

    Args:
        look: May raise: a test that can't succeed any more should say so at once.
        what: Is waited for; stands in the message of the failure.
        timeout_s: Generous. It is reached only if the test fails.
        describe: Tells what there is to see when the time is up.

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
