"""The fetching side of state transfers: takes a stage's state from several donors, in chunks.

All donors are asked to describe the state. Donors with the same description are interchangeable. An
idle donor is asked for the next run of missing chunks, and a faster donor for a longer run. Every
chunk is verified before it is written to its place, so it stays even if its donor fails later:

- A donor that breaks off, stalls or is busy is asked again a little later, a few times.
- A donor that sends a wrong chunk is dropped at once: it, or the link to it, alters bytes.
- When only slow donors still owe chunks, idle donors fetch these chunks too.

If donors describe different states, the majority decides, and at a tie the caller's order. If all
donors of the chosen state fail, another description's state is fetched. Chunks that are equal in
both are kept.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio

from decod.errors import CheckpointError, DecodError, MalformedMessageError, NetworkError
from decod.ids import NodeId
from decod.membership.certificates import TlsIdentity, peer_name
from decod.net import channel
from decod.net.channel import failed_call
from decod.net.donor import StateRequest
from decod.net.net_limits import LIMITS, Limits
from decod.net.rate_caps import UNLIMITED, Lane, Pace
from decod.net.stream import frame_data
from decod.tasks import to_its_end
from decod.texts import clip, why_of
from decod.train.checkpoint.description import (
    CHUNK_SIZE_BYTES,
    Chunk,
    Description,
    StateSink,
    Transfer,
    described_hash,
    parameter_hash,
    parse_description,
    part_of,
    unlike_hash,
)
from decod.train.checkpoint.entries import StateBytes
from decod.wire import codec, validate
from decod.wire.v1 import state_pb2

# The chunks of one state: which have arrived, which are missing, and which donor fetches what.

_RUN_SIZE_MAX_BYTES = 16 * CHUNK_SIZE_BYTES
"""Most bytes that a donor is asked for at once."""

_SHARE = 4
"""A run is at most 1/_SHARE of the missing bytes, so that all donors finish at about the same
time."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive chunks that one donor is asked for."""

    node: NodeId
    indices: range

    @property
    def first(self) -> int:
        return self.indices.start


