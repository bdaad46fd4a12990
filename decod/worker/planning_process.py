"""The planning process: chooses flows, so that the node process need not stop for it.

It reads jobs from a socket, one JSON object a line, and answers each in turn, until the socket
closes. It keeps no state but what it has computed before. An error ends it with a traceback: the
node process starts another one. Nobody types this command.
"""

import argparse
import json
import signal
import socket
import time
from contextlib import suppress
from typing import Any

from decod.planner.deciding import decide
from decod.process import LEAVE_SIGNALS
from decod.protocol.core.job_codec import Request, fields_of, line_of
from decod.protocol.core.jobs import DecideFlows, FlowsDecided


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to one job."""
    begin_s = time.perf_counter()
    result = FlowsDecided(decide(Request.parse(message, DecideFlows).job.unsettled))
    duration_s = time.perf_counter() - begin_s
    return {
        "job": message["job"],
        "ok": True,
        "result": fields_of(result),
        "seconds": duration_s,
        "copy_seconds": 0.0,
    }


def serve(connection: socket.socket) -> None:
    """Answer jobs until the node process closes the connection, or has ended."""
    with suppress(ConnectionError), connection.makefile("rb") as lines:
        for line in lines:
            connection.sendall(line_of(answer(json.loads(line))))


def main(arguments: list[str] | None = None) -> None:
    """Run the planning process until its socket closes."""
    for number in LEAVE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m decod.worker.planning_process")
    parser.add_argument("--socket-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    with socket.socket(fileno=options.socket_fd) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
