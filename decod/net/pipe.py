"""Pipes of bytes, over a socket or a call, and their splicing.

A pipe reads and writes pieces. The next piece is written once the last one is on its way, so a slow
reader holds back its writer, through as many pipes as there are.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import grpc.aio

from decod.errors import MalformedMessageError
from decod.net.calls import next_message
from decod.net.connected_peer import Context
from decod.wire.frame import data_frame, frame_data

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
        self._reader, self._writer = reader, writer

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
