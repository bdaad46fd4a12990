"""Connections of a node that others can dial to members that nobody can dial.

Such a member holds a call open to this node (`Hold`). To connect to it, this node tells it an id.
The member makes a call with that id (`Carry`), and the connection travels over this call. If
another node wants the connection (`Connect`), this node is the host in between: it passes the bytes
on, which are those of a TLS connection between the two ends.

When a peer calls, the keeper must:
- take a Hold for its caller only, whoever the certificate names, and keep the newest of each;
- use a Carry for the connection with its id, once, and only if the member that was told the id
  makes it;
- pass on nothing unless this node does so for others, and nothing to or from banned members;
- hold no more of a connection in memory than the piece that is on its way.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio

from decod.errors import MalformedMessageError
from decod.ids import NodeId
from decod.net import channel
from decod.net.calls import Calls, RefusedCallError
from decod.net.door import Context, caller_in
from decod.net.net_limits import Limits
from decod.net.rate_caps import Lane, Paces
from decod.net.stream import data_frame, frame_data, next_message
from decod.wire import codec, validate
from decod.wire.v1 import reverse_pb2

# Pipes of bytes, over a socket or a call, and their splicing.
#
# A pipe reads and writes pieces. The next piece is written once the last one is on its way, so a
# slow reader holds back its writer, through as many pipes as there are.

PIECE_MAX_BYTES = 256 * 1024

_CALL_ERRORS = (
    grpc.aio.BaseError,
    grpc.aio.AioRpcError,
    asyncio.InvalidStateError,
    # A closed channel cancels its calls, but not the tasks that use them.
    asyncio.CancelledError,
)


class Pipe(Protocol):
    """Both directions of one connection."""

    async def read(self) -> memoryview | bytes:
        """Return the next piece; empty at the end, or if the pipe has broken."""

    async def write(self, data: memoryview | bytes) -> None:
        """Send a piece.

        Raises:
            OSError: The pipe has broken.
        """

    async def close(self) -> None:
        """End both directions."""


class SocketPipe:
    """A pipe over a local socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> memoryview | bytes:
        with suppress(OSError):
            return await self._reader.read(PIECE_MAX_BYTES)
        return b""

    async def write(self, data: memoryview | bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class CallPipe:
    """A pipe over a call that this node has made."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> memoryview | bytes:
        try:
            message = await self._call.read()
        except _CALL_ERRORS:
            _raise_if_cancelled()
            return b""
        return _data_of(message)

    async def write(self, data: memoryview | bytes) -> None:
        try:
            await self._call.write(data_frame(memoryview(data)))
        except _CALL_ERRORS as error:
            _raise_if_cancelled()
            raise BrokenPipeError from error

    async def close(self) -> None:
        self._call.cancel()


class ServedPipe:
    """A pipe over a call that another node has made. Its method must await `ended`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.ended = asyncio.Event()

    async def read(self) -> memoryview | bytes:
        try:
            message = await next_message(self._context)
        except _CALL_ERRORS:
            _raise_if_cancelled()
            return b""
        return _data_of(message)

    async def write(self, data: memoryview | bytes) -> None:
        if self.ended.is_set():
            raise BrokenPipeError
        try:
            await self._context.write(data_frame(memoryview(data)))
        except _CALL_ERRORS as error:
            _raise_if_cancelled()
            raise BrokenPipeError from error

    async def close(self) -> None:
        self.ended.set()


async def splice(
    one: Pipe, other: Pipe, passing: Callable[[int], Awaitable[None]] | None = None
) -> None:
    """Pass on what each of two pipes reads to the other, until one of them ends.

    Args:
        one: A pipe.
        other: Another one.
        passing: Called with the size of each piece in bytes; the piece waits for it.

    Raises:
        MalformedMessageError: A piece is none, or is too large.
    """

    async def pass_on(source: Pipe, target: Pipe) -> None:
        with suppress(OSError):
            while data := await source.read():
                if passing is not None:
                    await passing(len(data))
                await target.write(data)

    ways = [asyncio.create_task(pass_on(*pair)) for pair in ((one, other), (other, one))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        ended = await asyncio.gather(*ways, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


def _data_of(message: object) -> memoryview | bytes:
    if not isinstance(message, bytes):
        return b""  # The end of the stream.
    if len(message) > PIECE_MAX_BYTES + 16:
        raise MalformedMessageError(
            f"a piece of {len(message)} bytes of a connection",
            why=f"it is longer than {PIECE_MAX_BYTES} bytes",
            fix="run the same version of decod on every node",
        )
    return frame_data(message)


def _raise_if_cancelled() -> None:
    """Go on with the cancellation of this task, if it is its own and not that of a call."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


CONNECTION_ID_BYTES = 16

_HEAD_MAX_BYTES = 1024


@dataclass(slots=True)
class _Hold:
    """A member's open call."""

    wanted: "asyncio.Queue[bytes]"
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Wanted:
    """A connection that a member was told of."""

    node: NodeId
    pipe: "asyncio.Future[ServedPipe]"


class ReverseKeeper:
    """The members that nobody can dial, as far as they hold a call open to this node.

    Args:
        limits: Numbers of calls, and timeouts.
        paces: Cap the rate at which this node passes bytes on. They arrive, and leave again.
        allowed: Whether a member may take part.
    """

    def __init__(self, limits: Limits, paces: Paces, allowed: Callable[[NodeId], bool]) -> None:
        self._limits = limits
        self._paces = paces
        self._allowed = allowed
        self._holds: dict[NodeId, _Hold] = {}
        self._wanted: dict[bytes, _Wanted] = {}
        self._pipes: dict[NodeId, set[ServedPipe]] = {}
        """The open connections of each member, at either end."""
        self._changed = asyncio.Event()
        self._num_passed = 0
        self._passes_on = False
        self.num_passed_bytes = 0
        """The bytes that it has passed on, in both directions."""
        self._on_held: Callable[[NodeId], None] = lambda _node: None

    def serve(self, calls: Calls) -> None:
        """Serve the methods of the service."""
        hold = calls.once(self._hold, size_max_bytes=_HEAD_MAX_BYTES)
        calls.add_stream(f"/{channel.REVERSE_SERVICE}/Hold", hold)
        for name, method in (("Carry", self._carry), ("Connect", self._connect)):
            calls.add_stream(f"/{channel.REVERSE_SERVICE}/{name}", calls.guarded(method))

    def start(
        self, *, passes_on: bool, on_held: Callable[[NodeId], None] = lambda _node: None
    ) -> None:
        """Begin: others can dial this node.

        Args:
            passes_on: Whether this node passes on connections between others.
            on_held: Called when a member begins to hold a call open.
        """
        self._passes_on = passes_on
        self._on_held = on_held

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    def holds(self, node: NodeId) -> bool:
        """Return whether a member holds a call open to this node."""
        return node in self._holds

    async def wait_held(self, node: NodeId, timeout_s: float) -> bool:
        """Wait until a member holds a call open; return whether it does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while node not in self._holds:
                    await self._changed.wait()
        return node in self._holds

    def cut(self, node: NodeId) -> None:
        """End a member's calls, and all connections that they carry."""
        if (hold := self._holds.pop(node, None)) is not None:
            hold.ended.set()
        for pipe in self._pipes.get(node, ()):
            pipe.ended.set()

    async def open(self, node: NodeId) -> Pipe | None:
        """Return a connection to a member that holds a call open; None if none comes about."""
        hold = self._holds.get(node)
        if hold is None:
            return None
        connection_id = secrets.token_bytes(CONNECTION_ID_BYTES)
        pipe: asyncio.Future[ServedPipe] = asyncio.get_running_loop().create_future()
        self._wanted[connection_id] = _Wanted(node, pipe)
        try:
            hold.wanted.put_nowait(connection_id)
            async with asyncio.timeout(self._limits.reverse_open_timeout_s):
                return await asyncio.shield(pipe)
        except (TimeoutError, asyncio.QueueFull):
            return pipe.result() if pipe.done() else None
        except asyncio.CancelledError:
            if pipe.done():
                pipe.result().ended.set()
            raise
        finally:
            self._wanted.pop(connection_id, None)

    # --- methods ------------------------------------------------------------------------------

    async def _hold(self, data: bytes, context: Context) -> None:
        codec.parse(reverse_pb2.HoldRequest, data)
        node = _caller(context)
        if node not in self._holds and len(self._holds) >= self._limits.holds_max:
            raise RefusedCallError(grpc.StatusCode.RESOURCE_EXHAUSTED, channel.TOO_MANY)
        if (old := self._holds.pop(node, None)) is not None:
            old.ended.set()
        hold = _Hold(asyncio.Queue(self._limits.reverse_calls_per_node_max))
        self._holds[node] = hold
        self._changed.set()
        self._changed.clear()
        try:
            await context.write(reverse_pb2.HoldResponse().SerializeToString())
            self._on_held(node)
            telling = asyncio.create_task(self._tell(hold, context))
            ending = asyncio.create_task(hold.ended.wait())
            try:
                await asyncio.wait(
                    (telling, ending),
                    timeout=self._limits.hold_age_max_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                for task in (telling, ending):
                    task.cancel()
                await asyncio.gather(telling, ending, return_exceptions=True)
        finally:
            if self._holds.get(node) is hold:
                del self._holds[node]

    async def _tell(self, hold: _Hold, context: Context) -> None:
        while True:
            connection_id = await hold.wanted.get()
            response = reverse_pb2.HoldResponse(connection_id=connection_id)
            await context.write(response.SerializeToString())

    async def _carry(self, context: Context) -> None:
        head = codec.parse(reverse_pb2.CarryRequest, await self._head(context))
        node = _caller(context)
        wanted = self._wanted.get(head.connection_id)
        if wanted is not None and wanted.node != node:
            # Ids are secret: this one was not told of it.
            raise validate.malformed("connection_id", "another's", allowed="one that it was told")
        if wanted is None or wanted.pipe.done():
            # Whoever wanted it may have given up.
            raise RefusedCallError(grpc.StatusCode.NOT_FOUND, channel.NOT_HELD)
        pipe = ServedPipe(context)
        wanted.pipe.set_result(pipe)
        await self._until_ended(node, pipe)

    async def _connect(self, context: Context) -> None:
        head = codec.parse(reverse_pb2.ConnectRequest, await self._head(context))
        node = _caller(context)
        goal = validate.node_id("goal", head.goal)
        if not self._passes_on or self._num_passed >= self._limits.passed_max:
            raise RefusedCallError(grpc.StatusCode.RESOURCE_EXHAUSTED, channel.TOO_MANY)
        self._num_passed += 1
        try:
            far = await self.open(goal) if self._allowed(goal) else None
            if far is None:
                raise RefusedCallError(grpc.StatusCode.NOT_FOUND, channel.NOT_HELD)
            try:
                await context.write(reverse_pb2.ConnectResponse(connected=True).SerializeToString())
                await self._pass_on(node, ServedPipe(context), far)
            finally:
                await far.close()
        finally:
            self._num_passed -= 1

    async def _pass_on(self, node: NodeId, near: ServedPipe, far: Pipe) -> None:
        """Pass bytes on between two members until one of them ends."""
        splicing = asyncio.create_task(splice(near, far, self._passing))
        splicing.add_done_callback(lambda _: near.ended.set())
        try:
            await self._until_ended(node, near)
        finally:
            splicing.cancel()
            (error,) = await asyncio.gather(splicing, return_exceptions=True)
        if isinstance(error, MalformedMessageError):
            raise error

    async def _passing(self, size_bytes: int) -> None:
        await self._paces.download.wait(size_bytes, Lane.ACTIVATIONS)
        await self._paces.upload.wait(size_bytes, Lane.ACTIVATIONS)
        self.num_passed_bytes += size_bytes

    async def _until_ended(self, node: NodeId, pipe: ServedPipe) -> None:
        """Keep a call open for as long as its pipe is used."""
        self._pipes.setdefault(node, set()).add(pipe)
        try:
            await pipe.ended.wait()
        finally:
            pipe.ended.set()
            self._pipes[node].discard(pipe)
            if not self._pipes[node]:
                del self._pipes[node]

    async def _head(self, context: Context) -> bytes:
        async with asyncio.timeout(self._limits.control_timeout_s):
            data = await next_message(context) or b""
        if len(data) > _HEAD_MAX_BYTES:
            allowed = f"at most {_HEAD_MAX_BYTES} bytes"
            raise validate.malformed("request", f"{len(data)} bytes", allowed=allowed)
        return data


def _caller(context: Context) -> NodeId:
    caller = caller_in(context)
    assert caller is not None, "others are refused before this"
    return caller.node_id
