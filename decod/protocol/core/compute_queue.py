"""The order in which this host's device works: backward before forward, never idle, never flooded.

The compute process runs jobs one after another. The queue keeps it two jobs deep, so that the next
one is there when the last ends, and decides as late as possible which that is: work that frees
memory (backward) goes before work that fills it, unless others have little to do without it.

The result of a job goes to the machine that submitted it. A reset makes everything stale that was
given before it: results of stale jobs are dropped and their outputs freed, so no owner ever sees an
answer to a question of an abandoned iteration.

Jobs that need no device (`beside_device`) don't wait: another process runs them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from decod.ids import JobId, TensorId
from decod.protocol.core.durations import Patience
from decod.protocol.core.effects import Effect, EffectSink, FreeTensor, StartJob
from decod.protocol.core.events import JobFailed, JobFinished, Tensor
from decod.protocol.core.jobs import Job, JobScope, Pass, Propose, Reset, Retract, Turn
from decod.run.protocol_config import ProtocolConfig


class TensorStore:
    """Counts references; a tensor is freed when the last one is released."""

    def __init__(self, out: EffectSink[Effect]) -> None:
        self._out = out
        self.size_bytes = 0
        self._references: dict[TensorId, int] = {}
        self._sizes: dict[TensorId, int] = {}

    def __len__(self) -> int:
        return len(self._references)

    def add(self, tensor: Tensor) -> TensorId:
        """Take a tensor over from the driver, with one reference."""
        assert tensor.id not in self._references, tensor
        self._references[tensor.id] = 1
        self._sizes[tensor.id] = tensor.size_bytes
        self.size_bytes += tensor.size_bytes
        return tensor.id

    def size_of(self, tensor: TensorId) -> int:
        """Return a held tensor's size in bytes."""
        return self._sizes[tensor]

    def retain(self, tensor: TensorId) -> TensorId:
        assert tensor in self._references, f"{tensor} has been freed already"
        self._references[tensor] += 1
        return tensor

    def release(self, *tensors: TensorId) -> None:
        for tensor in tensors:
            assert self._references.get(tensor, 0) > 0, f"{tensor} has been freed already"
            self._references[tensor] -= 1
            if self._references[tensor] == 0:
                del self._references[tensor]
                self.size_bytes -= self._sizes.pop(tensor)
                self._out.put(FreeTensor(tensor))

    def hand_over(self, tensor: TensorId) -> None:
        """Give a tensor to the driver for good; it must be this machine's alone."""
        assert self._references.pop(tensor) == 1, tensor
        self.size_bytes -= self._sizes.pop(tensor)


NO_JOB = JobId(0)

_DEPTH = 2
"""Jobs given to the compute process at a time: one that runs and one that follows at once."""


class JobOwner(Protocol):
    """A machine that submits jobs."""

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:
        """A job of this machine has ended well. Its outputs belong to the machine."""
        ...

    def job_failed(self, now_s: float, job: Job, reason: str) -> bool | None:
        """A job of this machine was refused. Returns True if the node can't go on without it."""
        ...


class _Nobody:
    """Owns jobs whose results nobody needs, but which must not fail."""

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:
        pass

    def job_failed(self, now_s: float, job: Job, reason: str) -> bool:  # noqa: ARG002
        return True


NOBODY: JobOwner = _Nobody()


@dataclass(slots=True)
class _Given:
    job: Job
    owner: JobOwner
    inputs: tuple[TensorId, ...]
    stale: bool = False


