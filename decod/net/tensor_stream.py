"""Connections for tensors: one from each sender to each of its receivers, one tensor after another.

    sender                                      receiver
      preamble, TLS handshake             -->
      head: size, flags, TensorHeader     -->
      (if it resumes)                     <--    position, or the result
      pieces: size, bytes; ...            -->
      head of the next tensor             -->
                                          <--    result: how it ended

The sender does not wait for a result before it begins the next tensor, so a line is never idle
between two. Results come in the order of the tensors. A piece of no bytes says that the sender
gives up. A receiver that does not want a tensor answers at once, and reads past the rest.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from decod.errors import MalformedMessageError
from decod.membership.certificates import TlsIdentity
from decod.net.address import LOCAL, split_address
from decod.net.front_door import PREAMBLE
from decod.net.net_limits import Limits
from decod.net.tls_pipe import TlsPipe, client_context
from decod.wire.validate import clip_reason

HEAD = struct.Struct("!IB")
PIECE = struct.Struct("!I")
ANSWER = struct.Struct("!BQ")

RESUMES, PROBES = 1, 2
"""Flags: data of it was sent before; it is a probe, of which nothing is said if it is late."""

POSITION, RESULT, REFUSAL = 1, 2, 3
"""Kinds of answers. A refusal of the caller has a text of so many bytes, and is the last."""

_TEXT_MAX_BYTES = 1024
_SKIPPED_MAX_BYTES = 16 * 1024 * 1024
"""Far more than an honest sender has on its way when it hears that a tensor is not wanted."""


T = TypeVar("T")


class CallerRefusedError(Exception):
    """The receiver does not want this node. The text says why, as for a refused call."""


@dataclass(slots=True)
class SentTensor:
    """A tensor whose result has not come."""

    position: "asyncio.Future[int | None]"
    """From where the receiver wants it. None: it has a result already."""
    result: "asyncio.Future[int]"


class TensorSender:
    """A connection to a receiver.

    Args:
        pipe: Whose ends have shaken hands. This owns it.
    """

    def __init__(self, pipe: TlsPipe) -> None:
        self._pipe = pipe
        self._sent = deque[SentTensor]()
        self._error: Exception | None = None
        self._reading = asyncio.create_task(self._read_answers())

    @classmethod
    async def dial(
        cls, address: str, shown: TlsIdentity, name: str, limits: Limits
    ) -> "TensorSender":
        """Connect to a node.

        Args:
            address: `host:port`, or a local socket.
            shown: This node's certificate, and whom it believes.
            name: What the node's certificate must say.
            limits: Timeouts.

        Raises:
            OSError: It can't be reached, or is another.
            TimeoutError: It does not answer.
        """
        async with asyncio.timeout(limits.control_timeout_s):
            connection = await connected(address, limits)
            try:
                await asyncio.get_running_loop().sock_sendall(connection, PREAMBLE)
                pipe = TlsPipe(connection, client_context(shown), name)
            except BaseException:
                connection.close()
                raise
            try:
                await pipe.shake_hands()
            except BaseException:
                pipe.close()
                raise
        return cls(pipe)

    @property
    def broken(self) -> bool:
        return self._error is not None

    async def begin(self, header: bytes, *, resumes: bool, probes: bool = False) -> SentTensor:
        """Send a tensor's header. The tensors' bytes must follow, in `piece`."""
        loop = asyncio.get_running_loop()
        sent = SentTensor(loop.create_future(), loop.create_future())
        if self._error is not None:
            raise self._error
        self._sent.append(sent)
        flags = RESUMES * resumes | PROBES * probes
        await self._pipe.write(HEAD.pack(len(header), flags) + header)
        return sent

    async def piece(self, data: memoryview) -> None:
        """Send the next bytes of a tensor. Without any, this end gives up."""
        await self._pipe.write(PIECE.pack(len(data)))
        await self._pipe.write(data)

    async def _read_answers(self) -> None:
        try:
            while True:
                await self._read_answer()
        except (OSError, CallerRefusedError) as error:
            self._fail(error)

    async def _read_answer(self) -> None:
        answer = memoryview(bytearray(ANSWER.size))
        await self._pipe.read(answer)
        kind, value = ANSWER.unpack(answer)
        if kind == REFUSAL:
            text = memoryview(bytearray(min(value, _TEXT_MAX_BYTES)))
            await self._pipe.read(text)
            raise CallerRefusedError(clip_reason(bytes(text).decode("utf-8", "replace")))
        if not self._sent:
            raise ConnectionAbortedError("the other end answers what nobody has asked")
        first = self._sent[0]
        if kind == POSITION:
            _settle(first.position, value)
            return
        self._sent.popleft()
        _settle(first.position, None)
        _settle(first.result, value)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._pipe.close()
        for sent in self._sent:
            for each in (sent.position, sent.result):
                if not each.done():
                    each.set_exception(error)
                    each.exception()  # Perhaps nobody waits for it.
        self._sent.clear()

    async def retire(self, timeout_s: float) -> None:
        """Close once all results are here, or after some time."""
        waiting = [each.result for each in self._sent]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        await self.close()

    async def close(self) -> None:
        """Break off. Whoever waits for a result gets an OSError."""
        self._fail(self._error or ConnectionAbortedError("this end has closed the connection"))
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


def _settle(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


async def connected(address: str, limits: Limits) -> socket.socket:
    """Return a connection to an address. Raises OSError."""
    loop = asyncio.get_running_loop()
    ways = list[tuple[socket.AddressFamily, Any]]()
    if address.startswith(LOCAL):
        ways.append((socket.AF_UNIX, address.removeprefix(LOCAL)))
    else:
        host, port = split_address(address)
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ways += [(each[0], each[4]) for each in found]
    error: OSError | None = None
    for family, target in ways:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(0.0)
        try:
            # A way that leads nowhere leaves time for the others.
            async with asyncio.timeout(limits.control_timeout_s / (len(ways) + 1)):
                await loop.sock_connect(connection, target)
        except OSError as problem:
            connection.close()
            error = problem
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise error or OSError(f"{address} has no address")


class TensorReceiver:
    """The receiving end of a connection.

    Args:
        pipe: Whose ends have shaken hands.
        limits: Sizes and timeouts.
    """

    def __init__(self, pipe: TlsPipe, limits: Limits) -> None:
        self._pipe, self._limits = pipe, limits
        self.probes = False
        """Whether the tensor that is coming is a probe's."""
        self.resumes = False
        """Whether its sender wants to go on behind what has arrived before."""

    async def head(self) -> int:
        """Wait for the next tensor, as long as it takes; return the size of its header.

        Raises:
            OSError: The connection has ended.
            MalformedMessageError: The header is too large.
        """
        head = memoryview(bytearray(HEAD.size))
        await self._pipe.read(head)
        size, flags = HEAD.unpack(head)
        self.resumes, self.probes = bool(flags & RESUMES), bool(flags & PROBES)
        if size > self._limits.header_size_max_bytes:
            raise MalformedMessageError(
                f"a header of {size} bytes",
                why=f"at most {self._limits.header_size_max_bytes} are allowed",
                fix="run the same version of decod on every node",
            )
        return int(size)

    async def header(self, size: int) -> bytes:
        """Return a header, behind `head`. Raises OSError, or TimeoutError if it does not come."""
        header = memoryview(bytearray(size))
        async with asyncio.timeout(self._limits.frame_timeout_s):
            await self._pipe.read(header)
        return bytes(header)

    async def fill(
        self,
        view: memoryview,
        position: int,
        arrived: Callable[[int], Awaitable[None]],
    ) -> bool:
        """Read a tensor into its memory; return whether it is whole.

        Args:
            view: The whole memory.
            position: So much is there already. The rest is asked for, if the sender resumes.
            arrived: Called with how many bytes have come, as they come.

        Raises:
            OSError: The connection has ended.
            TimeoutError: Nothing came for too long.
            MalformedMessageError: A piece is longer than the tensor, or than allowed.
        """
        if self.resumes:
            await self._answer(POSITION, position)
        else:
            position = 0
        while position < len(view):
            size = await self._piece_size(len(view) - position)
            if not size:
                return False
            end = position + size
            async with asyncio.timeout(self._limits.frame_timeout_s):
                while position < end:
                    num = await self._pipe.read_some(
                        view[position:end], to_come=len(view) - position
                    )
                    position += num
                    await arrived(num)
        return True

    async def skip(self, size_bytes: int, arrived: Callable[[int], Awaitable[None]]) -> None:
        """Read past a tensor that nobody wants. A sender that resumes sends none of it.

        Raises:
            OSError: The connection has ended, or more comes than can have been on its way.
        """
        left, nowhere = size_bytes, memoryview(bytearray(64 * 1024))
        while left and not self.resumes and (size := await self._piece_size(left)):
            left -= size
            if size_bytes - left > _SKIPPED_MAX_BYTES:
                raise ConnectionAbortedError("the other end goes on with what is not wanted")
            async with asyncio.timeout(self._limits.frame_timeout_s):
                while size:
                    num = await self._pipe.read_some(nowhere[:size], to_come=size)
                    size -= num
                    await arrived(num)

    async def _piece_size(self, left: int) -> int:
        """Return the size of the next piece of a tensor of which so many bytes are left."""
        head = memoryview(bytearray(PIECE.size))
        async with asyncio.timeout(self._limits.frame_timeout_s):
            await self._pipe.read(head)
        size = int(PIECE.unpack(head)[0])
        if size > min(left, self._limits.frame_size_bytes):
            raise MalformedMessageError(
                f"a piece of {size} bytes where {left} are left",
                why="it is longer than allowed or than the header said",
                fix="run the same version of decod on every node",
            )
        return size

    async def result(self, state: int) -> None:
        """Say how the tensor ended."""
        await self._answer(RESULT, state)

    async def refuse(self, text: str) -> None:
        """Say that this node takes nothing of the caller, and why."""
        data = text.encode()[:_TEXT_MAX_BYTES]
        await self._answer(REFUSAL, len(data))
        await self._pipe.write(data)

    async def _answer(self, kind: int, value: int) -> None:
        async with asyncio.timeout(self._limits.frame_timeout_s):
            await self._pipe.write(ANSWER.pack(kind, value))
