"""The driver of a `NodeMachine`, which also fetches a stage's state and serves copies of it.

See `decod.driver.machine_driver` for drivers in general.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from typing_extensions import override

from decod.driver.arena import ArenaAllocator, CopyFile, Sizes, StateCopies, TensorRegion
from decod.driver.compute import (
    Compute,
    ComputeDiedError,
    JobError,
    JobTaker,
    PlanningProcess,
    Reply,
)
from decod.driver.machine_driver import STOPPED, MachineDriver, MessageTransport
from decod.ids import NodeId
from decod.limits import StageBlocks
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core.context import Promise
from decod.protocol.core.era import Kept
from decod.protocol.core.events import Event
from decod.protocol.core.view import Member
from decod.protocol.facts import LeaderFacts, NodeFacts
from decod.protocol.node_machine import NodeMachine
from decod.texts import clip, why_of
from decod.train.checkpoint.description import (
    Chunk,
    Description,
    QuietSink,
    StateSink,
    Transfer,
    parse_description,
)
from decod.train.checkpoint.entries import StateBytes

_LOAD_BYTES_PER_S = 2e8
"""Rough speed of verifying and loading a state that has arrived: it hashes every byte twice."""

_PROGRESS_S = 30.0
"""Time between two reports of progress."""


@dataclass(frozen=True, slots=True)
class ServedState:
    """A copy of this stage's state. Call `release` when it has been read."""

    iteration: int
    manifest: str
    data: StateBytes
    release: Callable[[], None]


class StateDisk(Protocol):
    """The states of stages that this host keeps on its disk."""

    def keep(self, stage_index: int, parameter_hash: str, served: ServedState) -> None:
        """Write a state in the background, and release it even if that fails."""

    def mirror(self, effect: fx.MirrorState) -> None:
        """Fetch another stage's state from its members, and write it."""

    def read_checkpoint(self, iteration: int) -> None:
        """Check a checkpoint, then tell the machine whether it, or which older one, is whole."""

    def read_kept(self, wanted: tuple[Kept, ...]) -> None:
        """Read these states; tell the machine which are damaged, and when all were read."""

    async def searched(self) -> None:
        """Wait until the disk has been searched for states, or until that takes too long."""

    def expect(self, description: Description) -> None:
        """Take in what is about to be fetched: its chunks are asked for next."""

    def local(self, chunk: Chunk) -> bytes | None:
        """Return a chunk's bytes if this host has or can read them. Called in a thread."""

    async def load(
        self, wanted: fx.FetchState, allocate: Callable[[int], StateBytes | None]
    ) -> str | None:
        """Read a state into a buffer; return its description, or None if it is not on disk."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The progress of a state that is being fetched, for people."""

    percent: float
    bytes_per_s: float
    """Mean rate of the bytes from donors."""
    left_s: float | None
    """Time until this node can take microbatches, at the rate so far. None if it is not known."""


def outlook(transfer: Transfer, now_s: float) -> Outlook:
    """Return the progress of a transfer at `now_s`, on the loop's clock."""
    seconds = max(1e-6, now_s - transfer.begun_s)
    rate = (transfer.num_arrived - transfer.num_local) / seconds
    missing = transfer.num_bytes - transfer.num_arrived
    percent = 100 * transfer.num_arrived / max(1, transfer.num_bytes)
    left_s = missing / rate + transfer.num_bytes / _LOAD_BYTES_PER_S if rate else None
    return Outlook(percent, rate, left_s)


class Requests:
    """The open requests for copies of this node's state, by number. The machine answers later."""

    def __init__(self) -> None:
        self._next = 1
        self._open: dict[int, asyncio.Future[ServedState | str]] = {}

    def open(self) -> "tuple[int, asyncio.Future[ServedState | str]]":
        """Open a request; return its number and the future of its answer."""
        request_id = self._next
        future = asyncio.get_running_loop().create_future()
        self._next += 1
        self._open[request_id] = future
        return request_id, future

    def answer(self, request_id: int, answer: ServedState | str) -> bool:
        """Answer a request; return False if its caller was cancelled."""
        future = self._open.pop(request_id)
        if future.cancelled():
            return False
        future.set_result(answer)
        return True

    def close(self) -> None:
        """Answer all open requests with the reason that this node has stopped."""
        for future in self._open.values():
            if not future.done():
                future.set_result(STOPPED)


async def taken(future: "asyncio.Future[ServedState | str]") -> ServedState | str:
    """Return a future's result. If the caller is cancelled, release a copy that comes later."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(_release)
        raise


def _release(future: "asyncio.Future[ServedState | str]") -> None:
    if not future.cancelled() and future.exception() is None:
        state = future.result()
        if isinstance(state, ServedState):
            state.release()


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


class Transport(MessageTransport, Protocol):
    """The network as a node's driver sees it."""

    def use_members(self, members: tuple[Member, ...]) -> None:
        """Dial these members from now on, and forget all others."""

    async def probe(self, to: NodeId, term: int, size_bytes: int) -> ProbeResult | None:
        """Time a round trip and a transfer of `size_bytes`; return None if that failed."""

    async def fetch_state(self, wanted: fx.FetchState, sink: StateSink) -> str:
        """Fetch a state into the sink's last buffer; return its description.

        Raises:
            DecodError: No donor gave the whole state.
        """


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


