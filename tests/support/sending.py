"""A sender of tensors that says what it is told to, right or wrong."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from decod.membership.certificates import MEMBER_NAME, TlsIdentity
from decod.net.front_door import PREAMBLE
from decod.net.net_limits import LIMITS
from decod.net.tensor_stream import ANSWER, HEAD, PIECE, connected
from decod.net.tls_pipe import TlsPipe, client_context


def tensor_head(header: bytes, flags: int = 0) -> bytes:
    return HEAD.pack(len(header), flags) + header


def tensor_piece(data: bytes) -> bytes:
    return PIECE.pack(len(data)) + data


class Sending:
    """The sending end of a connection for tensors."""

    def __init__(self, pipe: TlsPipe) -> None:
        self._pipe = pipe

    async def head(self, header: bytes, flags: int = 0) -> None:
        await self.raw(tensor_head(header, flags))

    async def piece(self, data: bytes) -> None:
        await self.raw(tensor_piece(data))

    async def raw(self, data: bytes) -> None:
        await self._pipe.write(data)

    async def answer(self) -> tuple[int, int]:
        """The kind of the next answer, and its value. An OSError at the end."""
        answer = memoryview(bytearray(ANSWER.size))
        async with asyncio.timeout(20.0):
            await self._pipe.read(answer)
        kind, value = ANSWER.unpack(answer)
        return kind, value

    async def text(self, size: int) -> str:
        """The text that follows a refusal."""
        text = memoryview(bytearray(size))
        await self._pipe.read(text)
        return bytes(text).decode()

    async def end(self) -> None:
        """Sends no more, and waits until the receiver has read all and closes."""
        # Of the socket itself: TLS would be taken off.
        socket.socket.shutdown(self._pipe._socket, socket.SHUT_WR)
        with suppress(OSError):
            while True:
                await self.answer()


@asynccontextmanager
async def sending_to(
    address: str, shown: TlsIdentity, name: str = MEMBER_NAME
) -> AsyncIterator[Sending]:
    """A connection for tensors to a node whose certificate has some name.

    Args:
        address: Of the node.
        shown: What the sender shows.
        name: See above.
    """
    connection = await connected(address, LIMITS)
    await asyncio.get_running_loop().sock_sendall(connection, PREAMBLE)
    pipe = TlsPipe(connection, client_context(shown), name)
    try:
        await pipe.shake_hands()
        yield Sending(pipe)
    finally:
        pipe.close()
