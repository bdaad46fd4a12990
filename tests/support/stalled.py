"""A `decod` whose event loop hardly turns for a while, when it is told to.

    python -m tests.support.stalled SECONDS leader RUN.TOML ...

After SIGUSR1, several turns of the loop in a row take SECONDS each, as with callbacks that take too
long. The kernel and gRPC's own threads go on, so connections stay open and messages from peers pile
up.
"""

import asyncio
import signal
import sys
import threading

from decod.cli.main import main

PROGRAM = (sys.executable, "-u", "-m", "tests.support.stalled")

NUM_TURNS = 3


def _stall(stall_s: float, num_left: int) -> None:
    threading.Event().wait(stall_s)
    if num_left:
        asyncio.get_running_loop().call_soon(_stall, stall_s, num_left - 1)


if __name__ == "__main__":
    _stall_s = float(sys.argv.pop(1))
    signal.signal(signal.SIGUSR1, lambda *_: _stall(_stall_s, NUM_TURNS))
    sys.exit(main())
