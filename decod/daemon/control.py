"""The local socket, over which `decod status`, `pause` and others talk to a folder's daemon.

A request is one line with a JSON object, and so is the answer. The socket belongs to the user that
runs the daemon. This module imports nothing heavy: `decod status` must answer at once.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from decod.errors import ConfigError, DecodError, NotRunningError
from decod.system import PROC, short_path
from decod.tasks import TaskSet
from decod.texts import why_of

_log = logging.getLogger(__name__)

SOCKET_NAME = "decod.sock"
SCHEMA_VERSION = 1
"""The version of the status that a daemon gives, and that `decod status` draws."""

NO_NODE_YET = "E-RUN-050"
"""The code of a daemon's error while it waits for what its node needs."""

_LINE_SIZE_MAX_BYTES = 16 << 20
"""Longest answer: the status of a run with many thousands of members."""
_REQUEST_SIZE_MAX_BYTES = 1 << 16
_REQUEST_TIMEOUT_S = 10.0
_BACKLOG = 16
"""Clients that may wait. Small, since asyncio tries to accept as many in a row, even in vain."""

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def ask(state_dir: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Send a request to the daemon that uses `state_dir`, and return its answer.

    Raises:
        NotRunningError: No daemon answers there within `timeout_s`.
        DecodError: The daemon's own error, with the exit code of its class.
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
    if isinstance(answer.get("error"), dict):
        raise _error_of(answer["error"])
    return answer


def folders_of_host(table: Path = PROC / "net/unix") -> list[Path]:
    """Return the state folders of the daemons on this host, as far as the system names them.

    It does not name those of other containers, and those whose path is too long for a socket.

    Args:
        table: The system's list of local sockets. Elsewhere than on Linux, there is none.
    """
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:
        return []
    # The path is the eighth word, and may hold spaces.
    paths = [Path(words[7]) for line in lines if len(words := line.split(maxsplit=7)) == 8]
    found = {path.parent for path in paths if path.name == SOCKET_NAME and path.is_absolute()}
    return sorted(each for each in found if not each.is_relative_to(PROC))


def _no_daemon(state_dir: Path, error: Exception) -> NotRunningError:
    if isinstance(error, PermissionError):
        why = "the daemon belongs to another user, or the folder can't be entered"
        fix = "run the command as that user"
    elif isinstance(error, TimeoutError):
        why = "it runs, but does not answer in time"
        fix = "look at its log in that folder"
    else:
        why = "no node runs with that state folder"
        fix = (
            "start one with `decod leader`, `decod join` or a training script, or name its "
            "--state-dir"
        )
    return NotRunningError(f"no daemon answers in {state_dir}", why=why, fix=fix)


def _error_of(error: dict[str, Any]) -> DecodError:
    exit_code = error.get("exit_code")
    kinds = {int(kind.exit_code): kind for kind in _all_kinds(DecodError)}
    kind = kinds.get(exit_code, DecodError) if type(exit_code) is int else DecodError
    what, why, fix = (str(error.get(key, "unknown")) for key in ("what", "why", "fix"))
    return kind(what, why=why, fix=fix, code=str(error.get("code", kind.code)))


def _all_kinds(kind: type[DecodError]) -> list[type[DecodError]]:
    below = [grandchild for child in kind.__subclasses__() for grandchild in _all_kinds(child)]
    return [*below, kind]


def _at_socket(state_dir: Path, use: Callable[[str], Any]) -> None:
    """Call `use` with a path to the socket that fits the system's limit of 108 bytes."""
    path = state_dir / SOCKET_NAME
    if len(os.fsencode(path)) < 100:
        use(str(path))
        return
    with short_path(state_dir) as folder:
        use(str(folder / SOCKET_NAME))


class ControlServer:
    """The daemon's side of the socket in a state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._answer: Answer = _answer_nothing
        self._server: asyncio.Server | None = None
        self._serving = TaskSet()

    async def answer_with(self, answer: Answer) -> None:
        """Answer requests with `answer` from now on. The first call begins to listen.

        Clients that still wait for an answer get the error that the node has stopped.
        """
        await self._serving.close()
        self._answer = answer
        if self._server is None:
            await self._listen()

    async def _listen(self) -> None:
        # The caller holds the folder's lock, so a socket that exists is dead.
        path = self._state_dir / SOCKET_NAME
        listener = socket.socket(socket.AF_UNIX)
        try:
            path.unlink(missing_ok=True)
            _at_socket(self._state_dir, listener.bind)
            path.chmod(0o600)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"can't listen on {path}",
                why=why_of(error),
                fix="remove it if it is a folder, or give a --state-dir on a local disk that you "
                "may write to",
                code="E-CFG-040",
            ) from error
        listener.setblocking(False)  # noqa: FBT003 - the standard library's signature.
        self._server = await asyncio.start_unix_server(
            self._accept, sock=listener, limit=_REQUEST_SIZE_MAX_BYTES, backlog=_BACKLOG
        )

    async def close(self) -> None:
        """Take no more requests. Waiting clients get the error that the node has stopped."""
        if self._server is not None:
            self._server.close()
            self._server = None
            # A disk that fails now must not turn a good end into an error.
            with suppress(OSError):
                (self._state_dir / SOCKET_NAME).unlink()
        await self._serving.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.start(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any] | None = None
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                line = await reader.readline()
            answer = await self.answer_to(line)
        except ValueError:
            answer = _error_answer(_unreadable(f"more than {_REQUEST_SIZE_MAX_BYTES} bytes"))
        except asyncio.CancelledError:
            answer = _error_answer(_ending())
        except (ConnectionError, TimeoutError):
            _log.debug("a client of the control socket has gone or says nothing")
        if answer is not None:
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    async def answer_to(self, line: bytes) -> dict[str, Any]:
        """Return the answer to one request, or its error in the form of the socket."""
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return _error_answer(_unreadable("no JSON"))
        if not isinstance(request, dict):
            return _error_answer(_unreadable("no JSON object"))
        try:
            return await self._answer(request)
        except DecodError as error:
            return _error_answer(error)
        except Exception as error:  # noqa: BLE001 - answered, and logged with its traceback.
            # Not raised: a bug in an answer must not end the run.
            _log.exception("control.failed")
            return _error_answer(_unexpected(error))


async def _answer_nothing(request: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    raise _ending()


def _unreadable(what: str) -> DecodError:
    return DecodError(
        f"unreadable request: {what}",
        why="a request is one JSON object on one line",
        fix="use the decod command of the same version",
        code="E-RUN-002",
    )


def _ending() -> NotRunningError:
    return NotRunningError(
        "the daemon ended before it could answer",
        why="its node has stopped",
        fix="look at its output, or at node.log in its state folder",
        code="E-RUN-007",
    )


def _unexpected(error: Exception) -> DecodError:
    return DecodError(
        f"{type(error).__name__} in the daemon: {str(error)[:200]}",
        why="this is a bug in decod",
        fix="report it with node.log of the daemon's state folder",
    )


def _error_answer(error: DecodError) -> dict[str, Any]:
    return {"error": describe_error(error)}


def describe_error(error: DecodError) -> dict[str, Any]:
    """Return an error in the form that the socket carries."""
    return {
        "code": error.code,
        "what": error.what,
        "why": error.why,
        "fix": error.fix,
        "exit_code": error.exit_code,
    }