class Assembly:
    """A state's blob that is put together from chunks of several donors.

    Args:
        chunks: The chunks of the state, in the order of their offsets.
        buffer: Takes the blob. Chunks are written to their offsets.
    """

    def __init__(self, chunks: Sequence[Chunk], buffer: StateBytes) -> None:
        self.chunks = tuple(chunks)
        self.buffer = buffer
        self.progress_s = asyncio.get_running_loop().time()
        """The instant when a chunk last arrived, on the loop's clock."""
        self._loop = asyncio.get_running_loop()
        self._arrived = bytearray(len(self.chunks))
        self._num_missing = len(self.chunks)
        self._missing_bytes = sum(chunk.num_bytes for chunk in self.chunks)
        self._runs: list[Run] = []
        self._changed = asyncio.Event()

    @property
    def complete(self) -> bool:
        return self._num_missing == 0

    async def changed(self) -> None:
        """Wait until a chunk arrives or a run is given back."""
        self._changed.clear()
        await self._changed.wait()

    def missing(self) -> Iterator[tuple[int, Chunk]]:
        """Yield every chunk that has not arrived, with its index."""
        for index, chunk in enumerate(self.chunks):
            if not self._arrived[index]:
                yield index, chunk

    def put(self, index: int, piece: memoryview | bytes | bytearray) -> bool:
        """Write a verified chunk to its place; return False if it was there already."""
        if self._arrived[index]:
            return False
        self.write(index, piece)
        return self.mark(index)

    def write(self, index: int, piece: memoryview | bytes | bytearray) -> None:
        """Write a verified chunk to its place. It counts as missing until `mark` is called.

        May be called in a thread, since the place may be in a file.
        """
        chunk = self.chunks[index]
        self.buffer[chunk.offset : chunk.offset + chunk.num_bytes] = piece

    def mark(self, index: int) -> bool:
        """Note that a chunk is in its place; return False if it was there already."""
        if self._arrived[index]:
            return False
        self._mark(index)
        return True

    def _mark(self, index: int) -> None:
        self._arrived[index] = 1
        self._num_missing -= 1
        self._missing_bytes -= self.chunks[index].num_bytes
        self.progress_s = self._loop.time()
        self._loop.call_soon_threadsafe(self._changed.set)

    def keep(self, other: "Assembly") -> int:
        """Take over the chunks of another state in the same buffer that are equal in this one.

        Returns:
            How many bytes were taken over.
        """
        alike = {
            (chunk.offset, chunk.num_bytes, chunk.sha256)
            for index, chunk in enumerate(other.chunks)
            if other._arrived[index]
        }
        before = self._missing_bytes
        for index, chunk in self.missing():
            if (chunk.offset, chunk.num_bytes, chunk.sha256) in alike:
                self._mark(index)
        return before - self._missing_bytes

    def take(self, node: NodeId, size_bytes: int) -> Run | None:
        """Claim the next chunks for a donor; return None if there are none at present.

        When all missing chunks are claimed, an idle donor gets a chunk that another donor owes.

        Args:
            node: The donor.
            size_bytes: Most bytes to ask it for. A run has at least one chunk, however small this
                is.
        """
        claimed = {index for run in self._runs for index in run.indices}
        first = next(
            (index for index, _ in self.missing() if index not in claimed),
            None,
        )
        indices = range(0)
        if first is not None:
            indices = self._run_from(first, claimed, size_bytes)
        else:
            indices = self._late(node)
        if not indices:
            return None
        run = Run(node, indices)
        self._runs.append(run)
        return run

    def _run_from(self, first: int, claimed: set[int], size_bytes: int) -> range:
        limit = min(size_bytes, _RUN_SIZE_MAX_BYTES, self._missing_bytes // _SHARE)
        limit = max(limit, CHUNK_SIZE_BYTES)
        stop = first
        total = 0
        ahead = self.chunks[first].index - first
        while stop < len(self.chunks) and stop not in claimed and not self._arrived[stop]:
            if self.chunks[stop].index - stop != ahead:
                break  # The donor has something else in between.
            total += self.chunks[stop].num_bytes
            if total > limit and stop > first:
                break
            stop += 1
        return range(first, stop)

    def _late(self, node: NodeId) -> range:
        """Return the last missing chunk of another donor's run that no second donor fetches yet."""
        counts: dict[int, int] = {}
        for run in self._runs:
            for index in run.indices:
                counts[index] = counts.get(index, 0) + 1
        for run in self._runs:
            if run.node == node:
                continue
            for index in reversed(run.indices):
                if not self._arrived[index] and counts[index] == 1:
                    return range(index, index + 1)
        return range(0)

    def rest_arrived(self, run: Run, index: int) -> bool:
        """Return whether all chunks of a run from `index` on have arrived, from any donor."""
        return all(self._arrived[i] for i in range(index, run.indices.stop))

    def give_back(self, run: Run) -> None:
        """End a donor's claim on a run. Its chunks that have not arrived can be claimed again."""
        self._runs.remove(run)
        self._changed.set()


_RELEASE_S = 1.0
"""Timeout for telling a donor that its copy is no longer needed."""


@dataclass(frozen=True, slots=True)
class Donor:
    """A node that may have the state."""

    node_id: NodeId
    address: str


@dataclass(frozen=True, slots=True)
class FetchedState:
    """A state whose every chunk was verified."""

    description: Description
    buffer: StateBytes


class _WrongChunkError(Exception):
    """A donor has sent bytes that differ from its description."""


class _BusyError(Exception):
    """A donor has no stream free at present."""


class _GoneError(Exception):
    """A donor no longer has the copy that it described."""


class _LeftError(Exception):
    """A donor must not be asked again. The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadTerms:
    """The state that a download must bring, and the means that it may use."""

    wanted_hash: str = ""
    """Hash that the parameters must have; empty if it is not known."""
    names: Collection[str] | None = None
    """The tensors that are wanted. None: all of the state."""
    size_bytes: int = 0
    """The size of the state, or a little more: donors get time to copy so much."""
    limits: Limits = LIMITS
    """Sizes and timeouts."""
    pace: Pace = UNLIMITED
    """Caps the rate at which chunks are taken."""


async def download(
    request: StateRequest,
    donors: Sequence[Donor],
    sink: StateSink,
    shown: TlsIdentity,
    terms: DownloadTerms,
) -> FetchedState:
    """Fetch a state. Once this has raised or was cancelled, nothing writes into the buffer.

    Args:
        request: Says which state.
        donors: Nodes that may have it, best first.
        sink: Gives the memory, and is told of progress and failures.
        shown: What this node shows the donors, and whom it believes.
        terms: What it must bring, and what it may use.

    Raises:
        NetworkError: No donor gave the whole state, or there is no memory for it (E-NET-005).
    """
    some = donors[: terms.limits.state_donors_max]
    attempt = _Download(request, some, sink, shown, terms)
    try:
        return await attempt.run()
    finally:
        await attempt.close()


class _Download:
    """One download. See the module's docstring."""

    def __init__(
        self,
        request: StateRequest,
        donors: Sequence[Donor],
        sink: StateSink,
        shown: TlsIdentity,
        terms: DownloadTerms,
    ) -> None:
        self._request = request
        self._metadata = channel.run_metadata(request.run_id)
        self._donors = {donor.node_id: donor for donor in donors}
        self._sink = sink
        self._shown = shown
        self._wanted_hash = terms.wanted_hash
        self._names = terms.names
        self._size_bytes = terms.size_bytes
        self._limits = terms.limits
        self._pace = terms.pace
        self._transfer = Transfer(request.stage_index, request.iteration)
        self._channels: dict[NodeId, grpc.aio.Channel] = {}
        self._described: dict[NodeId, Description] = {}
        """What is wanted of each donor's state."""
        self._state_ids: dict[NodeId, str] = {}
        """By which the donors know their states."""
        self._tried: set[str] = set()
        self._failures: Counter[NodeId] = Counter()
        """Consecutive failures of each donor."""
        self._assembly: Assembly | None = None
        self._assembled_of: Description | None = None
        """The description of the state for which the buffer was allocated."""
        self._tasks: dict[asyncio.Task[None], NodeId] = {}
        self._reason = "no member to ask"

    async def close(self) -> None:
        """End all tasks, and tell the donors that their copies are no longer needed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        releases = (self._release(node) for node in self._described)
        await asyncio.gather(*releases, return_exceptions=True)
        closes = (opened.close(None) for opened in self._channels.values())
        await asyncio.gather(*closes, return_exceptions=True)

    async def run(self) -> FetchedState:
        for node in self._donors:
            self._own(self._join(node), node)
        await self._wait_described()
        while (description := self._choose()) is not None:
            buffer = await self._assembled(description)
            if buffer is not None and await self._is_wanted(description, buffer):
                return FetchedState(description, buffer)
        raise NetworkError(
            f"no state of stage {self._request.stage_index} from {len(self._donors)} members",
            why=self._reason,
            fix="fetch it from other members",
            code="E-NET-005",
        )

    def _own(self, work: Coroutine[Any, Any, None], node: NodeId) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = node
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def _leave(self, node: NodeId, reason: str) -> None:
        self._reason = reason
        self._sink.donor_failed(node, reason)

    # --- which state --------------------------------------------------------------------------

    async def _wait_described(self) -> None:
        """Wait until all donors have answered, or until `describe_grace_s` after the first."""
        loop = asyncio.get_running_loop()
        until_s: float | None = None
        while self._tasks:
            if self._described and until_s is None:
                until_s = loop.time() + self._limits.describe_grace_s
            wait_s = None if until_s is None else max(0.0, until_s - loop.time())
            if wait_s == 0.0:
                return
            await asyncio.wait(self._tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)

    def _choose(self) -> Description | None:
        """Return the untried description that most donors gave, or None if all were tried."""
        untried = [
            self._described[node]
            for node in self._donors
            if node in self._described and self._described[node].id not in self._tried
        ]
        if not untried:
            return None
        # Among equals, most_common gives the first. The donors are in the caller's order.
        [(state_id, _)] = Counter(each.id for each in untried).most_common(1)
        chosen = next(each for each in untried if each.id == state_id)
        self._tried.add(state_id)
        return chosen

    async def _join(self, node: NodeId) -> None:
        """Ask a donor for its description. If a state is being fetched, fetch from it too."""
        if await self._describe(node) and self._assembly is not None:
            await self._work(node)

    async def _describe(self, node: NodeId) -> bool:
        request = self._request
        wire_request = state_pb2.DescribeRequest(
            run_id=request.run_id,
            sender_id=request.sender,
            stage_index=request.stage_index,
            iteration=request.iteration,
            with_optimizer=request.with_optimizer,
            past_hash=request.past_hash,
            base_hash=request.base_hash,
            cut=request.cut,
        )
        try:
            timeout_s = self._limits.describe_timeout_s(self._size_bytes)
            answer = await self._unary(node, "Describe", wire_request, timeout_s=timeout_s)
            whole = self._checked(codec.parse(state_pb2.DescribeResponse, answer))
            self._state_ids[node] = whole.id
            self._described[node] = self._part(whole)
        except DecodError as error:
            self._leave(node, _text(error))
            return False
        return True

    def _checked(self, response: state_pb2.DescribeResponse) -> Description:
        if response.refusal:
            raise NetworkError(
                "no state",
                why=validate.reason("refusal", response.refusal),
                fix="fetch from another node",
                code="E-NET-005",
            )
        if len(response.description) > self._limits.state_manifest_size_max_bytes:
            size = f"{len(response.description)} characters"
            allowed = f"at most {self._limits.state_manifest_size_max_bytes} characters"
            raise validate.malformed("description", size, allowed=allowed)
        description = parse_description(response.description)
        validate.integer(0, self._limits.tensor_size_max_bytes)("num_bytes", description.num_bytes)
        return description

    def _part(self, whole: Description) -> Description:
        """Return what is wanted of a state. That of a part is compared with the hash at once."""
        if self._names is None:
            return whole
        if self._wanted_hash not in ("", described_hash(whole.entries)):
            raise unlike_hash(self._request.stage_index, self._request.iteration)
        return part_of(whole, self._names)

    async def _is_wanted(self, description: Description, buffer: StateBytes) -> bool:
        if not self._wanted_hash or self._names is not None:
            return True
        with self._own_disk():
            found = await to_its_end(lambda: parameter_hash(description.entries, buffer))
        if found == self._wanted_hash:
            return True
        error = unlike_hash(self._request.stage_index, self._request.iteration)
        for node, described in self._described.items():
            if described.id == description.id:
                self._leave(node, _text(error))
        return False

    # --- its chunks ---------------------------------------------------------------------------

    async def _assembled(self, description: Description) -> StateBytes | None:
        """Fetch the chunks of a state; return its blob, or None if its donors did not give all."""
        old = self._assembly
        transfer = self._transfer
        # Until this host's own chunks are in place, a donor that answers late only describes.
        self._assembly = None
        abandoned = self._tried - {description.id}
        if old is not None and _have_same_tensors(self._assembled_of, description):
            buffer = old.buffer
        else:
            buffer = self._allocated(description)
            old = None
        self._assembled_of = description
        assembly = Assembly(description.chunks, buffer)
        transfer.num_bytes = sum(chunk.num_bytes for chunk in description.chunks)
        transfer.num_arrived = transfer.num_local = 0
        transfer.begun_s = asyncio.get_running_loop().time()
        self._sink.began(transfer)
        if old is not None:
            transfer.num_arrived += await asyncio.to_thread(assembly.keep, old)
        with self._own_disk():
            await to_its_end(lambda: self._take_local(assembly))
        self._assembly = assembly
        for node in self._donors:
            if node in self._described and self._described[node].id not in abandoned:
                self._own(self._work(node), node)
        while not assembly.complete and self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return buffer if assembly.complete else None

    def _allocated(self, description: Description) -> StateBytes:
        self._sink.expect(description)
        with self._own_disk():
            given = self._sink.allocate(description.num_bytes)
        if given is None:
            raise NetworkError(
                f"no room for a state of {description.num_bytes} bytes",
                why="the memory for tensors is full",
                fix="free memory, or lower --capacity",
                code="E-NET-005",
            )
        return given

    @contextmanager
    def _own_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NetworkError(
                f"the state of stage {self._request.stage_index} can't be kept while it arrives",
                why=why_of(error),
                fix="make room or mend the disk",
                code="E-NET-005",
            ) from error

    def _take_local(self, assembly: Assembly) -> None:
        """Take the chunks that this host has on its disk. Runs in a thread."""
        for index, chunk in assembly.missing():
            piece = self._sink.local(chunk)
            if piece is not None and _matches(piece, chunk):
                assembly.put(index, piece)
                self._transfer.num_local += chunk.num_bytes
                self._transfer.num_arrived += chunk.num_bytes

    async def _work(self, node: NodeId) -> None:
        """Fetch run after run from a donor, until the state is complete or the donor is dropped."""
        assembly = self._assembly
        limits = self._limits
        loop = asyncio.get_running_loop()
        assert assembly is not None
        rate = 0.0
        try:
            self._require_same(node, assembly)
            while not assembly.complete:
                run = assembly.take(node, int(rate * limits.run_of_chunks_s))
                if run is None:
                    await assembly.changed()
                    continue
                start_s = loop.time()
                num_bytes = await self._try(node, run, assembly)
                if num_bytes:
                    spent_s = max(1e-6, loop.time() - start_s)
                    rate = num_bytes / spent_s
                    await asyncio.sleep(spent_s * (1 / limits.download_share - 1))
        except _LeftError as error:
            self._leave(node, str(error))

    def _require_same(self, node: NodeId, assembly: Assembly) -> None:
        if self._described[node].chunks != assembly.chunks:
            raise _LeftError("holds another state than most of its stage")

    async def _try(self, node: NodeId, run: Run, assembly: Assembly) -> int:
        """Fetch one run from a donor; return how many bytes came, or 0 if the run failed.

        Raises:
            _LeftError: The donor must not be asked again.
        """
        try:
            num_bytes = await self._fetch(node, run, assembly)
        except _BusyError:
            stalled_s = asyncio.get_running_loop().time() - assembly.progress_s
            if stalled_s > self._limits.download_stall_s:
                raise _LeftError("it gives chunks to others") from None
        except _GoneError:
            self._failed(node, "it keeps its copy no longer")
            if await self._describe(node):
                self._require_same(node, assembly)
        except _WrongChunkError as error:
            raise _LeftError(str(error)) from error
        except DecodError as error:
            self._failed(node, _text(error))
        else:
            del self._failures[node]
            return num_bytes
        finally:
            assembly.give_back(run)
        await asyncio.sleep(self._limits.donor_pause_s)
        return 0

    def _failed(self, node: NodeId, reason: str) -> None:
        self._failures[node] += 1
        if self._failures[node] >= self._limits.donor_failures_max:
            raise _LeftError(reason)

    async def _fetch(self, node: NodeId, run: Run, assembly: Assembly) -> int:
        """Fetch one run of chunks; return how many bytes came.

        Chunks that arrived before an error are kept.

        Raises:
            _BusyError: The donor has no stream free.
            _GoneError: The donor no longer has the copy.
            _WrongChunkError: A chunk differs from its description.
            DecodError: The donor broke off, or sends too slowly.
        """
        wire_request = state_pb2.FetchRequest(
            run_id=self._request.run_id,
            sender_id=self._request.sender,
            state_id=self._state_ids[node],
            first_chunk=assembly.chunks[run.first].index,
            num_chunks=len(run.indices),
        )
        call = self._channel(node).unary_stream(
            f"/{channel.STATE_SERVICE}/Fetch", channel.as_is, channel.as_is
        )(wire_request.SerializeToString(), metadata=self._metadata)
        num_bytes = 0
        try:
            for index in run.indices:
                if assembly.rest_arrived(run, index):
                    break
                chunk = assembly.chunks[index]
                piece = await self._receive(call, chunk)
                num_bytes += len(piece)
                if not await to_its_end(partial(_written, assembly, index, piece)):
                    raise _WrongChunkError(f"chunk {index} is not what it described")
                if assembly.mark(index):
                    self._transfer.num_arrived += chunk.num_bytes
                    self._transfer.from_donors[node] += chunk.num_bytes
        except grpc.aio.AioRpcError as error:
            raise failed_call(self._donors[node].address, error) from error
        except TimeoutError as error:
            raise NetworkError(
                f"{self._donors[node].address} sends its state too slowly",
                why=f"less than {self._limits.rate_min_bytes_per_s:.0f} bytes arrived in a second",
                fix="fetch from another node",
                code="E-NET-003",
            ) from error
        finally:
            call.cancel()
        return num_bytes

    async def _receive(
        self, call: "grpc.aio.UnaryStreamCall[bytes, bytes]", chunk: Chunk
    ) -> bytearray:
        """Return the next chunk of a stream."""
        piece = bytearray()
        while len(piece) < chunk.num_bytes:
            async with asyncio.timeout(self._limits.frame_timeout_s):
                message: object = await call.read()
            if not isinstance(message, bytes):
                raise validate.malformed("data", "cut short", allowed="all of a chunk")
            try:
                piece += frame_data(message)
            except MalformedMessageError:
                _raise_refusal(message)
                raise
            await self._pace.wait(len(message), Lane.STATES)
            if len(piece) > chunk.num_bytes:
                raise _WrongChunkError("it sends more than it described")
        return piece

    # --- calls --------------------------------------------------------------------------------

    def _channel(self, node: NodeId) -> grpc.aio.Channel:
        if node not in self._channels:
            address = self._donors[node].address
            self._channels[node] = channel.open_channel(
                address, self._limits, self._shown, peer_name(node)
            )
        return self._channels[node]

    async def _unary(
        self,
        node: NodeId,
        method: str,
        request: state_pb2.DescribeRequest | state_pb2.ReleaseRequest,
        *,
        timeout_s: float,
    ) -> bytes:
        call = self._channel(node).unary_unary(
            f"/{channel.STATE_SERVICE}/{method}", channel.as_is, channel.as_is
        )
        try:
            answer: bytes = await call(
                request.SerializeToString(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise failed_call(self._donors[node].address, error) from error
        return answer

    async def _release(self, node: NodeId) -> None:
        request = state_pb2.ReleaseRequest(
            run_id=self._request.run_id,
            sender_id=self._request.sender,
            state_id=self._state_ids[node],
        )
        await self._unary(node, "Release", request, timeout_s=_RELEASE_S)


def _raise_refusal(message: bytes) -> None:
    """Raise the error for a donor's refusal, if the message holds one."""
    refusal = codec.parse(state_pb2.FetchResponse, message).refusal
    if refusal == state_pb2.FETCH_REFUSAL_BUSY:
        raise _BusyError
    if refusal != state_pb2.FETCH_REFUSAL_UNSPECIFIED:
        raise _GoneError


def _have_same_tensors(one: Description | None, other: Description) -> bool:
    """Return whether two states differ at most in the values of their tensors."""
    if one is None or len(one.entries) != len(other.entries):
        return False
    pairs = zip(one.entries, other.entries, strict=True)
    return all((a.name, a.dtype, a.shape) == (b.name, b.dtype, b.shape) for a, b in pairs)


def _written(assembly: Assembly, index: int, piece: bytearray) -> bool:
    """Write a chunk to its place if its bytes are right; return whether they are.

    Raises:
        _LeftError: This host can't keep it.
    """
    if not _matches(piece, assembly.chunks[index]):
        return False
    try:
        assembly.write(index, piece)
    except OSError as error:
        raise _LeftError(f"this host can't write its state: {why_of(error)}") from error
    except CheckpointError as error:
        raise _LeftError(str(error)) from error
    return True


def _matches(piece: memoryview | bytes | bytearray, chunk: Chunk) -> bool:
    """Return whether bytes have the size and the hash of a chunk."""
    same_size = len(piece) == chunk.num_bytes
    return same_size and hashlib.sha256(piece).hexdigest() == chunk.sha256


def _text(error: DecodError) -> str:
    text = error.why if isinstance(error, NetworkError) else str(error)
    return clip(text, 200)
