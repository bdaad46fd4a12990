"""Serves jobs over a socket, one JSON object a line, until it closes."""

import argparse
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import IO, Any, NoReturn

from decod.errors import DecodError
from decod.process import LEAVE_SIGNALS, keep_freed_memory
from decod.worker.arena_view import Arena
from decod.worker.job import error_reply, malformed
from decod.worker.runner import Runner

_LINE_SIZE_MAX_BYTES = 8 << 20
"""As the node process has it, in `decod.driver.compute`."""

logger = logging.getLogger("decod.worker")


def serve(connection: socket.socket, runner: Runner) -> int:
    """Answer jobs in the order in which they come; return the process's exit code.

    An unexpected exception is answered too, and then ends the process: its state may be half
    changed. The node process starts another one.
    """
    answers = _Answers(connection)
    runner.ends = answers.end
    with connection.makefile("rb") as lines:
        while line := _read_line(lines):
            message: Any = None
            try:
                message = _parse(line)
                reply, fatal = runner.run(message), False
            except DecodError as error:
                # After a broken line, the next bytes need not begin a message.
                reply, fatal = error_reply(-1, error), True
            except Exception as error:
                logger.exception("compute.failed")
                reply, fatal = _unexpected(message, error), True
            try:
                answers.send(reply)
            except (BrokenPipeError, ConnectionResetError):
                return 0
            if fatal:
                return 1
    return 0


class _Answers:
    """Sends what a process says, whole lines one after another.

    Args:
        connection: To the process that gives the jobs.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message. Raises `OSError` if nobody listens any more."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._connection.sendall(line)

    def end(self, reason: str) -> None:
        """Say why this process ends, and end it. From any thread."""
        logger.error("compute.ends %s", reason)
        with suppress(OSError):
            self.send({"ends": reason})
        end_at_once(1)


def _read_line(lines: IO[bytes]) -> bytes:
    try:
        return lines.readline(_LINE_SIZE_MAX_BYTES + 1)
    except ConnectionResetError:
        # The node process was killed before it had read all replies.
        return b""


def _unexpected(message: Any, error: Exception) -> dict[str, Any]:
    job_id = message.get("job") if isinstance(message, dict) else None
    wrapped = DecodError(
        f"unexpected {type(error).__name__} in the compute process: {str(error)[:1000]}",
        why="its state may be half changed, so it ends",
        fix="report it with the log; the node starts another compute process",
        code="E-INT-002",
    )
    return error_reply(job_id, wrapped)


def _parse(line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise malformed(f"a line of {len(line)} bytes without an end")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise malformed(f"a line that is no JSON: {line[:100]!r}") from error
    if not isinstance(message, dict):
        raise malformed(f"a line that is no JSON object: {line[:100]!r}")
    return message


def serve_inherited(
    name: str, make_runner: Callable[[Arena], Runner], arguments: Sequence[str] | None = None
) -> int:
    """Serve jobs on the socket and arena that the node process has passed on.

    A signal that asks a node to leave may reach all processes of its host or session. This process
    ignores it: the node process decides when work ends, and says so by closing the socket.

    Args:
        name: Of the program.
        make_runner: Makes what runs the jobs.
        arguments: Of the command line. None: those of this process.
    """
    for number in LEAVE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--arena-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    with socket.socket(fileno=options.socket_fd) as connection:
        runner = make_runner(Arena(options.arena_fd))
        try:
            return serve(connection, runner)
        finally:
            runner.close()


def end_at_once(exit_code: int) -> NoReturn:
    """End the process: nothing is left to save, and a node that leaves waits for it.

    An orderly shutdown of torch takes seconds on a busy host.
    """
    logging.shutdown()
    os._exit(exit_code)
