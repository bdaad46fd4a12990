"""A `decod leader` whose device takes its time over each step, so that iterations are far between.

    python -m tests.support.unhurried SECONDS leader RUN.TOML ...

Tests that need a run to train, but not much, leave the processors to what they look at. Everything
else about it is real.
"""

import asyncio
import sys
from typing import Any

PROGRAM = (sys.executable, "-u", "-m", "tests.support.unhurried", "0.3")


def _pause(pause_s: float) -> None:
    from decod.driver.driver import NodeDriver
    from decod.protocol.core.jobs import Propose

    at_once = NodeDriver._job_done

    def later(driver: NodeDriver, effect: Any, outputs: Any, done: asyncio.Future[Any]) -> None:
        if isinstance(effect.job, Propose):
            loop = asyncio.get_running_loop()
            loop.call_later(pause_s, at_once, driver, effect, outputs, done)
        else:
            at_once(driver, effect, outputs, done)

    NodeDriver._job_done = later  # type: ignore[method-assign]


if __name__ == "__main__":
    from decod.cli.main import main

    _pause(float(sys.argv.pop(1)))
    sys.exit(main())
