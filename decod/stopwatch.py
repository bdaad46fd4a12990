"""Adds up a process's time by purpose."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal, get_args

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
