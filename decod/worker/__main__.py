"""The compute process: reads jobs from a socket, one JSON object a line, until it closes.

The node process starts it with an inherited socket and memory file. Nobody types this command.

A signal that asks a node to leave may reach all processes of its host or session. This process
ignores it: the node process decides when work ends, and says so by closing the socket.
"""

import argparse
import json
import logging
import os
import signal
import socket
import sys
from typing import IO, Any

from decod.errors import DecodError
from decod.heap import keep_freed_memory
from decod.signals import LEAVE_SIGNALS
from decod.worker.arena import Arena
from decod.worker.jobs import JobRunner, error_reply, malformed

_LINE_SIZE_MAX_BYTES = 1 << 20

logger = logging.getLogger("decod.worker")


def serve(connection: socket.socket, runner: JobRunner) -> int:
    """Answer jobs in the order in which they come; return the process's exit code.

    An unexpected exception is answered too, and then ends the process: its state may be half
    changed. The node process starts another one.
    """
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
                connection.sendall(json.dumps(reply, separators=(",", ":")).encode() + b"\n")
            except (BrokenPipeError, ConnectionResetError):
                return 0
            if fatal:
                return 1
            try:
                runner.finish()
            except Exception:
                logger.exception("compute.failed")
                return 1
    return 0


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


def main(arguments: list[str] | None = None) -> int:
    """Run the compute process until its socket closes."""
    for number in LEAVE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m decod.worker")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--arena-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    with socket.socket(fileno=options.socket_fd) as connection:
        return serve(connection, JobRunner(Arena(options.arena_fd)))


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    # Nothing is left to save, and a node that leaves waits for this process. An orderly shutdown of
    # torch takes seconds on a busy host.
    os._exit(exit_code)
