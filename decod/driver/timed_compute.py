"""A layer in front of a compute process that adds up its time, by what it is spent on."""

import asyncio
from dataclasses import dataclass
from functools import partial

from decod.driver.compute import Compute, Reply
from decod.driver.state_copies import TensorRegion
from decod.protocol.core import jobs
from decod.protocol.core.jobs import AverageKind, BaseJob

_ENTERING = (jobs.Embed, jobs.Forward)
"""The first pass of each microbatch here."""
_AVERAGING = (jobs.Gather, jobs.Reduce, jobs.Square)
_STEPPING = (jobs.Propose, jobs.StepLocally, jobs.CommitStep)


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

    def add(self, job: BaseJob, reply: Reply, end_s: float) -> None:
        """Count a job that has ended well."""
        busy_s = reply.duration_s - reply.data_s - reply.backward_s
        self.data_s += reply.data_s
        self.backward_s += reply.backward_s
        begin_s = end_s - reply.duration_s
        if isinstance(job, (*_ENTERING, jobs.Head)):
            self.forward_s += busy_s
            self.num_microbatches += isinstance(job, _ENTERING)
            if self.passes_begin_s is None:
                self.passes_begin_s = begin_s
        elif isinstance(job, jobs.Backward | jobs.EmbedBackward):
            self.backward_s += busy_s
        elif isinstance(job, (*_AVERAGING, *_STEPPING)):
            if isinstance(job, _AVERAGING):
                self.averaging_s += busy_s
            else:
                self.step_s += busy_s
            if self.averaging_begin_s is None and not _is_beside(job):
                self.averaging_begin_s = begin_s
        else:
            self.other_s += busy_s


def _is_beside(job: BaseJob) -> bool:
    """Whether no iteration waits for a job of an average or a step to begin."""
    if isinstance(job, jobs.Gather | jobs.Reduce):
        return job.kind is AverageKind.AHEAD
    return isinstance(job, jobs.CommitStep)


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
        job: BaseJob,
        *,
        inputs: tuple[TensorRegion, ...] = (),
        outputs: tuple[TensorRegion, ...] = (),
    ) -> asyncio.Future[Reply]:
        """Queue a job, as `Compute.submit` does."""
        future = self._compute.submit(job, inputs=inputs, outputs=outputs)
        future.add_done_callback(partial(self._ended, job))
        return future

    def _ended(self, job: BaseJob, done: asyncio.Future[Reply]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._times.add(job, done.result(), asyncio.get_running_loop().time())

    def take(self) -> DeviceTimes:
        """Return the times since the last call, and begin anew."""
        times, self._times = self._times, DeviceTimes()
        return times
