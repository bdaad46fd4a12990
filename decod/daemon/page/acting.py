"""What a reader of the page may do with this node, and how it proves that it may.

A page on the loopback can act, as `decod pause` and others do: it sends the same requests. Whoever
acts has the token that `decod status` shows in the page's address. Other sites can't act: browsers
name them in the request, and they do not know the token.
"""

import base64
import ipaddress
import json
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress

import segno
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from decod.daemon.control import describe_error
from decod.errors import ConfigError

PATH = "/do"

BODY_SIZE_MAX_BYTES = 4096

FIELDS: dict[str, frozenset[str]] = {
    "pause": frozenset(("free_device",)),
    "resume": frozenset(),
    "leaving": frozenset(),
    "drain": frozenset(("end_run",)),
    "set": frozenset(("values",)),
    "token_create": frozenset(("uses", "ttl_s", "note")),
    "token_list": frozenset(),
    "token_revoke": frozenset(("id",)),
    "newcomer_list": frozenset(),
    "newcomer_decide": frozenset(("node", "may_enter")),
    "node_ban": frozenset(("node",)),
}
"""The requests of the control socket that the page may send, and their fields."""


class Acting:
    """Passes the requests of readers who have the token on to the node.

    Args:
        answer: Answers one request of the control socket, or returns its error.
    """

    def __init__(self, answer: Callable[[bytes], Awaitable[dict[str, object]]]) -> None:
        self._answer = answer
        # As long as a join token, so that bug reports leave it out as well.
        self.token = base64.b32encode(secrets.token_bytes(20)).decode().lower()

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and text for a request that may not act; None if it may."""
        headers = Headers(scope=scope)
        client = scope.get("client")
        if client is None or not _is_loopback(client[0]):
            return 403, "only this host can act on its node\n"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{headers.get('host')}":
            return 403, "another site can't act on this node\n"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return 403, "another site can't act on this node\n"
        # A browser sends this type to another site only if that allows it, and decod never does.
        if headers.get("content-type") != "application/json":
            return 415, "a request to act is JSON: Content-Type: application/json\n"
        given = headers.get("authorization", "").encode("latin-1")
        if not secrets.compare_digest(given, f"Bearer {self.token}".encode()):
            return 401, "the token is wrong: open the address of `decod status`\n"
        return None

    async def act(self, request: Request) -> Response:
        """Have the node do what a request asks for; return its answer, or why not."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > BODY_SIZE_MAX_BYTES:
                return _refused(f"it has more than {BODY_SIZE_MAX_BYTES} bytes")
        asked = None
        with suppress(ValueError, RecursionError):
            asked = json.loads(body)
        if not isinstance(asked, dict):
            return _refused("it is no JSON object")
        command = str(asked.get("command"))
        fields = FIELDS.get(command)
        if fields is None:
            return _refused(f"the page can't {command[:40]!r}")
        if unknown := asked.keys() - fields - {"command"}:
            return _refused(f"{command} has no {min(unknown)[:40]!r}")
        answer = await self._answer(json.dumps(asked).encode())
        if isinstance(join_string := answer.get("join_string"), str):
            answer["qr"] = _qr_rows(join_string)
        return JSONResponse(answer, 409 if "error" in answer else 200)


def _qr_rows(text: str) -> list[str]:
    """Return the rows of a QR code, with 1 for each dark module."""
    rows = segno.make_qr(text, error="l").matrix
    return ["".join(map(str, row)) for row in rows]


def _is_loopback(address: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _refused(why: str) -> Response:
    error = ConfigError(
        "the node can't take this request",
        why=why,
        fix="load the page again; if that does not help, use the decod command",
        code="E-RUN-003",
    )
    return JSONResponse({"error": describe_error(error)}, 400)
