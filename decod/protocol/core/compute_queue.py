"""The order in which this host's device works: backward before forward, never idle, never flooded.

The compute process runs jobs one after another. The queue keeps it two jobs deep, so that the next
one is there when the last ends, and decides as late as possible which that is: work that frees
memory (backward) goes before work that fills it.

A reset makes everything stale that was given before it: results of stale jobs are dropped and
their outputs freed, so no owner ever sees an answer to a question of an abandoned round.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from decod.ids import JobId, TensorId
from decod.protocol.core.effects import Effect, StartJob
from decod.protocol.core.events import JobFailed, JobFinished
from decod.protocol.core.jobs import (
    BACKWARD_JOBS,
    MICROBATCH_JOBS,
    REDUCTION_JOBS,
    Build,
    CommitStep,
    Embed,
    Forward,
    Job,
    Load,
    Mix,
    Reset,
    Retract,
    Snapshot,
)
from decod.protocol.core.tensor_store import TensorStore

_DEPTH = 2
"""Jobs given to the compute process at a time: one that runs and one that follows at once."""

_ROUNDLESS = (Build, Load, Mix, Snapshot, Reset, CommitStep)
"""Jobs that an abandoned round does not make stale; a commit is of the round before."""


@dataclass(slots=True)
class _Given:
    job: Job
    inputs: tuple[TensorId, ...]
    stale: bool = False


class ComputeQueue:
    """Jobs that wait for, or run on, this host's device. Owns one reference to each input."""

    def __init__(self, tensors: TensorStore) -> None:
        self._tensors = tensors
        self._ordered: deque[_Given] = deque()
        self._backward: deque[_Given] = deque()
        self._forward: deque[_Given] = deque()
        self._given: dict[JobId, _Given] = {}
        self._next_id = 1
        self.num_passes = 0
        """Of microbatches, that were computed here, whatever became of them."""

    @property
    def idle(self) -> bool:
        return not (self._ordered or self._backward or self._forward or self._given)

    def submit(self, job: Job, inputs: Iterable[TensorId] = ()) -> list[Effect]:
        """Queue a job; it takes over one reference to each input."""
        entry = _Given(job, tuple(inputs))
        if isinstance(job, BACKWARD_JOBS):
            self._backward.append(entry)
        elif isinstance(job, (Forward, Embed)):
            self._forward.append(entry)
        else:
            self._ordered.append(entry)
        return self._fill()

    def finished(self, event: JobFinished | JobFailed) -> tuple[Job | None, list[Effect]]:
        """Return the job that ended, or None if its result no longer matters.

        Inputs are released. Outputs of a job that matters belong to the caller; the others are
        freed here.
        """
        entry = self._given.pop(event.job_id, None)
        if entry is None:
            # The compute process ended while it had nothing to do.
            assert isinstance(event, JobFailed), event
            return None, []
        effects = self._tensors.release(*entry.inputs)
        if isinstance(event, JobFinished):
            self.num_passes += isinstance(entry.job, MICROBATCH_JOBS)
            for output in event.outputs:
                self._tensors.add(output)
                if entry.stale:
                    effects += self._tensors.release(output.id)
        return (None if entry.stale else entry.job), effects + self._fill()

    def abandon(self, job: Job) -> list[Effect]:
        """Forget a job that was submitted, this very one: if it waits, it is not run any more."""
        effects: list[Effect] = []
        for entry in [entry for entry in self._ordered if entry.job is job]:
            self._ordered.remove(entry)
            effects += self._tensors.release(*entry.inputs)
        for entry in self._given.values():
            entry.stale = entry.stale or entry.job is job
        return effects

    def reset(self) -> list[Effect]:
        """Abandon the round: forget what waits, make stale what runs, then clear the device."""
        effects: list[Effect] = []
        for queue in (self._ordered, self._backward, self._forward):
            kept = [entry for entry in queue if isinstance(entry.job, _ROUNDLESS)]
            for entry in queue:
                if not isinstance(entry.job, _ROUNDLESS):
                    effects += self._tensors.release(*entry.inputs)
            queue.clear()
            queue.extend(kept)
        for entry in self._given.values():
            entry.stale = entry.stale or not isinstance(entry.job, _ROUNDLESS)
        return effects + self.submit(Reset())

    def retract(self) -> list[Effect]:
        """Abandon the reduction, but not the sum: the roster has changed."""
        effects: list[Effect] = []
        for entry in self._ordered:
            if isinstance(entry.job, REDUCTION_JOBS):
                effects += self._tensors.release(*entry.inputs)
        kept = [entry for entry in self._ordered if not isinstance(entry.job, REDUCTION_JOBS)]
        self._ordered = deque(kept)
        for entry in self._given.values():
            entry.stale = entry.stale or isinstance(entry.job, REDUCTION_JOBS)
        return effects + self.submit(Retract())

    def _fill(self) -> list[Effect]:
        effects: list[Effect] = []
        while len(self._given) < _DEPTH:
            queue = self._ordered or self._backward or self._forward
            if not queue:
                break
            entry = queue.popleft()
            job_id = JobId(self._next_id)
            self._next_id += 1
            self._given[job_id] = entry
            effects.append(StartJob(job_id, entry.job, entry.inputs))
        return effects
