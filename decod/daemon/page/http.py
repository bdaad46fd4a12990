"""Uvicorn, set up for a daemon that has an event loop, signals and a log of its own."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

CONNECTIONS_MAX = 32
"""Connections at a time. More are told to come later (503)."""

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
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
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


class _Server(uvicorn.Server):
    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # The daemon handles them.

    def end(self) -> None:
        """Have `serve` return soon."""
        self.should_exit = True
