"""The clock that hosts share, for instants that travel: when papers and records end."""

import time


def wall_clock() -> float:
    """Return seconds of the Unix epoch. They may jump, so they measure no length of time."""
    return time.time()  # noqa: TID251 - the one place where it is read.
