"""The asyncio driver: feeds a `NodeMachine` with events and carries its effects out.

It is the only code of a daemon that reads the clock for the core. It never waits. It steps an event
at once and performs the effects at once. Anything that takes time (a send, a job, a fetch) comes
back as another event. So the machine sees one event at a time, in the order in which they happened,
and a traced run can be replayed.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from decod.driver.arena import ArenaAllocator, ArenaRegion
from decod.driver.compute import Compute, ComputeDiedError, JobError, Reply
from decod.driver.fetching import ServedState, StateDisk, StateTransport, fetched_state
from decod.driver.jobs import Sizes, manifest_of, request_of, result_of
from decod.driver.planning import PlanningProcess
from decod.driver.requests import STOPPED, Requests, taken
from decod.ids import JobId, NodeId, TensorId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core.identity import Promise
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.forwarding import Way
from decod.protocol.core.view import Member
from decod.protocol.facts import NodeFacts
from decod.protocol.node import NodeMachine
from decod.tasks import TaskSet
from decod.texts import clip
from decod.train.checkpoint.transfer import Transfer

T = TypeVar("T")

NO_JOB = JobId(0)
"""Stands for no job, when the compute process has failed. The core numbers its jobs from 1."""


def _forget(_: fx.CountWork) -> None:
    """Count nothing."""


async def _abstain(_: Promise) -> bool:
    return False


def _ignore_bans(_: fx.UseBans | fx.ContestBans | fx.BanLiar) -> None:
    """Go by no list."""


class ProbeResult(Protocol):
    """The result of a probe of the link to a peer."""

    @property
    def latency_s(self) -> float:
        """Latency in one direction."""

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bandwidth towards the peer."""


class Transport(StateTransport, Protocol):
    """The way by which messages and tensors leave this host."""

    def send(self, to: NodeId, term: int, message: Message, way: Way | None = None) -> None:
        """Queue a control message."""

    def send_tensor(
        self,
        to: NodeId,
        term: int,
        message: Message,
        data: memoryview,
        token: object = None,
        way: Way | None = None,
    ) -> None:
        """Queue a bulk message with its tensor. `token` comes back when sending has ended."""

    def use_members(self, members: tuple[Member, ...]) -> None:
        """Dial these members from now on, and forget all others."""

    async def probe(self, to: NodeId, term: int, size_bytes: int) -> ProbeResult | None:
        """Time a round trip and a transfer of `size_bytes`; return None if that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverPorts:
    """The receivers of a core's effects, beside its compute process."""

    transport: Transport
    on_note: Callable[[fx.Note], None]
    """Called with every `Note`."""
    on_run_complete: Callable[[int], None]
    """Called at the leader when all iterations are done."""
    planning: PlanningProcess
    """Runs the jobs beside the device."""
    on_work: Callable[[fx.CountWork], None] = _forget
    """Called with the work of each committed iteration."""
    disk: StateDisk | None = None
    """Keeps states beyond this process's life. If None, no states are kept."""
    keep_vote: Callable[[Promise], Awaitable[bool]] = _abstain
    """Writes a vote to disk; returns whether that succeeded. The default never votes."""
    on_bans: Callable[[fx.UseBans | fx.ContestBans | fx.BanLiar], None] = _ignore_bans
    """Called with what the core wants of the list of bans."""


