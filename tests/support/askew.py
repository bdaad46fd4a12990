"""A `decod` whose wall clock is wrong by some seconds. TLS and gRPC alone go by the right one.

python -m tests.support.askew SECONDS leader RUN.TOML ...
"""

import sys
import time
from types import SimpleNamespace


def program(seconds: float) -> tuple[str, ...]:
    """Return the command of a `decod` whose clock is so many seconds ahead."""
    return sys.executable, "-u", "-m", "tests.support.askew", str(seconds)


def _shift(seconds: float) -> None:
    from decod import clocks

    # In place: other modules may have imported the function already.
    right = time.time  # noqa: TID251 - a clock that others are measured by.
    wrong = SimpleNamespace(time=lambda: right() + seconds)
    clocks.time = wrong  # type: ignore[attr-defined]


if __name__ == "__main__":
    _shift(float(sys.argv.pop(1)))
    from decod.cli.main import main

    sys.exit(main())
