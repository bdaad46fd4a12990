"""Processes of `decod`, forked from a process that has loaded all their imports."""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.support.preloaded import NUM_REQUEST_FDS, PADDING, REQUEST_SIZE_MAX_BYTES

_NUM_ORIGINS = 2
"""Forked processes share the hash seed of their origin. With two origins, hosts of a run differ in
the order of sets, as they do when each is started by itself."""


class ForkedProcess:
    """A forked process with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, pid_fd: int, end_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pid_fd = pid_fd
        self._end_fd = end_fd

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return the exit code."""
        if self.returncode is None:
            if not select.select([self._end_fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            self.returncode = int(os.read(self._end_fd, 16))
            os.close(self._end_fd)
            os.close(self._pid_fd)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pid_fd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Origin:
    """A process from which others are forked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._connection, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "tests.support.preloaded",
                    str(there.fileno()),
                    PADDING,
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env=dict(environment),
                start_new_session=True,
            )

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *outputs: IO[bytes],
        namespace: Path | None = None,
    ) -> ForkedProcess:
        """Return a process that runs `PYTHON [-u] -m MODULE ARGUMENTS`.

        Args:
            command: The whole command.
            environment: The process's environment. Values that libraries have read from the
                origin's environment stay.
            outputs: Standard output and error of the process.
            namespace: File of the process's network namespace. None: the origin's.
        """
        line = json.dumps(
            {
                "command": [*command],
                "environment": {**environment},
                "folder": str(Path.cwd()),
                "namespace": None if namespace is None else str(namespace),
            }
        )
        assert len(line) < REQUEST_SIZE_MAX_BYTES, line
        end_fd, there_fd = os.pipe()
        fds = [*(output.fileno() for output in outputs), there_fd]
        assert len(fds) == NUM_REQUEST_FDS
        try:
            socket.send_fds(self._connection, [line.encode()], fds)
        finally:
            os.close(there_fd)
        pid, pid_fds, _, _ = socket.recv_fds(self._connection, 16, 1)
        return ForkedProcess(int(pid), pid_fds[0], end_fd)

    def end(self) -> None:
        """End the origin. Processes that were forked from it go on."""
        self._connection.close()
        self._process.wait()


def can_fork(command: Sequence[str]) -> bool:
    """Return whether a command runs a Python module, on a system that can fork it."""
    return command[0] == sys.executable and "-m" in command[1:3] and hasattr(os, "pidfd_open")


def fork(
    command: Sequence[str],
    environment: Mapping[str, str],
    *outputs: IO[bytes],
    namespace: Path | None = None,
) -> ForkedProcess:
    """Fork a process from one of this process's origins; see `Origin.fork`.

    The origins are made with the first given environment, and end with this process.
    """
    while len(_origins) < _NUM_ORIGINS:
        _origins.append(Origin(environment))
        atexit.register(_origins[-1].end)
    _origins.rotate()
    return _origins[0].fork(command, environment, *outputs, namespace=namespace)


_origins: deque[Origin] = deque()
