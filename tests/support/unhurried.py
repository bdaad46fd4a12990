"""A `decod leader` whose device is slow at each step, so that iterations are far between.

    python -m tests.support.unhurried SECONDS leader RUN.TOML ...

Some tests need a run that trains, but not much. This leaves the processors to the test's subject.
Everything else about the leader is real.
"""

import asyncio
import sys
from typing import Any

PROGRAM = (sys.executable, "-u", "-m", "tests.support.unhurried", "0.5")


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