class NodeDriver(MachineDriver[ev.Event, fx.Effect, Transport]):
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
        super().__init__(machine, compute, arena, sizes, ports.transport)
        self.facts = NodeFacts(machine)
        self._on_note = ports.on_note
        self._on_run_complete = ports.on_run_complete
        self._on_work = ports.on_work
        self._keep_vote = ports.keep_vote
        self._on_bans = ports.on_bans
        self.transfer: Transfer | None = None
        """Progress of the state that is being fetched; None if there is none."""
        self.disk = ports.disk
        self._planning = ports.planning
        self._copies = ports.copies
        self._start_s = self._clock()
        self._requests = Requests()

    @override
    async def close(self) -> None:
        """Stop the timer, cancel all tasks, and answer open requests."""
        await super().close()
        self._requests.close()

    @property
    @override
    def _term(self) -> int:
        return self.facts.view.term

    @override
    def _perform(self, effect: fx.Effect) -> None:  # noqa: C901 - one line an effect.
        match effect:
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
                self._tasks.start(self._probe(to, self._term, size_bytes))
            case fx.PersistVote(term, candidate):
                self._tasks.start(self._persist(Promise(term, candidate)))
            case fx.UseMembers(members):
                self._transport.use_members(members)
            case fx.UseBans() | fx.ContestBans() | fx.BanLiar():
                self._on_bans(effect)
            case fx.Note():
                self._on_note(effect)
            case fx.CountWork():
                self._on_work(effect)
            case fx.CompleteRun(iteration):
                self._on_run_complete(iteration)
            case _:
                super()._perform(effect)

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
    def _goes_on(self, effect: fx.StartJob, reply: Reply) -> bool:
        if isinstance(effect.job, jobs.Build):
            num_parameters = reply.result.num_parameters
            self._sizes = self._sizes.of_stage(effect.job, num_parameters)
        if isinstance(effect.job, jobs.Snapshot):
            self._copy_state(effect, reply)
            return True
        return False

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

    def allocate_state(self, size_bytes: int) -> TensorRegion | None:
        """Return where an incoming state goes, as `allocate` does for a tensor."""
        region = self._room_for_state(size_bytes)
        return None if isinstance(region, str) else region

    async def request_state(
        self,
        stage_index: int,
        iteration: int,
        *,
        with_optimizer: bool,
        cut: StageBlocks = (),
    ) -> ServedState | str:
        """Return a copy of this stage's state, or why there is none.

        The caller must call the copy's `release`. A cancelled caller need not.
        """
        if self.stopped.done():
            return STOPPED
        request_id, answer = self._requests.open()
        self.post(ev.StateRequested(request_id, stage_index, iteration, with_optimizer, cut))
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
                region.release()
            return clip(str(error), 200)
        taken_copy = reply.result
        return ServedState(taken_copy.iteration, taken_copy.manifest, region.view, region.release)

    def _keep_state(self, effect: fx.KeepState) -> None:
        region = self._regions.pop(effect.tensor)
        if self.disk is None:
            region.release()
            return
        served = ServedState(effect.iteration, effect.manifest, region.view, region.release)
        self.disk.keep(self.facts.own_stage, effect.parameter_hash, served)

    def _serve(self, effect: fx.ServeState) -> None:
        region = self._regions.pop(effect.tensor)
        readers = set(effect.request_ids)

        def release(request_id: int) -> None:
            readers.discard(request_id)
            if not readers:
                region.release()

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


# --- fetching a state -----------------------------------------------------------------------------


