"""A stage's part of a checkpoint that a member writes itself, into the store that members share.

The leader asks, and the member copies its state and describes the copy. Then a thread of the member
hands the copy to the store, piece by piece. The stream of answers tells how far it is, so that the
leader can tell a slow store from one that hangs. If the leader hangs up, the member stops.
"""

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio

from decod.errors import DecodError, NetworkError
from decod.ids import NodeId
from decod.membership.certificates import TlsIdentity, peer_name
from decod.net import channel
from decod.net.channel import failed_call
from decod.net.donor import StateDonor, StateRequest
from decod.net.door import Context, require_caller
from decod.net.download import Donor
from decod.net.net_limits import LIMITS, Limits
from decod.net.rate_caps import Lane, Pace
from decod.tasks import in_thread
from decod.texts import clip
from decod.train.checkpoint.description import Description, copy_max_s, parse_description
from decod.train.checkpoint.iteration_folders import StageBlob
from decod.train.checkpoint.shared import FOLDER, SharedCheckpoints
from decod.wire import codec, validate
from decod.wire.v1 import state_pb2

_STORE = f"/{channel.STATE_SERVICE}/Store"
_PROGRESS_S = 1.0
"""Time between two answers."""
_SIZE_MAX = 1 << 48


@dataclass(frozen=True, slots=True)
class Sharing:
    """The ways in which a node shares a store with others."""

    find: Callable[[NodeId], SharedCheckpoints | str | None] = lambda _: None
    """Takes a caller. Returns this run's checkpoints in the store, None if there is no store, or
    why the caller gets nothing written."""
    written: Callable[[int, int, int], None] = lambda _stage, _iteration, _num_bytes: None
    """Called with stage, iteration and size of each part that this node has written."""


class NoStoreError(NetworkError):
    """The member shares no store: it can only give its state to the leader."""


class PartWriter:
    """Writes this node's state into the store that members share, when the leader asks.

    Args:
        donor: Copies states, and knows the run.
        pace: Caps the rate at which copies leave.
    """

    def __init__(self, donor: StateDonor, pace: Pace) -> None:
        self._donor = donor
        self._pace = pace
        self._sharing = Sharing()
        self._num_writing = 0
        self._thread: asyncio.Future[None] | None = None
        """Writes the last part. It may hang in the store when the leader has long hung up."""

    def share(self, sharing: Sharing) -> None:
        """Write into a store from now on."""
        self._sharing = sharing

    async def write(self, data: bytes, context: Context) -> None:
        """Answer a StoreRequest with a stream."""
        request = codec.parse(state_pb2.StoreRequest, data)
        checked = StateRequest(
            run_id=validate.run_id("run_id", request.run_id),
            sender=require_caller("sender_id", request.sender_id, context),
            stage_index=validate.stage_index("stage_index", request.stage_index),
            iteration=validate.iteration("iteration", request.iteration),
            with_optimizer=True,
            cut=validate.stage_blocks("cut", request.cut),
        )
        if FOLDER.fullmatch(request.folder) is None:
            raise validate.malformed("folder", request.folder, allowed="ITERATION-8 digits")
        store = self._sharing.find(checked.sender)
        if store is None:
            answer = state_pb2.StoreResponse(refusal="it has no store", lacks_store=True)
            await context.write(answer.SerializeToString())
            return
        if isinstance(store, str):
            refusal = store
        elif self._num_writing or (self._thread is not None and not self._thread.done()):
            refusal = "it is still writing another part"
        else:
            self._num_writing += 1
            try:
                refusal = await self._write(checked, request.folder, store, context)
            finally:
                self._num_writing -= 1
        if refusal:
            told = validate.clip_reason(refusal) or "no reason given"
            await context.write(state_pb2.StoreResponse(refusal=told).SerializeToString())

    async def _write(
        self, request: StateRequest, folder: str, store: SharedCheckpoints, context: Context
    ) -> str:
        """Write a copy of the state; return why that failed, or an empty text."""
        copied = await self._donor.copy_for(request, context)
        if isinstance(copied, str):
            return copied
        blob, description = copied
        abandoned = threading.Event()
        source = PacedCopy(blob.read, description.num_bytes, self._pace)

        def work() -> None:
            stage = StageBlob(description.entries, source)
            store.write_stage(folder, request.stage_index, stage, abandoned.is_set)

        def done(written: "asyncio.Future[None]") -> None:
            # Not earlier: the thread reads the copy, and a store may hang for a while.
            blob.release()
            written.exception()  # Nobody else asks for it if the leader has hung up.

        self._thread = writing = in_thread(work)
        writing.add_done_callback(done)
        try:
            answer = state_pb2.StoreResponse(description=description.text)
            await context.write(answer.SerializeToString())
            while not writing.done():
                await asyncio.wait({writing}, timeout=_PROGRESS_S)
                answer = state_pb2.StoreResponse(num_bytes=source.num_read)
                await context.write(answer.SerializeToString())
        finally:
            abandoned.set()
        if isinstance(error := writing.exception(), DecodError):
            return f"{error.what}: {error.why}"
        writing.result()
        self._sharing.written(request.stage_index, request.iteration, source.num_read)
        answer = state_pb2.StoreResponse(num_bytes=source.num_read, done=True)
        await context.write(answer.SerializeToString())
        return ""


