"""The local socket: how `decod status`, `export` and `drain` talk to the daemon of a state folder.

One JSON object a line in, one out. The socket belongs to the user that runs the daemon. This module
imports nothing heavy: `decod status` must answer at once.
"""

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from decod.errors import ConfigError, DecodError, NotRunningError

SOCKET_NAME = "decod.sock"
_LINE_SIZE_MAX_BYTES = 16 << 20
"""Longest answer: the status of a run with many thousand members."""

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def ask(state_dir: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Return the answer of the daemon that uses `state_dir`.

    Raises:
        NotRunningError: No daemon answers there within `timeout_s`.
        DecodError: The daemon's own error, with its class's exit code.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            _at_socket(state_dir, connection.connect)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline(_LINE_SIZE_MAX_BYTES)
        answer = json.loads(line)
    except (OSError, ValueError) as error:
        raise _no_daemon(state_dir, error) from error
    if not isinstance(answer, dict):
        raise _no_daemon(state_dir, ValueError("its answer is not an object"))
    if "error" in answer:
        raise _error_of(answer["error"])
    return answer


def _no_daemon(state_dir: Path, error: Exception) -> NotRunningError:
    if isinstance(error, PermissionError):
        why = "the daemon belongs to another user, or the folder can't be entered"
        fix = "run the command as that user"
    elif isinstance(error, TimeoutError):
        why = "it runs, but does not answer in time"
        fix = "look at its log in that folder"
    else:
        why = "no node runs with that state folder"
        fix = "start one with `decod leader` or `decod join`, or name its --state-dir"
    return NotRunningError(f"no daemon answers in {state_dir}", why=why, fix=fix)


def _error_of(error: dict[str, Any]) -> DecodError:
    exit_code = int(error.get("exit_code", 1))
    kinds = {kind.exit_code: kind for kind in _all_kinds(DecodError)}
    kind = kinds.get(exit_code, DecodError)
    what, why, fix = (str(error.get(key, "unknown")) for key in ("what", "why", "fix"))
    return kind(what, why=why, fix=fix, code=str(error.get("code", kind.code)))


def _all_kinds(kind: type[DecodError]) -> list[type[DecodError]]:
    below = [grandchild for child in kind.__subclasses__() for grandchild in _all_kinds(child)]
    return [*below, kind]


def _at_socket(state_dir: Path, use: Callable[[str], Any]) -> None:
    """Call `use` with a path of the socket that is short enough for the system (108 bytes)."""
    path = state_dir / SOCKET_NAME
    if len(os.fsencode(path)) < 100:
        use(str(path))
        return
    folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        use(f"/proc/self/fd/{folder}/{SOCKET_NAME}")
    finally:
        os.close(folder)


class ControlServer:
    """Answers on the socket of one state folder."""

    def __init__(self, state_dir: Path, answer: Answer) -> None:
        self._state_dir = state_dir
        self._answer = answer
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. The caller holds the folder's lock, so an old socket is a dead one."""
        path = self._state_dir / SOCKET_NAME
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            _at_socket(self._state_dir, listener.bind)
            path.chmod(0o600)
            listener.listen(16)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"can't listen on {path}",
                why=str(error),
                fix="give a --state-dir on a local disk that you may write to",
                code="E-CFG-040",
            ) from error
        listener.setblocking(False)  # noqa: FBT003 - the standard library's signature.
        self._server = await asyncio.start_unix_server(
            self._serve, sock=listener, limit=_LINE_SIZE_MAX_BYTES
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        (self._state_dir / SOCKET_NAME).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, TimeoutError):
            try:
                async with asyncio.timeout(10.0):
                    line = await reader.readline()
                request = json.loads(line)
                answer = await self._answer(request if isinstance(request, dict) else {})
            except DecodError as error:
                answer = {"error": describe_error(error)}
            except ValueError:
                answer = {
                    "error": {
                        "code": "E-RUN-002",
                        "what": "unreadable request",
                        "why": "a request is one JSON object on one line",
                        "fix": "use the decod command of the same version",
                    }
                }
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()


def describe_error(error: DecodError) -> dict[str, Any]:
    """Return an error as it travels over the socket."""
    return {
        "code": error.code,
        "what": error.what,
        "why": error.why,
        "fix": error.fix,
        "exit_code": error.exit_code,
    }
