"""A relay that gets no microbatches has its device timed now and then.

What a device costs is known from the passes that it has done. If it was slow for a while, because
its owner used it for something else, it gets no more microbatches, and nobody learns that it is
fast again. So it does the passes of a made-up microbatch when some iterations have left it without
work, a tenth of the time at most, since others may wait for its sums meanwhile. It does so at once
when the optimizer's step, which it takes in every iteration, has become much quicker.

Deviation: GWTF takes all costs as known.
"""

from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import JobFinished
from decod.protocol.core.jobs import Job, Measure, Measured
from decod.protocol.core.view import Role

_IDLE_ITERATIONS = 2
"""In a row, after which the device is timed."""

_PAUSE_RATIO = 10.0
"""So many times as long as the last measurement took none is made."""

_QUICKER = 0.5
"""A step that takes this share of what one took when the device was timed is another device's."""


class Idleness:
    """One member's iterations without work.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._num_idle = 0
        self._again_s = 0.0
        self._step_then_s = 0.0
        """What a step took when the device was timed last."""

    def opened(self, now_s: float, *, idle: bool) -> list[Effect]:
        """An iteration begins.

        Args:
            now_s: The time.
            idle: This node may be given work, and had none in the last iteration.
        """
        self._num_idle = self._num_idle + 1 if idle else 0
        member = self._context.member
        relay = member.role is Role.RELAY and member.capacity > 0
        quicker = self._context.compute.step_s <= _QUICKER * self._step_then_s
        early = now_s < self._again_s and not quicker
        if not relay or self._num_idle < _IDLE_ITERATIONS or early:
            return []
        self._num_idle = 0
        return self._context.compute.submit(Measure(), self)

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """The device has been timed."""
        if isinstance(event.result, Measured):
            self._again_s = now_s + _PAUSE_RATIO * event.duration_s
            self._step_then_s = self._context.compute.step_s
            self._context.links.measured_anew(event.result)
        return []

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """It is timed another time."""
        return []
