"""Fetching a stage's state: from this host's disk or from donors, then to the machine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from typing_extensions import override

from decod.ids import NodeId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core.era import Kept
from decod.protocol.core.jobs import Snapshot
from decod.texts import clip
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


class StateTransport(Protocol):
    """The way by which a state reaches this host."""

    async def fetch_state(self, wanted: fx.FetchState, sink: StateSink) -> str:
        """Fetch a state into the sink's last buffer; return its description.

        Raises:
            DecodError: No donor gave the whole state.
        """


class Receiver(Protocol):
    """The receiver of a state: the driver."""

    @property
    def transfer(self) -> Transfer | None:
        """Progress of the fetch; None until it has begun."""

    @property
    def disk(self) -> StateDisk | None:
        """Keeps states on this host, if they are kept."""

    def fetching(self, transfer: Transfer | None) -> None:
        """Show the progress of a fetch from now on; None: of none."""

    def allocate(self, size_bytes: int) -> memoryview | None:
        """Return memory for an incoming tensor, or None if there is no room."""

    def allocate_state(self, size_bytes: int) -> StateBytes | None:
        """Return where an incoming state goes, maybe a file, or None if there is no room."""

    def tensor_failed(self, buffer: StateBytes) -> None:
        """Take a buffer back."""

    def adopt(self, buffer: StateBytes) -> ev.Tensor:
        """Turn a buffer of `allocate` or `allocate_state` into a tensor of the machine."""

    def note(self, note: fx.Note) -> None:
        """Report an event that the machine does not see."""

    async def run_copy(self, job: Snapshot) -> ServedState | str:
        """Run a job that copies a state; return the copy, or why there is none."""


class _Sink(QuietSink):
    """The place where one fetch puts its state, and the chunks that this host has already."""

    def __init__(self, receiver: Receiver, *, is_whole: bool) -> None:
        self.buffers: list[StateBytes] = []
        # Parameters alone come in each iteration. Written to a disk, they would wear it out.
        self._allocate: Callable[[int], StateBytes | None] = (
            receiver.allocate_state if is_whole else receiver.allocate
        )
        self._own: StateBytes | None = None
        self._places: dict[str, slice] = {}
        self._receiver = receiver

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
        buffer = self._allocate(size_bytes)
        if buffer is not None:
            self.buffers.append(buffer)
        return buffer

    @override
    def expect(self, description: Description) -> None:
        if (disk := self._receiver.disk) is not None:
            disk.expect(description)

    @override
    def began(self, transfer: Transfer) -> None:
        self._receiver.fetching(transfer)

    @override
    def donor_failed(self, donor: NodeId, reason: str) -> None:
        self._receiver.note(fx.Note("state.failed", (("peer", donor), ("reason", reason))))

    @override
    def local(self, chunk: Chunk) -> memoryview | bytes | None:
        if self._own is not None and chunk.sha256 in self._places:
            return self._own[self._places[chunk.sha256]]
        disk = self._receiver.disk
        return disk.local(chunk) if disk is not None else None


async def fetched_state(
    receiver: Receiver, transport: StateTransport, wanted: fx.FetchState, *, own: NodeId
) -> ev.StateFetched | ev.StateFetchFailed:
    """Fetch a state from this host's disk or from donors; return the event for the machine.

    Args:
        receiver: Gives the memory, and is told of progress.
        transport: Reaches the other donors.
        wanted: Says which state, and names the donors.
        own: This node. If it is among the donors, this host's disk is tried first.
    """
    sink = _Sink(receiver, is_whole=wanted.with_optimizer)
    text = ""
    reason = ""
    copy = await _own_copy(receiver, sink) if wanted.alike else None
    progress = asyncio.get_running_loop().create_task(_show(receiver))
    others = replace(wanted, donors=tuple(node for node in wanted.donors if node != own))
    try:
        if receiver.disk is not None:
            await receiver.disk.searched()
        if own in wanted.donors and receiver.disk is not None:
            text = await _read(receiver, receiver.disk, wanted, sink)
        if not text:
            text = await transport.fetch_state(others, sink)
            _tell(receiver, wanted, receiver.transfer)
    except Exception as error:  # noqa: BLE001 - the machine is told of every failure.
        reason = clip(str(error), 200) or type(error).__name__
    finally:
        progress.cancel()
        if copy is not None:
            sink.take_from(None)
            copy.release()
        receiver.fetching(None)
        blob = sink.buffers.pop() if text and sink.buffers else None
        for buffer in sink.buffers:
            receiver.tensor_failed(buffer)
    if blob is None:
        return ev.StateFetchFailed(wanted.stage_index, wanted.iteration, reason)
    tensor = receiver.adopt(blob)
    return ev.StateFetched(wanted.stage_index, wanted.iteration, text, tensor)


async def _read(receiver: Receiver, disk: StateDisk, wanted: fx.FetchState, sink: _Sink) -> str:
    """Read a state from this host's disk; return its description, or "" if it is not there."""
    begun_s = asyncio.get_running_loop().time()
    text = await disk.load(wanted, sink.allocate)
    if text is None:
        return ""
    num_bytes = sum(chunk.num_bytes for chunk in parse_description(text).chunks)
    read = Transfer(wanted.stage_index, wanted.iteration, num_bytes, num_bytes, num_bytes, begun_s)
    _tell(receiver, wanted, read)
    return text


def _tell(receiver: Receiver, wanted: fx.FetchState, transfer: Transfer | None) -> None:
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
    receiver.note(fx.Note(event, fields))


async def _own_copy(receiver: Receiver, sink: _Sink) -> ServedState | None:
    """Copy this node's own state, so that a fetch can take equal chunks from it."""
    copy = await receiver.run_copy(Snapshot(with_optimizer=True))
    if isinstance(copy, str):
        return None
    sink.take_from(copy)
    return copy


async def _show(receiver: Receiver) -> None:
    """Report the progress of a fetch from time to time. Never returns."""
    while True:
        await asyncio.sleep(_PROGRESS_S)
        transfer = receiver.transfer
        if transfer is None:
            continue
        found = outlook(transfer, asyncio.get_running_loop().time())
        fields = (
            ("stage", transfer.stage_index),
            ("percent", round(found.percent)),
            ("bytes_per_s", round(found.bytes_per_s)),
            ("left_s", None if found.left_s is None else round(found.left_s)),
        )
        receiver.note(fx.Note("state.progress", fields))


# Open requests for copies of this node's state, which the machine answers later.

STOPPED = "this node has stopped"


class Requests:
    """The open requests, by number."""

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
