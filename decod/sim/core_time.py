"""The processor time of simulated cores."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def core_stopwatch() -> Iterator[Callable[[], float]]:
    """Yield a stopwatch in seconds of this thread's processor time, without garbage collection.

    A collection goes through the objects of all simulated nodes, so it belongs to no core.
    """
    collecting_s = 0.0

    def collected(phase: str, _: dict[str, int]) -> None:
        nonlocal collecting_s
        collecting_s += time.thread_time() if phase == "stop" else -time.thread_time()

    gc.callbacks.append(collected)
    try:
        yield lambda: time.thread_time() - collecting_s
    finally:
        gc.callbacks.remove(collected)
