"""A `decod` on a host whose wall clock is wrong, and jumps.

    python -m tests.support.skewed SECONDS join JOINSTRING ...

From one reading to the next, the clock may jump SECONDS ahead or back. Only decod and its log see
the wrong time. gRPC must see the true time: its Python code gives its core wall-clock times. The
core compares them with the system's clock.
"""

import logging
import sys
import time
from itertools import cycle
from typing import Any

from decod import clocks
from decod.cli.main import main


class SkewedTime:
    """The module `time`, except for the wall clock."""

    def __init__(self, offset_s: float) -> None:
        self._offsets_s = cycle((0.0, offset_s, offset_s))

    def time(self) -> float:
        return time.time() + next(self._offsets_s)  # noqa: TID251 - it is what is skewed.

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


if __name__ == "__main__":
    skewed = SkewedTime(float(sys.argv[1]))
    for module in (clocks, logging):
        module.time = skewed  # type: ignore[attr-defined]
    del sys.argv[1]
    sys.exit(main())
