"""Uvicorn, set up for a daemon that has an event loop, signals and a log of its own."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

CONNECTIONS_MAX = 32
"""Connections at a time. More are told to come later (503)."""

_OPEN_MAX = 2 * CONNECTIONS_MAX
"""More are closed at once: each takes an open file, which the node may need for its peers."""
_BACKLOG = 16
"""asyncio accepts so many at a time, even if no file is left to be opened."""

_STUCK_S = 10
"""A connection may take so long to send a request, or to read its answer."""
_IDLE_S = 5
_END_S = 1
"""How long the end waits for answers on their way."""
_HEAD_SIZE_MAX_BYTES = 16 << 10


class HttpServer:
    """Serves an application over HTTP/1.1.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        # What strangers send is their fault, and no news for the operator.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_END_S,
            h11_max_incomplete_event_size=_HEAD_SIZE_MAX_BYTES,
        )
        config.load()
        self._server = _Server(config)

    async def run(self, listener: socket.socket) -> None:
        """Serve on a listening socket until the task is cancelled."""
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        try:
            await asyncio.shield(serving)
        finally:
            self._server.end()
            await asyncio.wait({serving})


class _Connection(H11Protocol):
    """A connection that nobody can keep open without use."""

    @override
    def connection_made(  # type: ignore[override]  # As the class above it declares.
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        if len(self.connections) > _OPEN_MAX:
            transport.abort()
        else:
            self.loop.call_later(_STUCK_S, self._look, self.cycle)

    def _look(self, last: RequestResponseCycle | None) -> None:
        """Close the connection if no request has come since the last look."""
        if self.transport.is_closing():
            return
        if self.cycle is last:
            self.transport.abort()
        else:
            self.loop.call_later(_STUCK_S, self._look, self.cycle)


class _Server(uvicorn.Server):
    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # The daemon handles them.

    def end(self) -> None:
        """Have `serve` return soon."""
        self.should_exit = True
