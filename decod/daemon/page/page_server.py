"""Serves a run's page and metrics over HTTP, in the node's event loop.

The page outlives the node's lives in the run, as the control socket does. Whatever happens to it,
the node trains on. The libraries for HTTP are loaded in a thread when the daemon starts, so that
the event loop does not wait for them.
"""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from decod.config.node_config import PAGE_PORT, NodeConfig
from decod.daemon.host import Host, Say
from decod.daemon.page.feed import PageFeed
from decod.errors import NetworkError
from decod.journal.logs import log_note
from decod.net.address import join_address
from decod.tasks import in_thread
from decod.texts import why_of

if TYPE_CHECKING:
    from decod.daemon.page.app import HttpServer

_log = logging.getLogger("decod")

_BACKLOG = 16
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@asynccontextmanager
async def page_served(config: NodeConfig, host: Host, say: Say) -> AsyncIterator[None]:
    """Serve the page while the context lasts, if the operator wants one.

    Raises:
        NetworkError: The address that the operator has chosen can't be used (E-NET-033).
    """
    if not config.serves_page:
        yield
        return
    listener = _listener(config)
    serving = asyncio.create_task(_serve(config, host, listener, say))
    serving.add_done_callback(_ended)
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.wait({serving})
        listener.close()


async def _serve(config: NodeConfig, host: Host, listener: socket.socket, say: Say) -> None:
    server, token = await in_thread(lambda: _loaded(config, host))
    address = join_address(config.page_host, listener.getsockname()[1])
    # Behind #, so that browsers never send it, and no log on the way has it.
    host.shows_page(f"http://{address}/" + (f"#token={token}" if token else ""))
    log_note(_log, "page.served", {"url": f"http://{address}/"})
    if config.page_host not in _LOOPBACK:
        say(f"http://{address}/ shows the run's nodes, and what they do, to all who can reach it")
    await server.run(listener)


def _loaded(config: NodeConfig, host: Host) -> "tuple[HttpServer, str]":
    """Return the server, and the token with which its page acts; empty if it can't.

    Loading its libraries takes a tenth of a second.
    """
    from decod.daemon.page.acting import Acting
    from decod.daemon.page.app import HttpServer, page_app

    feed = PageFeed(host.status, host.history, time.monotonic)
    acting = None
    if config.page_acts and config.page_host in _LOOPBACK:
        acting = Acting(host.operate)
    server = HttpServer(page_app(feed, config.page_host, acting))
    return server, "" if acting is None else acting.token


def _ended(serving: "asyncio.Task[None]") -> None:
    if not serving.cancelled() and (error := serving.exception()) is not None:
        log_note(_log, "page.failed", {"reason": repr(error)[:200]})


def _listener(config: NodeConfig) -> socket.socket:
    """Return the socket. Unless the operator has chosen a port, any free one is right."""
    host, port = config.page_host, config.page_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port is None:
        with suppress(OSError):
            return socket.create_server((host, PAGE_PORT), family=family, backlog=_BACKLOG)
    try:
        return socket.create_server((host, port or 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise NetworkError(
            f"can't serve the page on {join_address(host, port or 0)}",
            why=why_of(error),
            fix="end the other program, choose another --page HOST:PORT, or give --no-page",
            code="E-NET-033",
        ) from error
