"""A `decod` whose compute process is slow at reading data, or at passes.

    python -m tests.support.slowed data 0.1 leader RUN.TOML ...
    python -m tests.support.slowed passes 0.1 join JOINSTRING ...

It waits for so many seconds each time, without using the processor that it shares with others.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

from tests.support import faulty_compute


def program(what: str, pause_s: float) -> tuple[str, ...]:
    """Return the program of a node that is slow."""
    return (sys.executable, "-u", "-m", "tests.support.slowed", what, str(pause_s))


def _slow_down(what: str, pause_s: str) -> None:
    from decod.train import passes

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any, **kwargs: Any) -> Any:
            threading.Event().wait(float(pause_s))
            return call(*args, **kwargs)

        return late

    if what == "data":
        passes.read_tokens = slow(passes.read_tokens)
    else:
        passes.Passes.forward = slow(passes.Passes.forward)  # type: ignore[method-assign]
        passes.Passes.backward = slow(passes.Passes.backward)  # type: ignore[method-assign]


if __name__ == "__main__":
    faulty_compute.run("tests.support.slowed", 2, _slow_down)
