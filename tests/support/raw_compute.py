"""Jobs of a compute process, without a node."""

import json
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from decod.protocol.core.job_codec import fields_of, kind_of, parsed
from decod.protocol.core.jobs import BaseJob, Configure
from decod.system import anonymous_file
from decod.worker.device import Arena
from decod.worker.job_methods import JobRunner

DEADLINE_S = 240
"""Generous: several processes load torch, on a machine that may be busy."""


Where = Mapping[str, Any]
"""A region of the arena, as it is in messages."""


def message_of(
    job_id: int,
    kind: str,
    fields: Mapping[str, Any] | None = None,
    inputs: Sequence[Where] = (),
    outputs: Sequence[Where] = (),
) -> dict[str, Any]:
    """Return a job as it comes from a node."""
    message = {"job": job_id, "kind": kind, "fields": fields or {}}
    message |= {"inputs": list(inputs), "outputs": list(outputs)}
    return dict(json.loads(json.dumps(message)))


class Jobs(ABC):
    """Runs jobs, and reads and writes the arena."""

    arena_fd: int

    def ask(
        self, job: BaseJob, inputs: Sequence[Where] = (), outputs: Sequence[Where] = ()
    ) -> dict[str, Any]:
        """Return the reply to a job."""
        return self.ask_raw(kind_of(type(job)), fields_of(job), inputs, outputs)

    @abstractmethod
    def ask_raw(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        inputs: Sequence[Where] = (),
        outputs: Sequence[Where] = (),
    ) -> dict[str, Any]:
        """Return the reply to what may be a wrong job."""

    def result(
        self, job: BaseJob, inputs: Sequence[Where] = (), outputs: Sequence[Where] = ()
    ) -> Any:
        """Return the result of a job."""
        reply = self.ask(job, inputs, outputs)
        assert reply["ok"], reply
        assert 0 <= reply["copy_seconds"] <= reply["seconds"]
        return parsed(job.result, reply["result"])

    def configure(self, settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Configure the process, and return its facts."""
        facts: dict[str, Any] = self.result(Configure({**settings, **more})).facts
        return facts

    def write(self, offset: int, array: np.ndarray) -> dict[str, int]:
        os.pwrite(self.arena_fd, array.tobytes(), offset)
        return {"offset": offset, "num_bytes": array.nbytes}

    def read(self, region: dict[str, int], dtype: type = np.float32) -> np.ndarray:
        data = os.pread(self.arena_fd, region["num_bytes"], region["offset"])
        return np.frombuffer(data, dtype=dtype)


class Here(Jobs):
    """A compute process's jobs, run in this process."""

    def __init__(self) -> None:
        self.arena_fd = anonymous_file("arena")
        os.ftruncate(self.arena_fd, 1 << 20)
        self.runner = JobRunner(Arena(self.arena_fd))

    @override
    def ask_raw(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        inputs: Sequence[Where] = (),
        outputs: Sequence[Where] = (),
    ) -> dict[str, Any]:
        reply = self.runner.run(message_of(0, kind, fields, inputs, outputs))
        return dict(json.loads(json.dumps(reply)))

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
        self.arena_fd = anonymous_file("arena")
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

    def send(
        self, job: BaseJob, inputs: Sequence[Where] = (), outputs: Sequence[Where] = ()
    ) -> None:
        self.send_raw(kind_of(type(job)), fields_of(job), inputs, outputs)

    def send_raw(self, kind: str, *rest: Any) -> None:
        message = message_of(self.num_jobs, kind, *rest)
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def said(self) -> dict[str, Any]:
        """Return the next thing that the process says."""
        message: dict[str, Any] = json.loads(self.lines.readline())
        return message

    @override
    def ask_raw(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        inputs: Sequence[Where] = (),
        outputs: Sequence[Where] = (),
    ) -> dict[str, Any]:
        self.send_raw(kind, fields, inputs, outputs)
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
