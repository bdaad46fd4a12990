"""A TCP proxy. Subclasses say how it carries bytes."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple


class Ends(NamedTuple):
    """Both ends of a connection through a proxy."""

    near: asyncio.StreamReader
    """What the client sends."""
    back: asyncio.StreamWriter
    """To the client."""
    far: asyncio.StreamReader
    """What the server sends."""
    to: asyncio.StreamWriter
    """To the server."""


class Proxy(ABC):
    """Forwards connections to a port of this host.

    Args:
        port: Where connections go.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    @abstractmethod
    def carry(self, ends: Ends) -> Iterable[Coroutine[None, None, None]]:
        """Return what carries the bytes of a new connection, both ways."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Yield the address at which the proxy listens."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            # From Python 3.12 on, a server is closed once all its connections are.
            server.close()
            await self._end()
            await server.wait_closed()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _connected(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, to = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [back, to]
        for coroutine in self.carry(Ends(near, back, far, to)):
            self._tasks.add(asyncio.get_running_loop().create_task(coroutine))
