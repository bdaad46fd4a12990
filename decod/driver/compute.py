"""The node's end of its compute process: starts it, gives it jobs, hears of its end.

Requests and replies are JSON, one a line, over a socket pair; tensors stay in the arena. Jobs run
one after another, so replies come in the order of the requests.
"""

import asyncio
import json
import os
import socket
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decod.driver.arena import Arena, Region

_LINE_SIZE_MAX_BYTES = 8 << 20
"""Longest reply: the manifest of a large stage's state."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a job came to."""

    result: dict[str, Any]
    duration_s: float


class JobError(Exception):
    """The compute process refused a job; it goes on.

    Attributes:
        error: `code`, `what`, `why` and `fix`, as the compute process said them.
    """

    def __init__(self, error: dict[str, str]) -> None:
        self.error = error
        super().__init__("{code} {what}: {why}".format_map(error))


class ComputeDiedError(Exception):
    """The compute process has ended; the job was not finished."""


class ComputeProcess:
    """A running compute process. Use `start` to make one."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._waiting: deque[asyncio.Future[Reply]] = deque()
        self._next_id = 0
        self._ended = False
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, arena: Arena, *, log_path: Path | None = None) -> "ComputeProcess":
        """Spawn the process; torch loads while the caller goes on.

        It is started by module name, so the node process never imports what it runs. Its errors go
        to `log_path`, or to this process's standard error.
        """
        here, there = socket.socketpair()
        arguments = ["--socket-fd", str(there.fileno()), "--arena-fd", str(arena.fd)]
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if log_path else None
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "decod.worker",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
                pass_fds=(there.fileno(), arena.fd),
                # A Ctrl-C on the terminal is the node's to answer.
                start_new_session=True,
            )
        finally:
            there.close()
            if log is not None:
                os.close(log)
        reader, writer = await asyncio.open_connection(sock=here, limit=_LINE_SIZE_MAX_BYTES)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(
        self,
        kind: str,
        fields: dict[str, Any] | None = None,
        *,
        inputs: tuple[Region, ...] = (),
        outputs: tuple[Region, ...] = (),
    ) -> asyncio.Future[Reply]:
        """Queue a job; the future raises `JobError` or `ComputeDiedError`."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        # Once the node has given up, nobody reads what became of its last jobs: that is no error.
        future.add_done_callback(_mark_read)
        if self._ended:
            future.set_exception(ComputeDiedError("the compute process has ended"))
            return future
        request = {
            "job": self._next_id,
            "kind": kind,
            **(fields or {}),
            "inputs": [region.reference() for region in inputs],
            "outputs": [region.reference() for region in outputs],
        }
        self._next_id += 1
        self._waiting.append(future)
        self._writer.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")
        return future

    async def _listen(self) -> None:
        # A line that is too long, or no JSON, is a broken process: treated as one that has ended.
        with suppress(ConnectionError, ValueError, KeyError, asyncio.IncompleteReadError):
            while line := await self._reader.readline():
                self._take(json.loads(line))
        self._ended = True
        self._writer.close()
        if self._process.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout=5.0)
        reason = f"the compute process ended ({_describe(self._process.returncode)})"
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ComputeDiedError(reason))

    def _take(self, reply: dict[str, Any]) -> None:
        future = self._waiting.popleft()
        if future.cancelled():
            return
        if reply["ok"]:
            future.set_result(Reply(reply["result"], reply["seconds"]))
        else:
            future.set_exception(JobError(reply["error"]))

    async def close(self) -> None:
        """End the process: it leaves when its socket closes, or is killed after 5 seconds."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), timeout=5.0)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._listener


def _mark_read(future: asyncio.Future[Reply]) -> None:
    """Keep asyncio from writing about an error that nobody awaited."""
    if not future.cancelled():
        future.exception()


def _describe(returncode: int | None) -> str:
    if returncode is None:
        return "it hangs"
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