class PacedCopy:
    """The bytes of a copy that leaves this host, read from a thread. See `StateBytes`.

    Args:
        read: As in `StateBlob`.
        num_bytes: Size of the copy.
        pace: Caps the rate.
    """

    def __init__(
        self,
        read: Callable[[int, int], Awaitable[memoryview | bytes]],
        num_bytes: int,
        pace: Pace,
    ) -> None:
        self._read_copy = read
        self._num_bytes = num_bytes
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self.num_read = 0

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, place: slice, /) -> memoryview | bytes:
        num_bytes = place.stop - place.start
        if self._loop.is_closed():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        reading = asyncio.run_coroutine_threadsafe(self._read(place.start, num_bytes), self._loop)
        piece = reading.result()
        self.num_read += num_bytes
        return piece

    async def _read(self, offset: int, num_bytes: int) -> memoryview | bytes:
        await self._pace.wait(num_bytes, Lane.STATES)
        return await self._read_copy(offset, num_bytes)

    def __setitem__(self, place: slice, piece: memoryview | bytes | bytearray, /) -> None:
        raise AssertionError("a copy is only read")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest:
    """A stage's part of a checkpoint that a member is to write."""

    state: StateRequest
    folder: str
    """Name of the checkpoint's folder in the store."""
    size_bytes: int = 0
    """The size of the state, or a little more: the member gets time to copy so much."""


async def write_part(
    request: PartRequest,
    member: Donor,
    described: Callable[[Description], None],
    shown: TlsIdentity,
    limits: Limits = LIMITS,
) -> Description:
    """Have a member write its stage's part. Return the description of what it says it has written.

    Args:
        request: Says which state, and where it goes.
        member: The member.
        described: Called once the member has its copy. Raises an error if the state is not wanted.
        shown: What this node shows the member, and whom it believes.
        limits: Sizes and timeouts.

    Raises:
        NoStoreError: The member has no store.
        NetworkError: It refuses (E-NET-005), its store hangs or refuses, or it breaks off.
        DecodError: `described` raised it, or an answer is malformed.
    """
    state = request.state
    name = peer_name(member.node_id)
    wire_request = state_pb2.StoreRequest(
        run_id=state.run_id,
        sender_id=state.sender,
        stage_index=state.stage_index,
        iteration=state.iteration,
        folder=request.folder,
        cut=state.cut,
    )
    async with channel.open_channel(member.address, limits, shown, name) as opened:
        call = opened.unary_stream(_STORE, channel.as_is, channel.as_is)(
            wire_request.SerializeToString(), metadata=channel.run_metadata(state.run_id)
        )
        try:
            return await _followed(call, described, limits, request.size_bytes)
        except grpc.aio.AioRpcError as error:
            raise failed_call(member.address, error) from error
        except TimeoutError as error:
            raise _unwritten("nothing came of it for too long") from error
        finally:
            call.cancel()


async def _followed(
    call: "grpc.aio.UnaryStreamCall[bytes, bytes]",
    described: Callable[[Description], None],
    limits: Limits,
    size_bytes: int,
) -> Description:
    """Read the answers to the last one."""
    loop = asyncio.get_running_loop()
    description: Description | None = None
    num_bytes = 0
    until_s = loop.time() + limits.store_stall_s + copy_max_s(size_bytes)
    while True:
        async with asyncio.timeout_at(until_s):
            message: object = await call.read()
        if not isinstance(message, bytes):
            raise _unwritten("it broke off")
        answer = codec.parse(state_pb2.StoreResponse, message)
        if answer.refusal:
            reason = validate.reason("refusal", answer.refusal)
            raise _unwritten(reason, NoStoreError if answer.lacks_store else NetworkError)
        if description is None:
            if len(answer.description) > limits.state_manifest_size_max_bytes:
                raise validate.malformed("description", "too long", allowed="at most 2 MiB")
            description = parse_description(answer.description)
            described(description)
            until_s = loop.time() + limits.store_stall_s
        told = validate.integer(0, _SIZE_MAX)("num_bytes", answer.num_bytes)
        if told > num_bytes:
            num_bytes = told
            until_s = loop.time() + limits.store_stall_s
        if answer.done:
            return description


def _unwritten(reason: str, kind: type[NetworkError] = NetworkError) -> NetworkError:
    return kind(
        "a member did not write its stage's part of the checkpoint",
        why=clip(reason, 200),
        fix="nothing: another way is taken",
        code="E-NET-005",
    )
