"""A `decod` that sends its stage's state at a limited rate in bytes per second, over all askers.

    python -m tests.support.slow_donor 40000 join JOINSTRING ...

Everything else about it is real.
"""

import asyncio
import sys
from typing import Any


def _limit(bytes_per_s: float) -> None:
    from decod.net.donor import StateDonor

    pour, free_s = StateDonor._pour, 0.0

    async def slowly(donor: StateDonor, context: Any, data: memoryview) -> None:
        nonlocal free_s
        loop, turn = asyncio.get_running_loop(), asyncio.Event()
        free_s = max(free_s, loop.time()) + len(data) / bytes_per_s
        loop.call_at(free_s, turn.set)
        await turn.wait()
        await pour(donor, context, data)

    StateDonor._pour = slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    from decod.cli.main import main

    _limit(float(sys.argv.pop(1)))
    sys.exit(main())
