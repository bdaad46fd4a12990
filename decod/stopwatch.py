"""Adds up what a process spends its time on, by purpose."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

Purpose = Literal["copy", "serialize"]
"""`copy`: tensors from one place in memory to another, or to and from the device. `serialize`:
messages, job requests and replies to and from bytes, and checksums."""


class Stopwatch:
    """Seconds by purpose. Used from one thread; measurements do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[Purpose, float] = {"copy": 0.0, "serialize": 0.0}

    @contextmanager
    def measure(self, purpose: Purpose) -> Iterator[None]:
        """Add the time that the context takes."""
        start_s = perf_counter()
        try:
            yield
        finally:
            self.seconds[purpose] += perf_counter() - start_s