class ComputeQueue:
    """Jobs that wait for, or run on, this host's device. Owns one reference to each input.

    Args:
        tensors: The node's.
        out: The node's.
        config: The run's. Whoever asks `is_late` asks once in a heartbeat's interval.
    """

    def __init__(
        self, tensors: TensorStore, out: EffectSink[Effect], config: ProtocolConfig | None = None
    ) -> None:
        self._tensors = tensors
        self._out = out
        config = config or ProtocolConfig()
        self._patience = Patience(config)
        self._watched = NO_JOB
        self._patience.interval_s = max(self._patience.interval_s, config.heartbeat_interval_s)
        self._waiting: dict[Turn, deque[_Given]] = {turn: deque() for turn in Turn}
        """By turn, in the order in which turns come."""
        self._given: dict[JobId, _Given] = {}
        self._next_id = 1
        self.refused: tuple[TensorId, ...] = ()
        """What the job has read that has just failed, while its owner hears of it."""
        self.over = False
        """The run is: nobody needs a result any more."""
        self.computed_s = 0.0
        """How long the device has worked, whatever became of that."""
        self.num_passes = 0
        """Of microbatches, that were computed here, whatever became of them."""
        self.step_s = 0.0
        """How long the last optimizer's step took."""

    @property
    def idle(self) -> bool:
        """Whether the device has nothing to do."""
        return not (self._num_on_device or any(self._waiting.values()))

    @property
    def _num_on_device(self) -> int:
        return sum(not entry.job.beside_device for entry in self._given.values())

    def is_late(self, now_s: float) -> bool:
        """Whether the device has worked on one job for so long that others should do its work."""
        running = (job_id for job_id, e in self._given.items() if not e.job.beside_device)
        oldest = next(running, NO_JOB)
        if oldest != self._watched:
            # An idle process may be silent.
            kind = _kind_of(self._given[oldest].job) if oldest else ""
            inputs = self._given[oldest].inputs if oldest else ()
            num_bytes = sum(map(self._tensors.size_of, inputs))
            self._watched = oldest
            self._patience.begin(now_s, kind, num_bytes=num_bytes)
        return self._patience.is_late(now_s)

    def submit(self, job: Job, owner: JobOwner = NOBODY, inputs: Iterable[TensorId] = ()) -> None:
        """Queue a job; it takes over one reference to each input.

        Args:
            job: What is to be done.
            owner: Gets the result.
            inputs: Tensors that the job reads.
        """
        entry = _Given(job, owner, tuple(inputs))
        assert len({*entry.inputs}) == len(entry.inputs), f"{job} reads a tensor twice"
        if job.beside_device:
            self._give(entry)
        else:
            self._waiting[job.turn].append(entry)
            self._fill()

    def finished(self, now_s: float, event: JobFinished) -> None:
        """A job has ended well: its owner gets the result, unless that no longer matters."""
        entry = self._taken(event)
        assert entry is not None, event
        self._tensors.release(*entry.inputs)
        self.num_passes += isinstance(entry.job, Pass)
        if not entry.job.beside_device:
            self.computed_s += event.duration_s
        self._patience.took(_kind_of(entry.job), event.duration_s)
        if isinstance(entry.job, Propose):
            self.step_s = event.duration_s
        for output in event.outputs:
            self._tensors.add(output)
            if entry.stale:
                self._tensors.release(output.id)
        self._fill()
        if not entry.stale:
            entry.owner.job_done(now_s, entry.job, event)

    def failed(self, now_s: float, event: JobFailed) -> bool:
        """A job was refused, or the compute process has ended.

        Returns whether the node can go on.
        """
        entry = self._taken(event)
        self._fill()
        if entry is None:
            return not event.fatal
        is_vital = event.fatal
        if not entry.stale:
            told = "memory.exhausted" if event.out_of_memory else "job.failed"
            self._out.note(told, job=entry.job.name, reason=event.reason)
            self.refused = entry.inputs
            is_vital = is_vital or bool(entry.owner.job_failed(now_s, entry.job, event.reason))
            self.refused = ()
        # Not before: its owner may have kept them.
        self._tensors.release(*entry.inputs)
        return not is_vital

    def _taken(self, event: JobFinished | JobFailed) -> _Given | None:
        """Return what was given. None: the process ended while idle."""
        entry = self._given.pop(event.job_id, None)
        if entry is not None:
            entry.stale = entry.stale or self.over
        return entry

    def abandon(self, job: Job) -> None:
        """Forget a job that was submitted, this very one: if it waits, it is not run any more."""
        self._forget(lambda entry: entry.job is job)

    def withdraw(self, job: Job) -> bool:
        """Take back a job that waits, this very one.

        Returns False if it has been given to the device already.
        """
        for entry in self._waiting[job.turn]:
            if entry.job is job:
                self._waiting[job.turn].remove(entry)
                self._tensors.release(*entry.inputs)
                return True
        return False

    def hasten(self, job: Job) -> None:
        """Run a forward pass before all others, if it waits: other nodes need its output."""
        queue = self._waiting[Turn.FORWARD]
        entry = next((entry for entry in queue if entry.job == job), None)
        if entry is not None:
            queue.remove(entry)
            self._waiting[Turn.BACKWARD].appendleft(entry)

    def reset(self) -> None:
        """Abandon the iteration: forget what waits, make stale what runs, then clear the device."""
        self._forget(lambda entry: entry.job.scope is not JobScope.STATE)
        self.submit(Reset())

    def retract(self) -> None:
        """Abandon the reduction, but not the sum: the roster has changed."""
        self._forget(lambda entry: entry.job.scope is JobScope.AVERAGING)
        self.submit(Retract())

    def _forget(self, over: Callable[[_Given], bool]) -> None:
        """Forget jobs that wait, and make stale those that run."""
        for turn, queue in self._waiting.items():
            for entry in queue:
                if over(entry):
                    self._tensors.release(*entry.inputs)
            self._waiting[turn] = deque(entry for entry in queue if not over(entry))
        for entry in self._given.values():
            entry.stale = entry.stale or over(entry)

    def _fill(self) -> None:
        while self._num_on_device < _DEPTH:
            queue = next((queue for queue in self._waiting.values() if queue), None)
            if queue is None:
                break
            self._give(queue.popleft())

    def _give(self, entry: _Given) -> None:
        job_id = JobId(self._next_id)
        self._next_id += 1
        self._given[job_id] = entry
        self._out.put(StartJob(job_id, entry.job, entry.inputs))


def _kind_of(job: Job) -> str:
    return job.name.lower()
