"""A `decod` whose daemon measures the pauses of its event loop.

    python -m tests.support.ticking leader RUN.TOML ...

The request `pauses` on its local socket returns the longest pause since the last request, in
seconds: by the clock, and in CPU time of the loop's thread. On a busy machine, the clock says more
about the machine than about the daemon.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any, Self

from decod.daemon.control import ask

PROGRAM = (sys.executable, "-u", "-m", "tests.support.ticking")

_INTERVAL_S = 0.005


def pauses_of(state_dir: Path) -> dict[str, float]:
    """Return the longest pauses of a daemon's event loop since the last request."""
    return ask(state_dir, {"command": "pauses"}, timeout_s=60.0)


class Ticker:
    """Reads the clocks again and again. Time between two readings beyond the wait is a pause.

    Use it as a context manager, within a running loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._seen_s = self._used_s = 0.0
        self._handle: asyncio.TimerHandle | None = None
        self.longest = {"wall_s": 0.0, "processor_s": 0.0}

    def reset(self) -> dict[str, float]:
        """Return the longest pauses so far, and begin anew."""
        longest, self.longest = self.longest, dict.fromkeys(self.longest, 0.0)
        return longest

    def __enter__(self) -> Self:
        self._seen_s, self._used_s = time.monotonic(), time.thread_time()
        self._handle = self._loop.call_later(_INTERVAL_S, self._tick)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _tick(self) -> None:
        now_s, used_s = time.monotonic(), time.thread_time()
        wall_s, processor_s = now_s - self._seen_s - _INTERVAL_S, used_s - self._used_s
        self.longest["wall_s"] = max(self.longest["wall_s"], wall_s)
        self.longest["processor_s"] = max(self.longest["processor_s"], processor_s)
        self._seen_s, self._used_s = now_s, used_s
        self._handle = self._loop.call_later(_INTERVAL_S, self._tick)


def _tick_in_nodes() -> None:
    from decod.daemon.pipeline_node import PipelineNode

    enter, leave = PipelineNode.__aenter__, PipelineNode.__aexit__

    async def entered(node: Any) -> Any:
        node.ticker = Ticker().__enter__()

        async def pauses(_: dict[str, Any]) -> dict[str, Any]:
            return node.ticker.reset()

        node._commands["pauses"] = pauses
        return await enter(node)

    async def left(node: Any, *exc_info: object) -> None:
        node.ticker.__exit__()
        await leave(node, *exc_info)

    PipelineNode.__aenter__ = entered  # type: ignore[assignment]
    PipelineNode.__aexit__ = left  # type: ignore[assignment]


if __name__ == "__main__":
    from decod.cli.main import main

    _tick_in_nodes()
    sys.exit(main())
