"""The driver of a `NodeMachine`. See `decod.driver.machine_driver`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from typing_extensions import override

from decod.driver.arena import ArenaAllocator, CopyFile, Sizes, StateCopies, TensorRegion
from decod.driver.compute import Compute, ComputeDiedError, JobError, PlanningProcess, Reply
from decod.driver.fetching import (
    STOPPED,
    Requests,
    ServedState,
    StateDisk,
    StateTransport,
    fetched_state,
    taken,
)
from decod.driver.machine_driver import JobTaker, MachineDriver
from decod.ids import NodeId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core.context import Promise
from decod.protocol.core.events import Event
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.scopes import Way
from decod.protocol.core.view import Member
from decod.protocol.facts import LeaderFacts, NodeFacts
from decod.protocol.node_machine import NodeMachine
from decod.texts import clip, why_of
from decod.train.checkpoint.description import Transfer
from decod.train.checkpoint.entries import StateBytes

T = TypeVar("T")


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
    copies: StateCopies | None = None
    """Files for large states. If None, all states are in memory."""
    keep_vote: Callable[[Promise], Awaitable[bool]] = _abstain
    """Writes a vote to disk; returns whether that succeeded. The default never votes."""
    on_bans: Callable[[fx.UseBans | fx.ContestBans | fx.BanLiar], None] = _ignore_bans
    """Called with what the core wants of the list of bans."""


class NodeDriver(MachineDriver[ev.Event, fx.Effect]):
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
        super().__init__(machine, compute, arena, sizes)
        self.facts = NodeFacts(machine)
        self._on_note = ports.on_note
        self._on_run_complete = ports.on_run_complete
        self._on_work = ports.on_work
        self._keep_vote = ports.keep_vote
        self._on_bans = ports.on_bans
        self.transfer: Transfer | None = None
        """Progress of the state that is being fetched; None if there is none."""
        self.disk = ports.disk
        self._transport = ports.transport
        self._planning = ports.planning
        self._copies = ports.copies
        self._start_s = self._clock()
        self._requests = Requests()

    @override
    async def close(self) -> None:
        """Stop the timer, cancel all tasks, and answer open requests."""
        await super().close()
        self._requests.close()

    @override
    def _perform(self, effect: fx.Effect) -> None:  # noqa: C901 - one line an effect.
        transport = self._transport
        term = self.facts.view.term
        match effect:
            case fx.Send(to, message, way):
                transport.send(to, term, message, way)
            case fx.SendTensor(to, message, tensor, way):
                data = self._regions[tensor].view
                transport.send_tensor(to, term, message, data, tensor, way)
            case fx.StartJob():
                self._start_job(effect)
            case fx.FreeTensor(tensor):
                self._free(tensor)
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
                self._stop(effect)

    async def _persist(self, promise: Promise) -> None:
        """Write a vote to disk. If that fails, the machine is not told, and so does not vote."""
        if await self._keep_vote(promise) and not self.stopped.done():
            assert promise.candidate is not None
            self.post(ev.VotePersisted(promise.term, promise.candidate))

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

    @override
    def _taker_of(self, effect: fx.StartJob) -> JobTaker:
        return self._planning if effect.job.beside_device else self._compute

    @override
    def _take_reply(self, effect: fx.StartJob, outputs: list[TensorRegion], reply: Reply) -> None:
        if isinstance(effect.job, jobs.Build):
            num_parameters = reply.result.num_parameters
            self._sizes = self._sizes.of_stage(effect.job.stage_index, num_parameters)
        if isinstance(effect.job, jobs.Snapshot) and not outputs:
            self._count_time(effect, reply)
            self._copy_state(effect, reply)
        else:
            super()._take_reply(effect, outputs, reply)

    def _copy_state(self, effect: fx.StartJob, reply: Reply) -> None:
        """Ask for the bytes of a snapshot, now that its size is known."""
        num_bytes = reply.result.num_bytes
        region = self._room_for_state(num_bytes)
        if isinstance(region, str):
            self._job_failed(ev.JobFailed(effect.job_id, region, fatal=False), ())
            return
        assert isinstance(effect.job, jobs.Snapshot)
        if not effect.job.with_optimizer and not isinstance(region, CopyFile):
            self._sizes = replace(self._sizes, parameters_copy_bytes=num_bytes)
        future = self._compute.submit(effect.job, outputs=(region,))
        future.add_done_callback(lambda done: self._job_done(effect, [region], done))

    def _room_for_state(self, num_bytes: int) -> TensorRegion | str:
        """Return where a state goes, or why there is no room for it."""
        problem = ""
        try:
            file = self._copies.create(num_bytes) if self._copies is not None else None
        except OSError as error:
            file = None
            problem = f": {why_of(error)}"
        # A full disk need not keep a host with much memory from giving its state.
        region = file or self._arena.allocate(num_bytes)
        return region or f"no room for a copy of the state{problem}"

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

    def allocate_state(self, size_bytes: int) -> StateBytes | None:
        """Return where an incoming state goes, until `adopt` or `tensor_failed`.

        None: there is no room.
        """
        region = self._room_for_state(size_bytes)
        if isinstance(region, str):
            return None
        self._incoming[id(region.view)] = region
        return region.view

    def adopt(self, buffer: StateBytes) -> ev.Tensor:
        """Turn a buffer of `allocate` or `allocate_state` into a tensor of the machine."""
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

    async def run_copy(self, job: jobs.Snapshot) -> ServedState | str:
        """Run a job that copies a state; return the copy, or why there is none."""
        # A task of its own, which is not cancelled: the device may be writing into the region.
        return await taken(self._tasks.start(self._run_copy(job)))

    async def _run_copy(self, job: jobs.Snapshot) -> ServedState | str:
        region: TensorRegion | str = ""
        try:
            sized = await self._compute.submit(job)
            region = self._room_for_state(sized.result.num_bytes)
            if isinstance(region, str):
                return region
            reply = await self._compute.submit(job, outputs=(region,))
        except (JobError, ComputeDiedError) as error:
            if not isinstance(region, str):
                self._give_back(region)
            return clip(str(error), 200)
        taken_copy = reply.result
        release = partial(self._give_back, region)
        return ServedState(taken_copy.iteration, taken_copy.manifest, region.view, release)

    def _keep_state(self, effect: fx.KeepState) -> None:
        region = self._pop(effect.tensor)
        if self.disk is None:
            self._give_back(region)
            return
        release = partial(self._give_back, region)
        served = ServedState(effect.iteration, effect.manifest, region.view, release)
        self.disk.keep(self.facts.own_stage, effect.parameter_hash, served)

    def _serve(self, effect: fx.ServeState) -> None:
        region = self._pop(effect.tensor)
        readers = set(effect.request_ids)

        def release(request_id: int) -> None:
            readers.discard(request_id)
            if not readers:
                self._give_back(region)

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


class CoreHandle:
    """A node's core as the other parts of its daemon hold it, from before its start.

    The core starts late, since its device must be measured first.
    """

    def __init__(self) -> None:
        self._driver: NodeDriver | None = None

    def attach(self, driver: NodeDriver) -> None:
        """Stand for this driver's core from now on."""
        self._driver = driver

    @property
    def driver(self) -> NodeDriver:
        """The driver of a core that has started."""
        assert self._driver is not None
        return self._driver

    @property
    def started(self) -> bool:
        return self._driver is not None

    @property
    def runs(self) -> bool:
        """Return whether the core has started, and has not stopped."""
        return self._driver is not None and not self._driver.stopped.done()

    @property
    def facts(self) -> NodeFacts | None:
        """The facts that the core knows; None before it has started."""
        return self._driver.facts if self._driver is not None else None

    @property
    def leading(self) -> LeaderFacts | None:
        """The facts that the core knows as the leader; None if it does not lead, or has not
        started."""
        return self._driver.facts.leading if self._driver is not None else None

    def post(self, event: Event) -> None:
        """Step the core with an event if it runs."""
        if self.runs:
            self.driver.post(event)
