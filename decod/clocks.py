"""Clocks: the one that hosts share, and one that adds up a process's time by purpose."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal, get_args


def wall_clock() -> float:
    """Return seconds of the Unix epoch, for instants that travel: when papers and records end.

    They may jump, so they measure no length of time.
    """
    return time.time()  # noqa: TID251 - the one place where it is read.


Purpose = Literal["copy", "serialize", "data", "backward"]
"""`copy`: tensors between places in memory, or to and from the device. `serialize`: messages, job
requests and replies to and from bytes, and checksums. `data`: reading tokens. `backward`: the
backward half of the head's pass."""


class Stopwatch:
    """Seconds by purpose. Used from one thread; measurements do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[Purpose, float] = dict.fromkeys(get_args(Purpose), 0.0)

    @contextmanager
    def measure(self, purpose: Purpose) -> Iterator[None]:
        """Add the duration of the context."""
        start_s = perf_counter()
        try:
            yield
        finally:
            self.seconds[purpose] += perf_counter() - start_s
