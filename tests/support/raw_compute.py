"""Jobs of a compute process, without a node."""

import json
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from decod.worker.arena import Arena
from decod.worker.jobs import JobRunner

DEADLINE_S = 240
"""Generous: several processes load torch, on a machine that may be busy."""


class Jobs(ABC):
    """Runs jobs, and reads and writes the arena."""

    arena_fd: int

    @abstractmethod
    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the reply to a job."""

    def result(self, kind: str, **fields: Any) -> dict[str, Any]:
        reply = self.ask(kind, **fields)
        assert reply["ok"], reply
        assert 0 <= reply["copy_seconds"] <= reply["seconds"]
        found: dict[str, Any] = reply["result"]
        return found

    def write(self, offset: int, array: np.ndarray) -> dict[str, int]:
        os.pwrite(self.arena_fd, array.tobytes(), offset)
        return {"offset": offset, "num_bytes": array.nbytes}

    def read(self, region: dict[str, int], dtype: type = np.float32) -> np.ndarray:
        data = os.pread(self.arena_fd, region["num_bytes"], region["offset"])
        return np.frombuffer(data, dtype=dtype)


class Here(Jobs):
    """A compute process's jobs, run in this process."""

    def __init__(self) -> None:
        self.arena_fd = os.memfd_create("arena")
        os.ftruncate(self.arena_fd, 1 << 20)
        self.runner = JobRunner(Arena(self.arena_fd))

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        reply = self.runner.run({"job": 0, "kind": kind, **fields})
        self.runner.finish()
        return reply

    def close(self) -> None:
        self.runner.close()
        os.close(self.arena_fd)


class Node(Jobs):
    """The node's end of a compute process.

    Args:
        variables: Of the process's environment, beside those of this one.
    """

    def __init__(self, **variables: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_S)
        self.arena_fd = os.memfd_create("arena")
        os.ftruncate(self.arena_fd, 1 << 20)
        arguments = ["--socket-fd", str(theirs.fileno()), "--arena-fd", str(self.arena_fd)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "decod.worker", *arguments],
            pass_fds=(theirs.fileno(), self.arena_fd),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables},
        )
        theirs.close()
        self.lines = self.socket.makefile("rb")
        self.num_jobs = 0

    def send(self, kind: str, **fields: Any) -> None:
        message = {"job": self.num_jobs, "kind": kind, "inputs": [], "outputs": [], **fields}
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def said(self) -> dict[str, Any]:
        """Return the next thing that the process says."""
        message: dict[str, Any] = json.loads(self.lines.readline())
        return message

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.send(kind, **fields)
        reply = self.said()
        assert reply["job"] == self.num_jobs
        self.num_jobs += 1
        return reply

    def close(self) -> tuple[int, bytes]:
        self.lines.close()
        self.socket.close()
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        os.close(self.arena_fd)
        return self.process.returncode, output
