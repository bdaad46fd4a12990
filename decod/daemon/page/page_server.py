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
from contextlib import ExitStack, asynccontextmanager, suppress
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
    from decod.daemon.page.http_server import HttpServer

_log = logging.getLogger("decod")

_BACKLOG = 16
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@asynccontextmanager
async def page_served(config: NodeConfig, host: Host, say: Say) -> AsyncIterator[None]:
    """Serve the page and the public page while the context lasts, if the operator wants them.

    Raises:
        NetworkError: An address that the operator has chosen can't be used (E-NET-033).
    """
    feed = PageFeed(host.status, host.history, time.monotonic)
    with ExitStack() as stack:
        servings = []
        if config.serves_page:
            listener = stack.enter_context(_listener(config))
            servings.append(_serve(config, host, feed, listener, say))
        if config.public_page_port is not None:
            listener = stack.enter_context(_public_listener(config.public_page_port))
            servings.append(_serve_public(feed, listener))
        tasks = [asyncio.create_task(serving) for serving in servings]
        for task in tasks:
            task.add_done_callback(_ended)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(
    config: NodeConfig, host: Host, feed: PageFeed, listener: socket.socket, say: Say
) -> None:
    server, token = await in_thread(lambda: _loaded(config, host, feed))
    address = join_address(config.page_host, listener.getsockname()[1])
    # Behind #, so that browsers never send it, and no log on the way has it.
    host.shows_page(f"http://{address}/" + (f"#token={token}" if token else ""))
    log_note(_log, "page.served", {"url": f"http://{address}/"})
    if config.page_host not in _LOOPBACK:
        say(f"http://{address}/ shows the run's nodes, and what they do, to all who can reach it")
    await server.run(listener)


def _loaded(config: NodeConfig, host: Host, feed: PageFeed) -> "tuple[HttpServer, str]":
    """Return the server, and the token with which its page acts; empty if it can't.

    Loading its libraries takes a tenth of a second.
    """
    from decod.daemon.page.acting import Acting
    from decod.daemon.page.app import page_app
    from decod.daemon.page.http_server import HttpServer

    acting = None
    if config.page_acts and config.page_host in _LOOPBACK:
        acting = Acting(host.operate)
    server = HttpServer(page_app(feed, config.page_host, acting))
    return server, "" if acting is None else acting.token


async def _serve_public(feed: PageFeed, listener: socket.socket) -> None:
    server = await in_thread(lambda: _loaded_public(feed))
    log_note(_log, "page.published", {"port": listener.getsockname()[1]})
    await server.run(listener)


def _loaded_public(feed: PageFeed) -> "HttpServer":
    from decod.daemon.page.app import public_app
    from decod.daemon.page.http_server import HttpServer

    return HttpServer(public_app(feed, time.monotonic))


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
        fix = "end the other program, choose another --page HOST:PORT, or give --no-page"
        raise _unusable(join_address(host, port or 0), error, fix) from error


def _public_listener(port: int) -> socket.socket:
    """Return a socket at all addresses of this host."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual
        )
    except OSError as error:
        fix = "end the other program, or choose another --public-page PORT"
        raise _unusable(f"port {port}", error, fix) from error


def _unusable(address: str, error: OSError, fix: str) -> NetworkError:
    return NetworkError(
        f"can't serve the page on {address}", why=why_of(error), fix=fix, code="E-NET-033"
    )