class NodeDriver:
    """One node: its machine, its compute process, its transport.

    Args:
        machine: The core.
        compute: Runs the jobs of the device.
        arena: Holds the tensors.
        sizes: Sizes of the jobs' outputs.
        ports: Where the core's effects go.
    """

    def __init__(
        self,
        machine: NodeMachine,
        compute: Compute,
        arena: ArenaAllocator,
        sizes: Sizes,
        ports: DriverPorts,
    ) -> None:
        self.facts = NodeFacts(machine)
        self._machine = machine
        self._arena = arena
        self.stopped: asyncio.Future[fx.Stop] = asyncio.get_running_loop().create_future()
        self._compute = compute
        self._sizes = sizes
        self._on_note, self._on_run_complete = ports.on_note, ports.on_run_complete
        self._on_work, self._keep_vote = ports.on_work, ports.keep_vote
        self._on_bans = ports.on_bans
        self.transfer: Transfer | None = None
        """Progress of the state that is being fetched; None if there is none."""
        self.disk, self._transport = ports.disk, ports.transport
        self._planning = ports.planning
        self._clock = asyncio.get_running_loop().time
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s: float | None = None
        self._inbox: deque[ev.Event] = deque()
        self._stepping = False
        self.broken = False
        """The core has failed. It gets no further events."""
        self._regions: dict[TensorId, ArenaRegion] = {}
        self._incoming: dict[int, ArenaRegion] = {}
        self._lent: dict[int, ArenaRegion] = {}
        self._compute_s = self._copy_s = self._transfer_s = 0.0
        self._start_s = self._clock()
        self._next_tensor = 1
        self._requests = Requests()
        self._tasks = TaskSet()

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the machine, which then asks to join the run."""
        self._compute.ended.add_done_callback(self._compute_ended)
        self._take_turns(self._machine.start)

    async def close(self) -> None:
        """Stop the timer, cancel all tasks, and answer open requests."""
        self._compute.ended.remove_done_callback(self._compute_ended)
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()
        self._requests.close()

    # --- the loop -----------------------------------------------------------------------------

    def post(self, event: ev.Event) -> None:
        """Step the machine with an event: now, or after the current step."""
        if self.broken:
            return
        self._inbox.append(event)
        if not self._stepping:
            self._take_turns()

    def _take_turns(self, first: Callable[[float], list[fx.Effect]] | None = None) -> None:
        """Step the machine with all events of the inbox, after `first` if that is given."""
        self._stepping = True
        try:
            if first is not None:
                self._perform_all(first(self._clock()))
            while self._inbox:
                self._perform_all(self._machine.step(self._clock(), self._inbox.popleft()))
        except Exception as error:  # noqa: BLE001 - the top of the driver.
            self._break(error)
        finally:
            self._stepping = False

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

    def _perform_all(self, effects: list[fx.Effect]) -> None:
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

    def _perform(self, effect: fx.Effect) -> None:  # noqa: C901 - one line an effect.
        transport, term = self._transport, self.facts.view.term
        match effect:
            case fx.Send(to, message, way):
                transport.send(to, term, message, way)
            case fx.SendTensor(to, message, tensor, way):
                data = self._regions[tensor].view
                transport.send_tensor(to, term, message, data, tensor, way)
            case fx.StartJob():
                self._start_job(effect)
            case fx.FreeTensor(tensor):
                self._arena.free(self._regions.pop(tensor))
            case fx.FetchState():
                self._tasks.start(self._fetch(effect))
            case fx.ServeState():
                self._serve(effect)
            case fx.KeepState():
                self._keep_state(effect)
            case fx.MirrorState() | fx.ReadCheckpoint() | fx.ReadKept():
                _use_disk(self.disk, effect)
            case fx.RefuseState(request_id, reason):
                self._requests.answer(request_id, reason)
            case fx.ProbeLink(to, size_bytes):
                self._tasks.start(self._probe(to, term, size_bytes))
            case fx.PersistVote(term, candidate):
                self._tasks.start(self._persist(Promise(term, candidate)))
            case fx.UseMembers(members):
                transport.use_members(members)
            case fx.UseBans() | fx.ContestBans() | fx.BanLiar():
                self._on_bans(effect)
            case fx.Note():
                self._on_note(effect)
            case fx.CountWork():
                self._on_work(effect)
            case fx.CompleteRun(iteration):
                self._on_run_complete(iteration)
            case fx.Stop():
                if not self.stopped.done():
                    self.stopped.set_result(effect)

    def _compute_ended(self, ended: asyncio.Future[str]) -> None:
        """Tell the machine that the compute process has ended. Its jobs have failed already."""
        if not self.stopped.done() and not ended.cancelled():
            self.post(ev.JobFailed(NO_JOB, ended.result(), fatal=True))

    @property
    def part_bytes_max(self) -> int:
        """Most bytes of a part of a gradient here; 0 before the stage is built."""
        return self._sizes.part_bytes_max

    async def _persist(self, promise: Promise) -> None:
        """Write a vote to disk. If that fails, the machine is not told, and so does not vote."""
        if await self._keep_vote(promise) and not self.stopped.done():
            assert promise.candidate is not None
            self.post(ev.VotePersisted(promise.term, promise.candidate))

    # --- tensors ------------------------------------------------------------------------------

    def _keep(self, region: ArenaRegion) -> ev.Tensor:
        tensor = TensorId(self._next_tensor)
        self._next_tensor += 1
        self._regions[tensor] = region
        return ev.Tensor(tensor, region.size_bytes)

    def allocate(self, size_bytes: int) -> memoryview | None:
        """Return a buffer for an incoming tensor, until `tensor_arrived` or `tensor_failed`."""
        region = self._arena.allocate(size_bytes)
        if region is None:
            return None
        self._incoming[id(region.view)] = region
        return region.view

    def regions(self, buffers: list[memoryview]) -> tuple[ArenaRegion, ...]:
        """Return the regions of buffers that `allocate` or `request_state` has given."""
        return tuple(self._incoming.get(id(b)) or self._lent[id(b)] for b in buffers)

    def tensor_arrived(self, received: ev.Received, buffer: memoryview) -> None:
        """Take a whole tensor. `received` is its message, without the tensor's id."""
        tensor = self._keep(self._incoming.pop(id(buffer)))
        self.post(replace(received, tensor=tensor))

    def tensor_failed(self, buffer: memoryview) -> None:
        self._arena.free(self._incoming.pop(id(buffer)))

    def tensor_sent(
        self, to: NodeId, token: object, *, duration_s: float, size_bytes: int, share: float = 1.0
    ) -> None:
        assert isinstance(token, int)
        self._transfer_s += duration_s
        self.post(ev.TensorSent(to, TensorId(token), size_bytes, duration_s, share))

    def send_failed(self, failed: ev.SendFailed, token: object) -> None:
        """Note a failed send. `failed` lacks the tensor's id, which is in `token`."""
        tensor = TensorId(token) if isinstance(token, int) else None
        self.post(replace(failed, tensor=tensor))

    async def _probe(self, to: NodeId, term: int, size_bytes: int) -> None:
        found = await self._transport.probe(to, term, size_bytes)
        if self.stopped.done():
            return
        if found is None:
            self.post(ev.LinkMeasured(to))
        else:
            self.post(ev.LinkMeasured(to, found.latency_s, found.bandwidth_bytes_per_s))

    def timing(self) -> dict[str, float]:
        """Return the seconds since the start, and how the compute process spent them.

        `transfer_s` is the sum of the times of all sent tensors, which overlap.
        """
        wall_s = self._clock() - self._start_s
        return {
            "wall_s": wall_s,
            "compute_s": self._compute_s,
            "copy_s": self._copy_s,
            "wait_s": max(0.0, wall_s - self._compute_s - self._copy_s),
            "transfer_s": self._transfer_s,
            "num_passes": self.facts.num_passes,
        }

    # --- jobs ---------------------------------------------------------------------------------

    def _start_job(self, effect: fx.StartJob) -> None:
        request = request_of(effect.job, self._sizes)
        outputs: list[ArenaRegion] = []
        for size_bytes in request.output_bytes:
            region = self._arena.allocate(size_bytes)
            if region is None:
                self._job_failed(effect, outputs, "no room for its result", fatal=False)
                return
            outputs.append(region)
        inputs = tuple(self._regions[tensor] for tensor in effect.inputs)
        taker = self._planning if effect.job.beside_device else self._compute
        future = taker.submit(request.kind, request.fields, inputs=inputs, outputs=tuple(outputs))
        future.add_done_callback(lambda done: self._job_done(effect, outputs, done))

    def _job_done(
        self, effect: fx.StartJob, outputs: list[ArenaRegion], done: asyncio.Future[Reply]
    ) -> None:
        # Always read the exception, or asyncio would report it as never retrieved.
        error = None if done.cancelled() else done.exception()
        if self.stopped.done() or done.cancelled():
            return
        if error is not None:
            fatal = not (isinstance(error, JobError) or effect.job.beside_device)
            self._job_failed(effect, outputs, str(error), fatal=fatal)
            return
        try:
            self._take_reply(effect, outputs, done.result())
        except Exception as unexpected:  # noqa: BLE001 - the top of the driver.
            self._break(unexpected)

    def _take_reply(self, effect: fx.StartJob, outputs: list[ArenaRegion], reply: Reply) -> None:
        if not effect.job.beside_device:
            self._compute_s += reply.duration_s - reply.copy_s
            self._copy_s += reply.copy_s
        if isinstance(effect.job, jobs.Build):
            num_parameters = reply.result["num_parameters"]
            self._sizes = self._sizes.of_stage(effect.job.stage_index, num_parameters)
        if isinstance(effect.job, jobs.Snapshot) and not outputs:
            self._copy_state(effect, reply)
            return
        result = result_of(effect.job, reply.result)
        tensors = tuple(self._keep(region) for region in outputs)
        self.post(ev.JobFinished(effect.job_id, result, tensors, reply.duration_s))

    def _copy_state(self, effect: fx.StartJob, reply: Reply) -> None:
        """Ask for the bytes of a snapshot, now that its size is known."""
        region = self._arena.allocate(reply.result["num_bytes"])
        if region is None:
            self._job_failed(effect, [], "no room for a copy of the state", fatal=False)
            return
        request, outputs = request_of(effect.job, self._sizes), [region]
        future = self._compute.submit(request.kind, request.fields, outputs=(region,))
        future.add_done_callback(lambda done: self._job_done(effect, outputs, done))

    def _job_failed(
        self, effect: fx.StartJob, outputs: list[ArenaRegion], reason: str, *, fatal: bool
    ) -> None:
        for region in outputs:
            self._arena.free(region)
        self.post(ev.JobFailed(effect.job_id, reason, fatal))

    # --- state --------------------------------------------------------------------------------

    async def _fetch(self, effect: fx.FetchState) -> None:
        own = self.facts.node_id
        self.post(await fetched_state(self, self._transport, effect, own=own))

    def fetching(self, transfer: Transfer | None) -> None:
        """Show the progress of a fetch from now on; None: of none."""
        self.transfer = transfer

    def note(self, note: fx.Note) -> None:
        """Report an event that the machine does not see."""
        self._on_note(note)

    def adopt(self, buffer: memoryview) -> ev.Tensor:
        """Turn a buffer of `allocate` into a tensor of the machine."""
        return self._keep(self._incoming.pop(id(buffer)))

    async def request_state(
        self, stage_index: int, iteration: int, *, with_optimizer: bool
    ) -> ServedState | str:
        """Return a copy of this stage's state, or why there is none.

        The caller must call the copy's `release`. A cancelled caller need not.
        """
        if self.stopped.done():
            return STOPPED
        request_id, answer = self._requests.open()
        self.post(ev.StateRequested(request_id, stage_index, iteration, with_optimizer))
        return await taken(answer)

    async def run_copy(self, kind: str, fields: dict[str, Any]) -> ServedState | str:
        """Run a job that copies a state; return the copy, or why there is none."""
        # A task of its own, which is not cancelled: the device may be writing into the region.
        return await taken(self._tasks.start(self._run_copy(kind, fields)))

    async def _run_copy(self, kind: str, fields: dict[str, Any]) -> ServedState | str:
        region: ArenaRegion | None = None
        try:
            described = await self._compute.submit(kind, fields)
            region = self._arena.allocate(described.result["num_bytes"])
            if region is None:
                return "no room for a copy"
            reply = await self._compute.submit(kind, fields, outputs=(region,))
        except (JobError, ComputeDiedError) as error:
            if region is not None:
                self._arena.free(region)
            return clip(str(error), 200)
        manifest = manifest_of(reply.result)
        self._lent[id(region.view)] = region
        copied = region

        def release() -> None:
            self._arena.free(self._lent.pop(id(copied.view)))

        return ServedState(reply.result["iteration"], manifest, copied.view, release)

    def _keep_state(self, effect: fx.KeepState) -> None:
        region = self._regions.pop(effect.tensor)
        if self.disk is None:
            self._arena.free(region)
            return
        release = partial(self._arena.free, region)
        served = ServedState(effect.iteration, effect.manifest, region.view, release)
        self.disk.keep(self.facts.own_stage, effect.parameter_hash, served)

    def _serve(self, effect: fx.ServeState) -> None:
        region = self._regions.pop(effect.tensor)
        readers = set(effect.request_ids)
        self._lent[id(region.view)] = region

        def release(request_id: int) -> None:
            readers.discard(request_id)
            if not readers:
                del self._lent[id(region.view)]
                self._arena.free(region)

        for request_id in effect.request_ids:
            state = ServedState(
                effect.iteration, effect.manifest, region.view, partial(release, request_id)
            )
            if not self._requests.answer(request_id, state):
                state.release()


def _use_disk(
    disk: StateDisk | None, effect: fx.MirrorState | fx.ReadCheckpoint | fx.ReadKept
) -> None:
    if disk is None:
        return
    match effect:
        case fx.MirrorState():
            disk.mirror(effect)
        case fx.ReadCheckpoint(iteration):
            disk.read_checkpoint(iteration)
        case fx.ReadKept(states):
            disk.read_kept(states)
