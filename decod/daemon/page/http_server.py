"""Uvicorn, set up for a daemon that has an event loop, signals and a log of its own."""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_SIZE_MAX_BYTES = 16 << 10
"""Of a request's head, whether it comes in one piece or in many."""

CONNECTIONS_MAX = 32
"""Connections at a time. For a further one, another gives way that asks nothing. If all of them
ask, it is told to come later (503)."""

_OPEN_MAX = 2 * CONNECTIONS_MAX
"""More are closed at once: each takes an open file, which the node may need for its peers."""
_BACKLOG = 16
"""asyncio accepts so many at a time, even if no file is left to be opened."""

_WAITING_MAX = 512
"""So many more wait in the system to be accepted. A host whose connection finds no place there
tries again a second later."""

_STUCK_S = 10
"""A connection may take so long to send a request, or to read its answer."""
_IDLE_S = 5
_END_S = 1
"""How long the end waits for answers on their way."""


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
            h11_max_incomplete_event_size=HEAD_SIZE_MAX_BYTES,
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

    begun_s = 0.0
    """When it began, on the loop's clock."""

    @override
    def connection_made(  # type: ignore[override]  # As the class above it declares.
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self.begun_s = self.loop.time()
        if len(self.connections) >= CONNECTIONS_MAX:
            self._make_room()
        if len(self.connections) > _OPEN_MAX:
            transport.abort()
        else:
            self.loop.call_later(_STUCK_S, self._look, self.cycle)

    def _make_room(self) -> None:
        """Close another connection that asks nothing, or at least does not read its answer.

        It is one of the host that has most of them, and of these the one that was there longest.
        So whoever opens many connections takes the place of nobody but himself, for long.
        """
        others = [each for each in self.connections if isinstance(each, _Connection)]
        others = [each for each in others if each is not self and not each.transport.is_closing()]
        num_of = Counter(each.client and each.client[0] for each in others)
        idle = [each for each in others if each.cycle is None or each.cycle.response_complete]
        found = idle or [each for each in others if each.flow.write_paused]
        if found:
            last = min(
                found, key=lambda each: (-num_of[each.client and each.client[0]], each.begun_s)
            )
            last.transport.abort()
            # Its end is told in the next turn of the loop. The limit counts from now on.
            self.connections.discard(last)

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
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or []:
            # asyncio has told the system how many it accepts at a time.
            each.listen(_WAITING_MAX)

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # The daemon handles them.

    def end(self) -> None:
        """Have `serve` return soon."""
        self.should_exit = True
