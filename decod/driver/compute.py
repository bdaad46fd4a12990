"""The node's end of its compute process: starts it, gives it jobs, and notices its end.

Requests and replies are JSON, one a line, over a socket pair. Tensors stay in the arena. Jobs run
one after another, so replies come in the order of the requests. A process that hangs in a job is
killed, and is then treated as dead.
"""

import asyncio
import json
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from decod.clocks import Stopwatch
from decod.data.block import Block
from decod.driver.arena import ArenaAllocator
from decod.driver.state_copies import TensorRegion
from decod.protocol.core.durations import Patience
from decod.protocol.core.job_codec import fields_of, kind_of, parsed
from decod.protocol.core.jobs import BaseJob

_COMMAND = (sys.executable, "-m", "decod.worker")

_LINE_SIZE_MAX_BYTES = 8 << 20
"""Longest request that a process reads, and longest reply: it holds the manifest of a large stage's
state."""

_WHY_MAX_CHARACTERS = 500
"""Of what a process says of its end."""

_END_S = 5.0
"""How long a process may take to end by itself before it is killed."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a job, and the time that it took."""

    result: Any
    """An object of the job's `result` class."""
    duration_s: float
    copy_s: float = 0.0
    """The part of this duration spent on copying tensors between arena and device."""
    data_s: float = 0.0
    """The part spent on reading data."""
    backward_s: float = 0.0
    """In the head's pass: the part spent on its backward half."""


class JobError(Exception):
    """The compute process refused a job, or failed in it, and goes on.

    Attributes:
        error: `code`, `what`, `why` and `fix`, as the compute process gave them.
        blocks: Blocks of the data that it could not read.
    """

    def __init__(self, error: dict[str, str], blocks: Sequence[Block] = ()) -> None:
        self.error = error
        self.blocks = tuple(blocks)
        super().__init__("{code} {what}: {why}".format_map(error))


class ComputeDiedError(Exception):
    """The compute process has ended before it finished the job."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A job that has no reply yet."""

    id: int
    job: BaseJob
    num_bytes: int
    """Total size of the tensors that it reads and writes in the arena."""
    future: asyncio.Future[Reply]


class Compute(Protocol):
    """A taker of jobs: a compute process, or a layer in front of one."""

    @property
    def ended(self) -> asyncio.Future[str]:
        """Done once no more jobs are taken. The result is the reason."""

    def submit(
        self,
        job: BaseJob,
        *,
        inputs: tuple[TensorRegion, ...] = (),
        outputs: tuple[TensorRegion, ...] = (),
    ) -> asyncio.Future[Reply]:
        """Queue a job; the future raises `JobError` or `ComputeDiedError`."""


