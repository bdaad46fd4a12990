"""The page's answers to HTTP requests.

Only GET and HEAD are answered, but for requests to act (`decod.daemon.page.acting`). A request must
name this host by an IP address, as `localhost`, or by the name that the operator has chosen. A
foreign page whose name leads here (DNS rebinding) therefore gets nothing. All that a browser loads
comes from here.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from decod.daemon.page.acting import PATH, Acting
from decod.daemon.page.exposition import CONTENT_TYPE, exposition
from decod.daemon.page.feed import PageFeed
from decod.journal.logs import log_note

_log = logging.getLogger("decod")

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]

_NUMBER_MAX_DIGITS = 9

HEAD_SIZE_MAX_BYTES = 16 << 10
"""Of a request's head, whether it comes in one piece or in many."""


def page_app(feed: PageFeed, host: str, acting: Acting | None = None) -> ASGIApp:
    """Return the application.

    Args:
        feed: What the page shows.
        host: The name or address that the operator has chosen. Requests may use it.
        acting: Acts on the node; None if the page is only to be read.
    """

    async def state(request: Request) -> Response:
        query = request.query_params
        num_steps, num_events = (_count(query.get(name)) for name in ("steps", "events"))
        news = await feed.since(query.get("generation", ""), num_steps, num_events)
        news["acts"] = acting is not None
        text = json.dumps(news, separators=(",", ":"), allow_nan=False)
        return Response(text, media_type="application/json")

    async def metrics(_: Request) -> Response:
        text = exposition(await feed.status(), feed.history)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    routes = [
        Route("/state.json", state),
        Route("/metrics", metrics),
        *(_static_route(name, content) for name, content in _static_files()),
    ]
    if acting is not None:
        routes.append(Route(PATH, acting.act, methods=["POST"]))
    return _Guard(Router(routes, redirect_slashes=False), host, acting)


def _count(text: str | None) -> int:
    """Return the number of what a reader has; 0 if the text is none."""
    plain = text is not None and text.isascii() and text.isdecimal()
    return int(text) if plain and text and len(text) <= _NUMBER_MAX_DIGITS else 0


def _static_files() -> list[tuple[str, bytes]]:
    folder = files(__package__) / "static"
    return sorted((entry.name, entry.read_bytes()) for entry in folder.iterdir())


def _static_route(name: str, content: bytes) -> Route:
    media_type = _MEDIA_TYPES[name[name.rindex(".") :]]

    async def give(_: Request) -> Response:
        return Response(content, headers={"Content-Type": media_type})

    return Route("/" if name == "index.html" else f"/{name}", give)


class _Guard:
    """Refuses what is not for this page, and puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, host: str, acting: Acting | None) -> None:
        self._app, self._acting = app, acting
        self._names = {"localhost", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], *_RAW_HEADERS]}
            await send(message)

        app = self._refusal(scope) or self._app
        try:
            await app(scope, receive, guarded)
        except Exception as error:  # noqa: BLE001 - a bug in the page must not end the run.
            log_note(_log, "page.failed", {"reason": repr(error)[:200]})
            if not started:
                answer = PlainTextResponse("this is a bug in decod: see node.log\n", 500)
                await answer(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        """Return the refusal of a request, or None if it is to be answered."""
        if _head_size_bytes(scope) > HEAD_SIZE_MAX_BYTES:
            text = f"the head of a request has at most {HEAD_SIZE_MAX_BYTES} bytes\n"
            return PlainTextResponse(text, 431, headers={"Connection": "close"})
        acts = self._acting is not None and (scope["method"], scope["path"]) == ("POST", PATH)
        if not acts and scope["method"] not in ("GET", "HEAD"):
            text = "this page can only be read: use GET\n"
            return PlainTextResponse(text, 405, headers={"Allow": "GET, HEAD"})
        given = [value for name, value in scope["headers"] if name == b"host"]
        if len(given) == 1 and self._is_here(given[0].decode("latin-1")):
            refusal = self._acting.refusal(scope) if self._acting is not None and acts else None
            return None if refusal is None else PlainTextResponse(refusal[1], refusal[0])
        text = (
            "the Host header does not name this node: use its IP address, localhost, or the name "
            "in --page NAME:PORT\n"
        )
        return PlainTextResponse(text, 421)

    def _is_here(self, given: str) -> bool:
        """Return whether a Host header names this node. A page elsewhere can't fake an address."""
        name, port = _split(given)
        if port and not (port.isascii() and port.isdecimal()):
            return False
        if name.lower() in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _head_size_bytes(scope: Scope) -> int:
    """Return about how many bytes a request's head has."""
    line = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
    return line + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _split(host: str) -> tuple[str, str]:
    """Return name (without brackets) and port of a Host header."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name, port.removeprefix(":")
    name, _, port = host.partition(":")
    return name, port


# --- Uvicorn -------------------------------------------------------------------------------------
# Uvicorn, set up for a daemon that has an event loop, signals and a log of its own.


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
