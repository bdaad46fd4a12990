"""Virtual time: a queue of callbacks and their instants.

The kernel knows nothing of nodes. Callbacks of the same instant run in the order in which they were
planned. A run therefore depends on its seed alone, never on the order of a hash table.
"""

import heapq
import random
from collections.abc import Callable
from typing import Any

_Entry = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Kernel:
    """A queue of callbacks in virtual time.

    Attributes:
        now_s: The present instant of virtual time. It starts at 0 and never goes back.
        num_events: How many callbacks have run.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._queue: list[_Entry] = []
        self._sequence = 0

    def at(self, time_s: float, callback: Callable[..., None], *args: Any) -> None:
        """Plan `callback(*args)` for `time_s`; a past instant means now."""
        self._sequence += 1
        if time_s < self.now_s:
            time_s = self.now_s
        heapq.heappush(self._queue, (time_s, self._sequence, callback, args))

    def after(self, delay_s: float, callback: Callable[..., None], *args: Any) -> None:
        """Plan `callback(*args)` for `delay_s` from now."""
        self.at(self.now_s + delay_s, callback, *args)

    @property
    def next_s(self) -> float | None:
        """When the next callback is due. None: nothing is planned."""
        return self._queue[0][0] if self._queue else None

    def run(self, *, until_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Run callbacks in order until `done()`, until `until_s`, or until none is left.

        Returns:
            Whether `done()` was reached.
        """
        queue = self._queue
        heappop = heapq.heappop
        while not done():
            if not queue or queue[0][0] > until_s:
                return False
            self.now_s, _, callback, args = heappop(queue)
            self.num_events += 1
            callback(*args)
        return True


def seeded(seed: int, *path: object) -> random.Random:
    """Return the random generator for one purpose. Generators do not disturb each other.

    Args:
        seed: The run's seed.
        path: The purpose, such as `"link", 3, 5`.
    """
    # Seeding by text goes through SHA-512, which is the same in every process.
    return random.Random("/".join(str(part) for part in (seed, *path)))  # noqa: S311
