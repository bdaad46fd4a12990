"""A `decod` on a host whose wall clock is wrong by a fixed time. gRPC sees the true time.

python -m tests.support.misdated SECONDS leader RUN.TOML ...
"""

import sys
import time
from types import SimpleNamespace

from decod import clocks

DAY_AHEAD = (sys.executable, "-u", "-m", "tests.support.misdated", "86400")


if __name__ == "__main__":
    offset_s = float(sys.argv.pop(1))
    clock = SimpleNamespace(time=lambda: time.time() + offset_s)  # noqa: TID251 - what is wrong.
    clocks.time = clock  # type: ignore[assignment]
    from decod.cli.main import main

    sys.exit(main())
