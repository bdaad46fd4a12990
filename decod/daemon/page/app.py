"""The page's answers to HTTP requests.

Only GET and HEAD are answered, but for requests to act (`decod.daemon.page.acting`). A request must
name this host by an IP address, as `localhost`, or by the name that the operator has chosen. A
foreign page whose name leads here (DNS rebinding) therefore gets nothing. All that a browser loads
comes from here.
"""

import gzip
import ipaddress
import logging
from collections import deque
from collections.abc import Callable, Collection
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decod.daemon.page.acting import PATH, Acting
from decod.daemon.page.exposition import CONTENT_TYPE, exposition
from decod.daemon.page.feed import PageFeed, public_news
from decod.daemon.page.http_server import HEAD_SIZE_MAX_BYTES
from decod.journal.logs import log_note
from decod.net.dht_table import network_of
from decod.net.door import plain_ip
from decod.net.net_limits import RateLimiter

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

Has = tuple[str, int, int, str]
"""What a reader has: generation, number of steps and of events, and the rest (`RunHistory`)."""
_NOTHING: Has = ("", 0, 0, "")

_EACH_PER_S, _EACH_AT_ONCE = 4.0, 60.0
_ALL_PER_S, _ALL_AT_ONCE = 40.0, 200.0
"""Requests for the public page, from one network and from all. A reader asks every five seconds.
Answers are shared while they are fresh, and packed: the largest have about 30 KB."""

_TOLD_MAX = 32
"""Readers of the public page who have had one of the last so many answers get only what is new."""

_GZIP_LEVEL = 5


def page_app(feed: PageFeed, host: str, acting: Acting | None = None) -> ASGIApp:
    """Return the application.

    Args:
        feed: What the page shows.
        host: The name or address that the operator has chosen. Requests may use it.
        acting: Acts on the node; None if the page is only to be read.
    """

    async def state(request: Request) -> Response:
        news = await feed.since(*_has(request))
        return JSONResponse({**news, "acts": acting is not None})

    async def metrics(_: Request) -> Response:
        text = exposition(await feed.status(), feed.history)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    routes = [
        Route("/state.json", state),
        Route("/metrics", metrics),
        *_static_routes(),
    ]
    if acting is not None:
        routes.append(Route(PATH, acting.act, methods=["POST"]))
    return _Guard(Router(routes, redirect_slashes=False), host, acting)


def public_app(feed: PageFeed, clock: Callable[[], float]) -> ASGIApp:
    """Return the application for the world: only read, without addresses, and limited in rate.

    Args:
        feed: What the page shows.
        clock: Returns monotonic seconds.
    """

    shared: dict[Has, bytes] = {}
    told: deque[tuple[int, int]] = deque(maxlen=_TOLD_MAX)
    look = -1

    async def state(request: Request) -> Response:
        nonlocal look
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return PlainTextResponse("this is told with gzip only: curl --compressed\n", 406)
        await feed.status()
        if look != feed.num_looks:
            look = feed.num_looks
            shared.clear()
        has = _known(_has(request), feed, told)
        if (packed := shared.get(has)) is None:
            news = public_news(await feed.since(*has))
            counts = news["history"]["num_steps"], news["history"]["num_events"]
            if counts not in told:
                told.append(counts)
            packed = shared[has] = gzip.compress(bytes(JSONResponse(news).body), _GZIP_LEVEL)
        return Response(
            packed, headers={"Content-Type": "application/json", "Content-Encoding": "gzip"}
        )

    routes = [Route("/state.json", state), *_static_routes()]
    return _Guard(_Limited(Router(routes, redirect_slashes=False), clock))


def _has(request: Request) -> Has:
    """Return what a reader says it has."""
    query = request.query_params
    num_steps, num_events = (_count(query.get(name)) for name in ("steps", "events"))
    return query.get("generation", ""), num_steps, num_events, query.get("rest", "")


def _known(has: Has, feed: PageFeed, told: Collection[tuple[int, int]]) -> Has:
    """Return what a reader of the public page has, or `_NOTHING` if no reader has just that.

    So there are few different answers, whatever is asked for.
    """
    generation, num_steps, num_events, rest = has
    if generation != feed.history.generation or (num_steps, num_events) not in told:
        return _NOTHING
    return generation, num_steps, num_events, rest if rest == feed.history.rest else ""


def _count(text: str | None) -> int:
    """Return the number of what a reader has; 0 if the text is none."""
    plain = text is not None and text.isascii() and text.isdecimal()
    return int(text) if plain and text and len(text) <= _NUMBER_MAX_DIGITS else 0


def _static_routes() -> list[Route]:
    folder = files(__package__) / "static"
    found = sorted((entry.name, entry.read_bytes()) for entry in folder.iterdir())
    return [_static_route(name, content) for name, content in found]


def _static_route(name: str, content: bytes) -> Route:
    media_type = _MEDIA_TYPES[name[name.rindex(".") :]]

    async def give(_: Request) -> Response:
        return Response(content, headers={"Content-Type": media_type})

    return Route("/" if name == "index.html" else f"/{name}", give)


class _Guard:
    """Refuses what is not for this page, and puts the security headers on every answer.

    Args:
        app: Answers the rest.
        host: The name or address that the operator has chosen. Absent: any will do.
        acting: Acts on the node; None if the page is only to be read.
    """

    def __init__(self, app: ASGIApp, host: str | None = None, acting: Acting | None = None) -> None:
        self._app, self._acting = app, acting
        self._names = None if host is None else {"localhost", host.lower()}

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
        if self._names is None:
            return None
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
        assert self._names is not None, "only then names matter"
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


class _Limited:
    """Answers each network, and all of them together, only so often."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float]) -> None:
        self._app = app
        self._each = RateLimiter(clock, rate_per_s=_EACH_PER_S, burst=_EACH_AT_ONCE)
        self._all = RateLimiter(clock, rate_per_s=_ALL_PER_S, burst=_ALL_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        address = plain_ip(client[0]) if client else ""
        app = self._app
        network = (network_of(address) if address else None) or address
        if not (self._each.allow(network) and self._all.allow("")):
            text = "too many requests: this page is read every few seconds\n"
            app = PlainTextResponse(text, 429, headers={"Retry-After": "5"})
        await app(scope, receive, send)
