"""A layer in front of a compute process that adds up its time, by what it is spent on."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from decod.driver.compute import Compute, Reply
from decod.driver.state_copies import TensorRegion

_FORWARD = ("embed", "forward", "head")
_BACKWARD = ("backward", "embed_backward")
_AVERAGING = ("gather", "reduce_part", "square")
_STEPPING = ("propose", "step_locally", "commit")
_ENTERING = ("embed", "forward")
"""The first pass of each microbatch here."""


@dataclass(slots=True)
class DeviceTimes:
    """Seconds of a device, and instants on the loop's clock."""

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    averaging_s: float = 0.0
    """Arithmetic of averages."""
    step_s: float = 0.0
    """The optimizer's."""
    other_s: float = 0.0
    num_microbatches: int = 0
    """That have entered this node's stage here."""
    passes_begin_s: float | None = None
    averaging_begin_s: float | None = None
    """Of the average at the end of an iteration. None for one that travels beside passes."""

    @property
    def computing_s(self) -> float:
        """All but the time of reading data."""
        passes_s = self.forward_s + self.backward_s
        return passes_s + self.averaging_s + self.step_s + self.other_s

    def add(self, kind: str, fields: dict[str, Any], reply: Reply, end_s: float) -> None:
        """Count a job that has ended well."""
        busy_s = reply.duration_s - reply.data_s - reply.backward_s
        self.data_s += reply.data_s
        self.backward_s += reply.backward_s
        begin_s = end_s - reply.duration_s
        if kind in _FORWARD:
            self.forward_s += busy_s
            self.num_microbatches += kind in _ENTERING
            if self.passes_begin_s is None:
                self.passes_begin_s = begin_s
        elif kind in _BACKWARD:
            self.backward_s += busy_s
        elif kind in _AVERAGING or kind in _STEPPING:
            if kind in _AVERAGING:
                self.averaging_s += busy_s
            else:
                self.step_s += busy_s
            if self.averaging_begin_s is None and not fields.get("ahead") and kind != "commit":
                self.averaging_begin_s = begin_s
        else:
            self.other_s += busy_s


class TimedCompute:
    """Passes jobs on, and times them.

    Args:
        compute: Runs the jobs.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._times = DeviceTimes()

    @property
    def ended(self) -> asyncio.Future[str]:
        return self._compute.ended

    def submit(
        self,
        kind: str,
        fields: dict[str, Any] | None = None,
        *,
        inputs: tuple[TensorRegion, ...] = (),
        outputs: tuple[TensorRegion, ...] = (),
    ) -> asyncio.Future[Reply]:
        """Queue a job, as `Compute.submit` does."""
        future = self._compute.submit(kind, fields, inputs=inputs, outputs=outputs)
        future.add_done_callback(partial(self._ended, kind, fields or {}))
        return future

    def _ended(self, kind: str, fields: dict[str, Any], done: asyncio.Future[Reply]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._times.add(kind, fields, done.result(), asyncio.get_running_loop().time())

    def take(self) -> DeviceTimes:
        """Return the times since the last call, and begin anew."""
        times, self._times = self._times, DeviceTimes()
        return times