class ComputeProcess:
    """A running compute process. Use `start` to make one."""

    NAME: ClassVar[str] = "compute process"
    """What errors call it."""
    REQUEST_SIZE_MAX_BYTES: ClassVar[int] = _LINE_SIZE_MAX_BYTES
    """Longest request that the process reads. A longer one would end it. The limit matters because
    the manifest in a load job comes from a peer."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        end_s: float = _END_S,
        watch: Stopwatch | None = None,
    ) -> None:
        self._end_s = end_s
        self._watch = watch or Stopwatch()
        self._process = process
        self._reader = reader
        self._writer = writer
        self._waiting: deque[_Waiting] = deque()
        self._next_id = 0
        self._patience: Patience | None = None
        self._hung: Callable[[str, float], None] = lambda *_: None
        self._timer: asyncio.TimerHandle | None = None
        self._why = ""
        """Why the process ends, as it says itself, or why this node has killed it."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done once the process has ended, even if it was idle. The result is the reason."""
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls,
        arena: ArenaAllocator | None,
        *,
        log_path: Path | None = None,
        command: Sequence[str] = _COMMAND,
        end_s: float = _END_S,
        watch: Stopwatch | None = None,
    ) -> Self:
        """Spawn the process and return at once, while it still loads torch.

        The process is started by module name, so the node process never imports its code. Its
        standard error goes to `log_path`, or to this process's standard error.

        Args:
            arena: The memory that both processes map. None if jobs have no tensors.
            log_path: The file to append to; None for this process's standard error.
            command: The program to start. It gets `--socket-fd`, and `--arena-fd` if there is one.
            end_s: How long the process may take to end by itself before it is killed.
            watch: Measures the time spent on encoding requests and decoding replies.
        """
        here, there = socket.socketpair()
        arguments, passed = ["--socket-fd", str(there.fileno())], [there.fileno()]
        if arena is not None:
            arguments += ["--arena-fd", str(arena.fd)]
            passed.append(arena.fd)
        log: int | None = None
        try:
            if log_path is not None:
                # Without O_NONBLOCK, opening a pipe that nobody reads would block forever.
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
                log = os.open(log_path, flags, 0o600)
            process = await asyncio.create_subprocess_exec(
                *command,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
                pass_fds=passed,
                # Keeps the terminal's Ctrl-C from the process: only the node answers it.
                start_new_session=True,
            )
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
            if log is not None:
                os.close(log)
        reader, writer = await asyncio.open_connection(sock=here, limit=_LINE_SIZE_MAX_BYTES)
        return cls(process, reader, writer, end_s=end_s, watch=watch)

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(
        self,
        job: BaseJob,
        *,
        inputs: tuple[TensorRegion, ...] = (),
        outputs: tuple[TensorRegion, ...] = (),
    ) -> asyncio.Future[Reply]:
        """Queue a job; the future raises `JobError` or `ComputeDiedError`."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        # After the node has stopped, nobody awaits its last jobs. That is no error.
        future.add_done_callback(_mark_read)
        if self.ended.done():
            future.set_exception(ComputeDiedError(self.ended.result()))
            return future
        with self._watch.measure("serialize"):
            request = {
                "job": self._next_id,
                "kind": kind_of(type(job)),
                "fields": fields_of(job),
                "inputs": [region.reference() for region in inputs],
                "outputs": [region.reference() for region in outputs],
            }
            line = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        if len(line) > self.REQUEST_SIZE_MAX_BYTES:
            future.set_exception(_too_long(job, len(line), self.REQUEST_SIZE_MAX_BYTES))
            return future
        num_bytes = sum(region.size_bytes for region in (*inputs, *outputs))
        self._waiting.append(_Waiting(self._next_id, job, num_bytes, future))
        self._next_id += 1
        if self._writer.is_closing():
            return future  # The process is ending. `_listen` soon fails the job with the reason.
        if len(self._waiting) == 1:
            self._began_next()
        self._writer.write(line)
        return future

    # --- hanging ------------------------------------------------------------------------------

    def watch_over(self, patience: Patience, hung: Callable[[str, float], None]) -> None:
        """From now on kill the process if a job takes longer than `patience` grants.

        Args:
            patience: A new one, which has seen no job.
            hung: Called before the kill, with the job's kind and the seconds without an answer.
        """
        self._patience, self._hung = patience, hung
        self._began_next()
        self._look()

    def _began_next(self) -> None:
        if self._patience is not None and self._waiting:
            oldest, now_s = self._waiting[0], asyncio.get_running_loop().time()
            self._patience.begin(now_s, kind_of(type(oldest.job)), num_bytes=oldest.num_bytes)

    def _look(self) -> None:
        assert self._patience is not None
        loop = asyncio.get_running_loop()
        waited_s = self._patience.look(loop.time())
        if waited_s is None:
            self._timer = loop.call_later(self._patience.interval_s, self._look)
            return
        kind = self._patience.kind
        self._why = f"the {self.NAME} has not answered for {waited_s:.0f} s (job: {kind})"
        self._hung(kind, waited_s)
        self.kill()
        # A process that is stuck in a device driver can't be killed, and never closes its end.
        self._writer.transport.abort()

    # --- replies ------------------------------------------------------------------------------

    async def _listen(self) -> None:
        # A line that is too long, or is no reply, means that the process is broken. End it.
        with suppress(ConnectionError, ValueError, LookupError, TypeError):
            while line := await self._reader.readline():
                with self._watch.measure("serialize"):
                    reply = json.loads(line)
                self._take(reply)
        if self._timer is not None:
            self._timer.cancel()
        self._writer.close()
        await self._end()
        reason = self._why or f"the {self.NAME} ended ({_describe(self._process.returncode)})"
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_exception(ComputeDiedError(reason))
        self.ended.set_result(reason)

    def _take(self, reply: dict[str, Any]) -> None:
        if "ends" in reply:
            self._why = self._why or str(reply["ends"])[:_WHY_MAX_CHARACTERS]
            return
        outcome: Reply | JobError
        # The process answers with job -1 to a line that it could not read.
        if reply["job"] not in (self._waiting[0].id, -1):
            raise ValueError("a reply to another job than the oldest")
        if reply["ok"]:
            outcome = Reply(
                parsed(self._waiting[0].job.result, reply["result"]),
                float(reply["seconds"]),
                float(reply["copy_seconds"]),
                float(reply.get("data_seconds", 0.0)),
                float(reply.get("backward_seconds", 0.0)),
            )
        else:
            error = {key: str(reply["error"][key]) for key in _ERROR_FIELDS}
            outcome = JobError(error, [Block(*block) for block in reply.get("blocks", ())])
        future = self._waiting.popleft().future
        if self._patience is not None:
            done = isinstance(outcome, Reply)
            self._patience.end(asyncio.get_running_loop().time(), done=done)
            self._began_next()
        if future.cancelled():
            return
        if isinstance(outcome, Reply):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def kill(self) -> None:
        """Kill the process. `close` must still be called."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End the process: close its socket, and kill it if it has not ended after `end_s`."""
        self._writer.close()
        await self._listener

    async def _end(self) -> None:
        """Wait until the process has ended after its socket was closed; kill it if it hangs."""
        try:
            await asyncio.wait_for(self._process.wait(), timeout=self._end_s)
        except TimeoutError:
            self.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout=self._end_s)


_ERROR_FIELDS = ("code", "what", "why", "fix")


def _too_long(job: BaseJob, size_bytes: int, limit_bytes: int) -> JobError:
    return JobError(
        {
            "code": "E-RUN-006",
            "what": f"a {kind_of(type(job))} job of {size_bytes} bytes",
            "why": f"the compute process reads {limit_bytes} bytes at most",
            "fix": "cut the model into more stages, so that each has fewer tensors",
        }
    )


def _mark_read(future: asyncio.Future[Reply]) -> None:
    """Mark a job's error as read, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()


def _describe(returncode: int | None) -> str:
    if returncode is None:
        return "it can't be killed"
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
