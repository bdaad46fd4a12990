"""Standard streams that are closed when decod starts, or accept nothing more when it ends.

Imports nothing slow, because this runs before anything else is loaded.
"""

import os
import select
import sys
from typing import TextIO

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
