"""How long a loop takes for the parts of a step, as this process's clock sees it.

On a CUDA device, kernels run later than they are launched. The times are then those of the launches
and of the points where the loop waits for the device, which is where it is held up.
"""

from time import perf_counter
from typing import Any

from torch import nn


class LoopTiming:
    """Seconds of one step after another.

    Without `watch`, the time between two steps is known only as a whole. With it, that is split in
    data, forward and backward.
    """

    def __init__(self) -> None:
        self._ended_s = perf_counter()
        self._seconds: dict[str, float] = {}
        self._data_s = self._forward_s = 0.0
        self._forward_begun_s: float | None = None
        self._has_run = False
        """Whether the watched model has run since the last step."""

    def watch(self, model: nn.Module) -> None:
        """Tell loading of data, forward and backward pass apart, by two hooks on the model.

        Args:
            model: The module that the loop calls.
        """
        model.register_forward_pre_hook(self._forward_begins)
        model.register_forward_hook(self._forward_ends)

    def _forward_begins(self, *_: Any) -> None:
        self._forward_begun_s = perf_counter()
        if not self._has_run:
            self._data_s = self._forward_begun_s - self._ended_s

    def _forward_ends(self, *_: Any) -> None:
        if self._forward_begun_s is not None:
            self._forward_s += perf_counter() - self._forward_begun_s
            self._has_run = True

    def begin_step(self) -> None:
        """The backward pass has ended: the loop calls `step()`."""
        if self._has_run:
            self._add("data", self._data_s)
            self._add("forward", self._forward_s)
            self._ended_s += self._data_s + self._forward_s
            self.lap("backward")
        else:
            self.lap("unsplit")
        self._data_s = self._forward_s = 0.0
        self._has_run = False

    def lap(self, name: str) -> float:
        """Count the time since the last lap, or the begin of the step, as `name`. Return it."""
        now_s = perf_counter()
        spent_s, self._ended_s = now_s - self._ended_s, now_s
        self._add(name, spent_s)
        return spent_s

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds since this was last called, by part.

        `data`, `forward`, `backward`: of a watched model; otherwise `unsplit`, all from the end of
        a step to the begin of the next. `accumulate`: taking the gradient in. `wait` and `apply`:
        waiting for an average, and applying it, at the end of the step before.
        """
        taken, self._seconds = self._seconds, {}
        return taken
