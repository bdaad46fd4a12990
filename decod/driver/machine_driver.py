"""What all asyncio drivers of a core have in common: its events, its clock, its tensors and jobs.

A driver is the only code of a daemon that reads the clock for the core. It never waits. It steps an
event at once and performs the effects at once. Anything that takes time (a send, a job, a fetch)
comes back as another event. So the machine sees one event at a time, in the order in which they
happened, and a traced run can be replayed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from decod.driver.arena import (
    ArenaAllocator,
    ArenaRegion,
    CopyFile,
    Sizes,
    TensorRegion,
    output_bytes,
)
from decod.driver.compute import Compute, JobError, JobTaker, Reply
from decod.driver.event_loop import RunningLoop
from decod.errors import OUT_OF_MEMORY
from decod.ids import JobId, NodeId, TensorId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.scopes import Way
from decod.tasks import TaskSet

NO_JOB = JobId(0)
"""Stands for no job, when the compute process has failed. The core numbers its jobs from 1."""

STOPPED = "this node has stopped"
"""The answer to requests that come too late."""

EventT = TypeVar("EventT", contravariant=True)
EffectT = TypeVar("EffectT", covariant=True)
MachineEventT = TypeVar("MachineEventT")
MachineEffectT = TypeVar("MachineEffectT")


class SteppedMachine(Protocol[EventT, EffectT]):
    """A core: events go in, effects come out."""

    @property
    def deadline_s(self) -> float | None:
        """The instant when the machine wants to be woken."""

    def start(self, now_s: float) -> Sequence[EffectT]:
        """Begin."""

    def step(self, now_s: float, event: EventT) -> Sequence[EffectT]:
        """Take an event; return what is to be done, in order."""


class MessageTransport(Protocol):
    """The way by which messages and tensors leave this host."""

    def send(self, to: NodeId, term: int, message: Message, way: Way | None = None) -> None:
        """Queue a control message."""

    def send_tensor(
        self,
        to: NodeId,
        term: int,
        message: Message,
        data: memoryview,
        tensor: TensorId,
        way: Way | None = None,
    ) -> None:
        """Queue a bulk message with its tensor. `TensorSent` or `SendFailed` comes back."""


TransportT = TypeVar("TransportT", bound=MessageTransport)


class MachineDriver(Generic[MachineEventT, MachineEffectT, TransportT]):
    """A core, its compute process, and the tensors of both. Subclasses perform other effects.

    Args:
        machine: The core. Its events include those that this driver posts.
        compute: Runs the jobs.
        arena: Holds the tensors.
        sizes: Sizes of the jobs' outputs.
        transport: Takes messages and tensors to other nodes.
    """

    def __init__(
        self,
        machine: SteppedMachine[Any, MachineEffectT],
        compute: Compute,
        arena: ArenaAllocator,
        sizes: Sizes,
        transport: TransportT,
    ) -> None:
        self._machine = machine
        self._transport = transport
        self._compute = compute
        self._arena = arena
        self._sizes = sizes
        self.stopped: asyncio.Future[fx.Stop] = asyncio.get_running_loop().create_future()
        self._clock = asyncio.get_running_loop().time
        self._lost_s = self._now_lost_s()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s: float | None = None
        self._inbox: deque[MachineEventT | ev.Event] = deque()
        self._stepping = False
        self.broken = False
        """The core has failed. It gets no further events."""
        self._regions: dict[TensorId, TensorRegion] = {}
        """The tensors that the machine owns."""
        self._compute_s = self._copy_s = self._transfer_s = 0.0
        self._next_tensor = 1
        self._tasks = TaskSet()

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the machine."""
        self._compute.ended.add_done_callback(self._compute_ended)
        self._take_turns(self._machine.start)

    async def close(self) -> None:
        """Stop the timer, and cancel all tasks."""
        self._compute.ended.remove_done_callback(self._compute_ended)
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()
        self._close_files(self._regions.values())

    @property
    def compute_s(self) -> float:
        """The time that the compute process has worked, in seconds."""
        return self._compute_s

    @property
    def _term(self) -> int:
        """The term of the core's view."""
        raise NotImplementedError

    def _perform(self, effect: MachineEffectT) -> None:
        """Do what the core wants, as far as all drivers do it alike."""
        match effect:
            case fx.Send(to, message, way):
                self._transport.send(to, self._term, message, way)
            case fx.SendTensor(to, message, tensor, way):
                region = self._regions[tensor]
                assert isinstance(region, ArenaRegion), "a state travels in chunks"
                self._transport.send_tensor(to, self._term, message, region.view, tensor, way)
            case fx.StartJob():
                self._start_job(effect)
            case fx.FreeTensor(tensor):
                self._free(tensor)
            case fx.Stop():
                self._stop(effect)

    def _stop(self, effect: fx.Stop) -> None:
        if not self.stopped.done():
            self.stopped.set_result(effect)

    # --- the loop -----------------------------------------------------------------------------

    def post(self, event: MachineEventT | ev.Event) -> None:
        """Step the machine with an event: now, or after the current step."""
        if self.broken:
            return
        self._inbox.append(event)
        if not self._stepping:
            self._take_turns()

    def _take_turns(self, first: Callable[[float], Sequence[MachineEffectT]] | None = None) -> None:
        """Step the machine with all events of the inbox, after `first` if that is given."""
        self._stepping = True
        try:
            if first is not None:
                self._perform_all(first(self._clock()))
            lost_s, self._lost_s = self._lost_s, self._now_lost_s()
            if first is None and self._lost_s - lost_s > ev.ASLEEP_LEAST_S:
                self._inbox.appendleft(ev.Woke(self._lost_s - lost_s))
            while self._inbox:
                self._perform_all(self._machine.step(self._clock(), self._inbox.popleft()))
        except Exception as error:  # noqa: BLE001 - the top of the driver.
            self._break(error)
        finally:
            self._stepping = False

    @staticmethod
    def _now_lost_s() -> float:
        """Return how long this process has not run so far, if its event loop knows."""
        loop = asyncio.get_running_loop()
        return loop.lost_s if isinstance(loop, RunningLoop) else 0.0

    def _break(self, error: Exception) -> None:
        """Stop the node after a bug of ours: going on would train on a broken state.

        The error is set on `stopped`. Peers see a crash, which the protocol survives.
        """
        self.broken = True
        self._inbox.clear()
        if not self.stopped.done():
            self.stopped.set_exception(error)
        else:
            raise error

    def _perform_all(self, effects: Sequence[MachineEffectT]) -> None:
        for effect in effects:
            self._perform(effect)
        self._set_timer()

    def _set_timer(self) -> None:
        deadline_s = self._machine.deadline_s
        if deadline_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_s = deadline_s
        if deadline_s is not None and not self.stopped.done():
            self._timer = asyncio.get_running_loop().call_at(deadline_s, self._expire)

    def _expire(self) -> None:
        self._timer = self._timer_s = None
        deadline_s = self._machine.deadline_s
        if deadline_s is not None and self._clock() >= deadline_s:
            self.post(ev.DeadlinePassed())
        else:
            # The loop may wake up early by one tick of its clock. The machine never sees that.
            self._set_timer()

    def _compute_ended(self, ended: asyncio.Future[str]) -> None:
        """Tell the machine that the compute process has ended. Its jobs have failed already."""
        if not self.stopped.done() and not ended.cancelled():
            self.post(ev.JobFailed(NO_JOB, ended.result(), fatal=True))

    @property
    def part_bytes_max(self) -> int:
        """Most bytes of a part of a gradient here; 0 before the stage is built."""
        return self._sizes.part_bytes_max

    # --- tensors ------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> ArenaRegion | None:
        """Return a region for an incoming tensor. The caller owns it; None: there is no room."""
        return self._arena.allocate(size_bytes)

    def keep(self, region: TensorRegion, digest: bytes = b"") -> ev.Tensor:
        """Take a region over as a tensor of the machine, which frees it; see `ev.Tensor`."""
        tensor = TensorId(self._next_tensor)
        self._next_tensor += 1
        self._regions[tensor] = region
        return ev.Tensor(tensor, region.num_bytes, digest)

    def _free(self, tensor: TensorId) -> None:
        self._regions.pop(tensor).release()

    def tensor_arrived(
        self, received: ev.Received, region: ArenaRegion, digest: bytes = b""
    ) -> None:
        """Take a whole tensor. `received` is its message, without the tensor's id."""
        self.post(replace(received, tensor=self.keep(region, digest)))

    def tensor_sent(self, sent: ev.TensorSent) -> None:
        """Note that a tensor has arrived at its receiver."""
        self._transfer_s += sent.duration_s
        self.post(sent)

    # --- jobs ---------------------------------------------------------------------------------

    def _start_job(self, effect: fx.StartJob) -> None:
        outputs: list[TensorRegion] = []
        for size_bytes in output_bytes(effect.job, self._sizes):
            region = self._arena.allocate(size_bytes)
            if region is None:
                reason = "no room for its result"
                self._job_failed(ev.JobFailed(effect.job_id, reason, fatal=False), outputs)
                return
            outputs.append(region)
        inputs = tuple(self._regions[each] for each in effect.inputs)
        taker = self._taker_of(effect)
        future = taker.submit(effect.job, inputs=inputs, outputs=tuple(outputs))
        future.add_done_callback(lambda done: self._job_done(effect, outputs, done))

    def _taker_of(self, effect: fx.StartJob) -> JobTaker:  # noqa: ARG002 - for subclasses.
        """Return the process that runs a job."""
        return self._compute

    def _job_done(
        self, effect: fx.StartJob, outputs: list[TensorRegion], done: asyncio.Future[Reply]
    ) -> None:
        # Always read the exception, or asyncio would report it as never retrieved.
        error = None if done.cancelled() else done.exception()
        if self.stopped.done() or done.cancelled():
            # The arena ends with the node. A file would stay.
            self._close_files(outputs)
            return
        if error is not None:
            fatal = not (isinstance(error, JobError) or effect.job.beside_device)
            short = isinstance(error, JobError) and error.error["code"] == OUT_OF_MEMORY
            failed = ev.JobFailed(effect.job_id, str(error), fatal, out_of_memory=short)
            self._job_failed(failed, outputs)
            return
        try:
            self._take_reply(effect, outputs, done.result())
        except Exception as unexpected:  # noqa: BLE001 - the top of the driver.
            self._break(unexpected)

    def _close_files(self, regions: Iterable[TensorRegion]) -> None:
        for region in regions:
            if isinstance(region, CopyFile):
                region.close()

    def _goes_on(self, effect: fx.StartJob, reply: Reply) -> bool:  # noqa: ARG002 - for subclasses.
        """Look at a reply without tensors; return whether the job goes on all the same."""
        return False

    def _take_reply(self, effect: fx.StartJob, outputs: list[TensorRegion], reply: Reply) -> None:
        if not effect.job.beside_device:
            self._compute_s += reply.duration_s - reply.copy_s
            self._copy_s += reply.copy_s
        if not outputs and self._goes_on(effect, reply):
            return
        tensors = tuple(self.keep(region) for region in outputs)
        self.post(ev.JobFinished(effect.job_id, reply.result, tensors, reply.duration_s))

    def _job_failed(self, failed: ev.JobFailed, outputs: Iterable[TensorRegion]) -> None:
        for region in outputs:
            region.release()
        self.post(failed)
