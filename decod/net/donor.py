"""The giving side of state transfers: describes copies of stages' states and streams their chunks.

A state is copied when a peer first asks for its description. The copy does not change while the
node trains on. Peers that ask for the same state share one copy, which is released once each of
them has released it or has been silent for `state_lease_s`. The numbers of copies and streams are
limited. A caller that finds the donor busy asks again later, or asks another donor.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from decod.clocks import Stopwatch
from decod.errors import CheckpointError
from decod.ids import NodeId, RunId
from decod.limits import StageBlocks
from decod.net.door import Context, require_caller
from decod.net.net_limits import Limits
from decod.net.rate_caps import Lane, Pace
from decod.net.stream import frames_of
from decod.tasks import in_thread
from decod.train.checkpoint.description import Description, parse_description
from decod.train.checkpoint.entries import StateBytes
from decod.wire import codec, validate
from decod.wire.v1 import state_pb2

StateKey = tuple[int, int, bool, str, StageBlocks]
"""Stage, iteration, whether with the optimizer's state, the hash of the past, and the cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRequest:
    """A request for a stage's state after `iteration`."""

    run_id: RunId
    sender: NodeId
    stage_index: int
    iteration: int
    with_optimizer: bool
    past_hash: str = ""
    """The id of the state in a collaborative run: a hash of all that has led to it."""
    base_hash: str = ""
    """Of a part of the weights that the run does not train, which is wanted instead of a state."""
    cut: StageBlocks = ()
    """The cut that the stage is of."""

    @property
    def key(self) -> StateKey:
        """The copy that is asked for, whoever asks."""
        known = self.past_hash or self.base_hash
        return self.stage_index, self.iteration, self.with_optimizer, known, self.cut


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBlob:
    """A consistent copy of a stage's state, to be described and streamed."""

    manifest: str
    """Its description as text: see `decod.train.checkpoint.description`."""
    read: Callable[[int, int], Awaitable[memoryview | bytes]]
    """Takes the offset and size of one chunk, in bytes; returns the chunk's bytes."""
    release: Callable[[], None]
    """Called once, when the copy is no longer read."""


def reader_of(data: StateBytes) -> Callable[[int, int], Awaitable[memoryview | bytes]]:
    """Return a copy's bytes in the form of `StateBlob.read`."""

    async def read(offset: int, num_bytes: int) -> memoryview | bytes:
        place = slice(offset, offset + num_bytes)
        # A file may have to wait for its disk.
        return data[place] if isinstance(data, memoryview) else await in_thread(lambda: data[place])

    return read


@dataclass(slots=True)
class _Lent:
    """A copy whose chunks peers fetch."""

    key: StateKey
    blob: StateBlob
    description: Description
    until_s: dict[NodeId, float] = field(default_factory=dict)
    """The instant when the lease of each peer ends, on the loop's clock. The peer silent longest
    comes first."""
    num_streams: int = 0