class _Sink(QuietSink):
    """The place where one fetch puts its state, and the chunks that this host has already."""

    def __init__(self, driver: NodeDriver, *, is_whole: bool) -> None:
        self.regions: list[TensorRegion] = []
        # Parameters alone come in each iteration. Written to a disk, they would wear it out.
        self._allocate: Callable[[int], TensorRegion | None] = (
            driver.allocate_state if is_whole else driver.allocate
        )
        self._own: StateBytes | None = None
        self._places: dict[str, slice] = {}
        self._driver = driver
        self.transfer: Transfer | None = None
        """The fetch's progress, once donors have described the state."""

    def take_from(self, copy: ServedState | None) -> None:
        """Take equal chunks from a copy of this node's own state from now on; None: no more."""
        self._own = None
        self._places = {}
        if copy is not None:
            self._own = copy.data
            for chunk in parse_description(copy.manifest).chunks:
                place = slice(chunk.offset, chunk.offset + chunk.num_bytes)
                self._places[chunk.sha256] = place

    def allocate(self, size_bytes: int) -> StateBytes | None:
        region = self._allocate(size_bytes)
        if region is None:
            return None
        self.regions.append(region)
        return region.view

    @override
    def expect(self, description: Description) -> None:
        if (disk := self._driver.disk) is not None:
            disk.expect(description)

    @override
    def began(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._driver.fetching(transfer)

    @override
    def donor_failed(self, donor: NodeId, reason: str) -> None:
        self._driver.note(fx.Note("state.failed", (("peer", donor), ("reason", reason))))

    @override
    def local(self, chunk: Chunk) -> memoryview | bytes | None:
        if self._own is not None and chunk.sha256 in self._places:
            return self._own[self._places[chunk.sha256]]
        disk = self._driver.disk
        return disk.local(chunk) if disk is not None else None


async def fetched_state(
    driver: NodeDriver, transport: Transport, wanted: fx.FetchState, *, own: NodeId
) -> ev.StateFetched | ev.StateFetchFailed:
    """Fetch a state from this host's disk or from donors; return the event for the machine.

    Args:
        driver: Gives the memory, and is told of progress.
        transport: Reaches the other donors.
        wanted: Says which state, and names the donors.
        own: This node. If it is among the donors, this host's disk is tried first.
    """
    sink = _Sink(driver, is_whole=wanted.with_optimizer)
    text = ""
    reason = ""
    copy = await _own_copy(driver, sink) if wanted.alike else None
    progress = asyncio.get_running_loop().create_task(_show(driver))
    others = replace(wanted, donors=tuple(node for node in wanted.donors if node != own))
    try:
        if driver.disk is not None:
            await driver.disk.searched()
        if own in wanted.donors and driver.disk is not None:
            text = await _read(driver, driver.disk, wanted, sink)
        if not text:
            text = await transport.fetch_state(others, sink)
            _tell(driver, wanted, sink.transfer)
    except Exception as error:  # noqa: BLE001 - the machine is told of every failure.
        reason = clip(str(error), 200) or type(error).__name__
    finally:
        progress.cancel()
        if copy is not None:
            sink.take_from(None)
            copy.release()
        if driver.transfer is sink.transfer:  # Another state may be on its way, too.
            driver.fetching(None)
        found = sink.regions.pop() if text and sink.regions else None
        for region in sink.regions:
            region.release()
    place = (wanted.stage_index, wanted.iteration)
    cut = (wanted.cut, wanted.part)
    if found is None:
        return ev.StateFetchFailed(*place, reason, *cut)
    return ev.StateFetched(*place, text, driver.keep(found), *cut)


async def _read(driver: NodeDriver, disk: StateDisk, wanted: fx.FetchState, sink: _Sink) -> str:
    """Read a state from this host's disk; return its description, or "" if it is not there."""
    begun_s = asyncio.get_running_loop().time()
    text = await disk.load(wanted, sink.allocate)
    if text is None:
        return ""
    num_bytes = sum(chunk.num_bytes for chunk in parse_description(text).chunks)
    read = Transfer(wanted.stage_index, wanted.iteration, num_bytes, num_bytes, num_bytes, begun_s)
    _tell(driver, wanted, read)
    return text


def _tell(driver: NodeDriver, wanted: fx.FetchState, transfer: Transfer | None) -> None:
    """Report the size and duration of a fetch that has succeeded."""
    if transfer is None:
        return
    duration_s = asyncio.get_running_loop().time() - transfer.begun_s
    fields = (
        ("stage", transfer.stage_index),
        ("iteration", transfer.iteration),
        ("num_bytes", transfer.num_bytes),
        ("num_local", transfer.num_local),
        ("duration_s", round(duration_s, 3)),
    )
    # A client fetches parameters alone, in each iteration.
    event = "state.fetched" if wanted.with_optimizer else "parameters.fetched"
    driver.note(fx.Note(event, fields))


async def _own_copy(driver: NodeDriver, sink: _Sink) -> ServedState | None:
    """Copy this node's own state, so that a fetch can take equal chunks from it."""
    copy = await driver.run_copy(jobs.Snapshot(with_optimizer=True))
    if isinstance(copy, str):
        return None
    sink.take_from(copy)
    return copy


async def _show(driver: NodeDriver) -> None:
    """Report the progress of a fetch from time to time. Never returns."""
    while True:
        await asyncio.sleep(_PROGRESS_S)
        transfer = driver.transfer
        if transfer is None:
            continue
        found = outlook(transfer, asyncio.get_running_loop().time())
        fields = (
            ("stage", transfer.stage_index),
            ("percent", round(found.percent)),
            ("bytes_per_s", round(found.bytes_per_s)),
            ("left_s", None if found.left_s is None else round(found.left_s)),
        )
        driver.note(fx.Note("state.progress", fields))


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