class StateDonor:
    """The copies of states that a node lends to its peers.

    Args:
        run_id: Requests of other runs are refused.
        state: Returns a copy of a state, or the reason why there is none.
        blame: Counts a peer's fault. Takes the counter's name, the call, and a reason for the log.
        limits: Numbers of copies and streams, and timeouts.
        watch: Measures the time spent on copying into frames.
        pace: Caps the rate at which copies leave.
    """

    def __init__(
        self,
        run_id: RunId,
        state: Callable[[StateRequest], Awaitable[StateBlob | str]],
        blame: Callable[[str, Context, str], None],
        limits: Limits,
        watch: Stopwatch,
        pace: Pace,
    ) -> None:
        self._run_id = run_id
        self._state = state
        self._blame = blame
        self._limits = limits
        self._watch = watch
        self._pace = pace
        self._lent: dict[str, _Lent] = {}
        self._num_streams = 0
        self._num_copying = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def num_lent(self) -> int:
        """The number of copies that are kept for peers at present."""
        return len(self._lent)

    def open(self) -> None:
        """Lend copies again after `close`."""
        self._closed = False

    def close(self) -> None:
        """Release all copies, and lend no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for state_id in list(self._lent):
            self._drop(state_id)

    async def describe(self, data: bytes, context: Context) -> bytes:
        """Answer a DescribeRequest."""
        request = codec.parse(state_pb2.DescribeRequest, data)
        checked = StateRequest(
            run_id=validate.run_id("run_id", request.run_id),
            sender=require_caller("sender_id", request.sender_id, context),
            stage_index=validate.stage_index("stage_index", request.stage_index),
            iteration=validate.iteration("iteration", request.iteration),
            with_optimizer=request.with_optimizer,
            past_hash=validate.known_sha256("past_hash", request.past_hash),
            base_hash=validate.known_sha256("base_hash", request.base_hash),
            cut=validate.stage_blocks("cut", request.cut),
        )
        answer: Description | str = "this node belongs to another run"
        if self._is_ours(checked.run_id, context):
            answer = await self._described(checked)
        if isinstance(answer, str):
            refusal = validate.clip_reason(answer) or "no reason given"
            return state_pb2.DescribeResponse(refusal=refusal).SerializeToString()
        return state_pb2.DescribeResponse(description=answer.text).SerializeToString()

    def _is_ours(self, run_id: RunId, context: Context) -> bool:
        if run_id != self._run_id:
            self._blame("message.foreign", context, f"run {run_id}")
        return run_id == self._run_id

    async def _described(self, request: StateRequest) -> Description | str:
        key = request.key
        lent = next((each for each in self._lent.values() if each.key == key), None)
        if lent is None:
            if len(self._lent) + self._num_copying >= self._limits.states_lent_max:
                return "as many copies as may be are being fetched from here"
            copied = await self._copied(request)
            if isinstance(copied, str):
                return copied
            blob, description = copied
            lent = self._lent.get(description.id)
            if lent is not None or self._closed:
                blob.release()
            if self._closed:
                return "this node has ended"
            if lent is None:
                lent = self._lent[description.id] = _Lent(key, blob, description)
        self._hold(lent, request.sender)
        return lent.description

    async def _copied(self, request: StateRequest) -> tuple[StateBlob, Description] | str:
        self._num_copying += 1
        try:
            blob = await self._state(request)
        finally:
            self._num_copying -= 1
        if isinstance(blob, str):
            return blob
        try:
            if len(blob.manifest) > self._limits.state_manifest_size_max_bytes:
                blob.release()
                return "the description of this state is too long"
            return blob, parse_description(blob.manifest)
        except CheckpointError as error:
            blob.release()
            return str(error)

    async def copy_for(
        self, request: StateRequest, context: Context
    ) -> tuple[StateBlob, Description] | str:
        """Return a copy that the caller releases, and its description, or why there is none."""
        if not self._is_ours(request.run_id, context):
            return "this node belongs to another run"
        if len(self._lent) + self._num_copying >= self._limits.states_lent_max:
            return "as many copies as may be are being fetched from here"
        return await self._copied(request)

    def _hold(self, lent: _Lent, sender: NodeId) -> None:
        """Begin or extend a peer's lease of a copy."""
        loop = asyncio.get_running_loop()
        lent.until_s.pop(sender, None)
        lent.until_s[sender] = loop.time() + self._limits.state_lease_s
        if len(lent.until_s) > self._limits.state_takers_max:
            del lent.until_s[next(iter(lent.until_s))]
        if self._timer is None:
            self._timer = loop.call_later(self._limits.state_lease_s, self._sweep)

    def _sweep(self) -> None:
        """Drop expired leases, and copies that no peer needs."""
        loop = asyncio.get_running_loop()
        self._timer = None
        for state_id, lent in list(self._lent.items()):
            expired = [node for node, until_s in lent.until_s.items() if until_s <= loop.time()]
            for node in expired:
                del lent.until_s[node]
            self._drop_unneeded(state_id)
        if self._lent:
            self._timer = loop.call_later(self._limits.state_lease_s / 4, self._sweep)

    def _drop_unneeded(self, state_id: str) -> None:
        lent = self._lent[state_id]
        if not lent.until_s and not lent.num_streams:
            self._drop(state_id)

    def _drop(self, state_id: str) -> None:
        lent = self._lent.pop(state_id)
        if not lent.num_streams:
            lent.blob.release()

    async def fetch(self, data: bytes, context: Context) -> None:
        """Answer a FetchRequest with a stream."""
        request = codec.parse(state_pb2.FetchRequest, data)
        sender, lent = self._lent_to(request, context)
        if lent is None:
            await _refuse(context, state_pb2.FETCH_REFUSAL_GONE)
            return
        chunks = lent.description.chunks
        first = validate.integer(0, len(chunks) - 1)("first_chunk", request.first_chunk)
        num = validate.integer(1, len(chunks) - first)("num_chunks", request.num_chunks)
        self._hold(lent, sender)
        if self._num_streams >= self._limits.state_streams_max:
            await _refuse(context, state_pb2.FETCH_REFUSAL_BUSY)
            return
        self._num_streams += 1
        lent.num_streams += 1
        try:
            for chunk in chunks[first : first + num]:
                piece = await lent.blob.read(chunk.offset, chunk.num_bytes)
                await self._pour(context, memoryview(piece))
                self._hold(lent, sender)
        finally:
            self._num_streams -= 1
            lent.num_streams -= 1
            if lent.description.id not in self._lent and not lent.num_streams:
                lent.blob.release()

    async def _pour(self, context: Context, data: memoryview) -> None:
        for frame in frames_of(data.cast("B"), self._pace.frame_bytes(self._limits), self._watch):
            await self._pace.wait(len(frame), Lane.STATES)
            async with asyncio.timeout(self._limits.frame_timeout_s):
                await context.write(frame)

    async def release(self, data: bytes, context: Context) -> bytes:
        """Answer a ReleaseRequest."""
        sender, lent = self._lent_to(codec.parse(state_pb2.ReleaseRequest, data), context)
        if lent is not None:
            lent.until_s.pop(sender, None)
            self._drop_unneeded(lent.description.id)
        return state_pb2.ReleaseResponse().SerializeToString()

    def _lent_to(
        self, request: state_pb2.FetchRequest | state_pb2.ReleaseRequest, context: Context
    ) -> tuple[NodeId, _Lent | None]:
        """Return a request's sender and the copy that it names, or None if that is not lent."""
        run_id = validate.run_id("run_id", request.run_id)
        sender = require_caller("sender_id", request.sender_id, context)
        state_id = validate.sha256("state_id", request.state_id)
        return sender, self._lent.get(state_id) if self._is_ours(run_id, context) else None


async def _refuse(context: Context, refusal: "state_pb2.FetchRefusal") -> None:
    await context.write(state_pb2.FetchResponse(refusal=refusal).SerializeToString())
