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
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from decod.clocks import Stopwatch
from decod.data.block import Block
from decod.driver.arena import ArenaAllocator, TensorRegion
from decod.protocol.core import jobs
from decod.protocol.core.durations import Patience
from decod.protocol.core.job_codec import Request, kind_of, line_of, parsed
from decod.protocol.core.jobs import AverageKind, BaseJob
from decod.run.protocol_config import ProtocolConfig

_COMMAND = (sys.executable, "-P", "-m", "decod.worker")

_LINE_SIZE_MAX_BYTES = 8 << 20
"""Longest request that a process reads, and longest reply: it holds the manifest of a large stage's
state."""

_WHY_MAX_CHARACTERS = 500
"""Length of what a process says of its end."""

_END_S = 5.0
"""The time that a process may take to end by itself before it is killed."""


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
    """The part of the head's pass that is spent on its backward half."""


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


class JobTaker(Protocol):
    """A process that runs jobs."""

    def submit(
        self,
        job: BaseJob,
        *,
        inputs: tuple[TensorRegion, ...] = (),
        outputs: tuple[TensorRegion, ...] = (),
    ) -> asyncio.Future[Reply]:
        """Queue a job; the future raises `JobError` or `ComputeDiedError`."""


class Compute(JobTaker, Protocol):
    """A taker of jobs: a compute process, or a layer in front of one."""

    @property
    def ended(self) -> asyncio.Future[str]:
        """Done once no more jobs are taken. The result is the reason."""


class ComputeProcess:
    """A running compute process. Use `start` to make one."""

    NAME: ClassVar[str] = "compute process"
    """The name that errors give it."""
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
        """The reason why the process ends, as it says itself, or why this node has killed it."""
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
        arguments = ["--socket-fd", str(there.fileno())]
        passed = [there.fileno()]
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
            line = line_of(Request(job, inputs, outputs).message(self._next_id))
        if len(line) > self.REQUEST_SIZE_MAX_BYTES:
            future.set_exception(_too_long(job, len(line), self.REQUEST_SIZE_MAX_BYTES))
            return future
        num_bytes = sum(region.num_bytes for region in (*inputs, *outputs))
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
        self._patience = patience
        self._hung = hung
        self._began_next()
        self._look()

    def _began_next(self) -> None:
        if self._patience is not None and self._waiting:
            oldest = self._waiting[0]
            now_s = asyncio.get_running_loop().time()
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


# A layer in front of a compute process that adds up its time, by what it is spent on.

_ENTERING = (jobs.Embed, jobs.Forward)
"""The first pass of each microbatch here."""
_AVERAGING = (jobs.Gather, jobs.Reduce, jobs.Square)
_STEPPING = (jobs.Propose, jobs.StepLocally, jobs.CommitStep)


@dataclass(slots=True)
class DeviceTimes:
    """Seconds of a device, and instants on the loop's clock."""

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    averaging_s: float = 0.0
    """Arithmetic of averages."""
    step_s: float = 0.0
    """The optimizer's."""
    other_s: float = 0.0
    num_microbatches: int = 0
    """The microbatches that have entered this node's stage here."""
    passes_begin_s: float | None = None
    averaging_begin_s: float | None = None
    """The beginning of the average at the end of an iteration. None for one that travels beside
    passes."""

    @property
    def computing_s(self) -> float:
        """All but the time of reading data."""
        passes_s = self.forward_s + self.backward_s
        return passes_s + self.averaging_s + self.step_s + self.other_s

    def add(self, job: BaseJob, reply: Reply, end_s: float) -> None:
        """Count a job that has ended well."""
        busy_s = reply.duration_s - reply.data_s - reply.backward_s
        self.data_s += reply.data_s
        self.backward_s += reply.backward_s
        begin_s = end_s - reply.duration_s
        if isinstance(job, (*_ENTERING, jobs.Head)):
            self.forward_s += busy_s
            self.num_microbatches += isinstance(job, _ENTERING)
            if self.passes_begin_s is None:
                self.passes_begin_s = begin_s
        elif isinstance(job, jobs.Backward | jobs.EmbedBackward):
            self.backward_s += busy_s
        elif isinstance(job, (*_AVERAGING, *_STEPPING)):
            if isinstance(job, _AVERAGING):
                self.averaging_s += busy_s
            else:
                self.step_s += busy_s
            if self.averaging_begin_s is None and not _is_beside(job):
                self.averaging_begin_s = begin_s
        else:
            self.other_s += busy_s


def _is_beside(job: BaseJob) -> bool:
    """Return whether no iteration waits for a job of an average or a step to begin."""
    if isinstance(job, jobs.Gather | jobs.Reduce):
        return job.kind is AverageKind.AHEAD
    return isinstance(job, jobs.CommitStep)


class TimedCompute:
    """Passes jobs on, and times them.

    Args:
        compute: Runs the jobs.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._times = DeviceTimes()

    @property
    def ended(self) -> asyncio.Future[str]:
        return self._compute.ended

    def submit(
        self,
        job: BaseJob,
        *,
        inputs: tuple[TensorRegion, ...] = (),
        outputs: tuple[TensorRegion, ...] = (),
    ) -> asyncio.Future[Reply]:
        """Queue a job, as `Compute.submit` does."""
        future = self._compute.submit(job, inputs=inputs, outputs=outputs)
        future.add_done_callback(partial(self._ended, job))
        return future

    def _ended(self, job: BaseJob, done: asyncio.Future[Reply]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._times.add(job, done.result(), asyncio.get_running_loop().time())

    def take(self) -> DeviceTimes:
        """Return the times since the last call, and begin anew."""
        times = self._times
        self._times = DeviceTimes()
        return times


# The node's end of its planning process, which chooses flows beside the event loop and the device.
#
# Only a leader needs one, and only now and then. So it is started with the first job, and again
# when it has ended. Its end is never fatal: the node loses no more than the answers that it waits
# for.

_PLANNING_COMMAND = (sys.executable, "-P", "-m", "decod.worker.planning_process")


class _PlanningWorker(ComputeProcess):
    NAME = "planning process"
    REQUEST_SIZE_MAX_BYTES = 64 << 20
    """It holds the costs of all links that claims have passed: about 1 kB a relay."""


class PlanningProcess:
    """A planning process, which runs from the first job on.

    Args:
        config: Says how long a job may take before the process counts as hung.
        log_path: The file to which its standard error goes; None for this process's.
        command: The program to start. It gets `--socket-fd`.
    """

    def __init__(
        self,
        config: ProtocolConfig,
        log_path: Path | None = None,
        *,
        command: Sequence[str] = _PLANNING_COMMAND,
    ) -> None:
        self._config = config
        self._log_path = log_path
        self._command = command
        self._process: _PlanningWorker | None = None
        self._starting = asyncio.Lock()
        self._jobs: set[asyncio.Task[Reply]] = set()

    @property
    def pid(self) -> int | None:
        """The process's id; None if there is no process."""
        return self._process.pid if self._process is not None else None

    def submit(
        self,
        job: BaseJob,
        *,
        inputs: tuple[TensorRegion, ...] = (),
        outputs: tuple[TensorRegion, ...] = (),
    ) -> asyncio.Future[Reply]:
        """Queue a job without tensors; the future raises `ComputeDiedError`."""
        assert inputs == outputs == (), "this process has no arena"
        running = asyncio.get_running_loop().create_task(self._run(job))
        self._jobs.add(running)
        running.add_done_callback(self._jobs.discard)
        return running

    async def _run(self, job: BaseJob) -> Reply:
        try:
            async with self._starting:
                process = await self._alive()
        except OSError as error:
            raise ComputeDiedError(f"can't start the planning process: {error}") from error
        return await process.submit(job)

    async def _alive(self) -> _PlanningWorker:
        if self._process is not None and self._process.ended.done():
            await self._process.close()
            self._process = None
        if self._process is None:
            self._process = await _PlanningWorker.start(
                None, log_path=self._log_path, command=self._command
            )
            self._process.watch_over(Patience(self._config), lambda *_: None)
        return self._process

    async def close(self) -> None:
        """End the process, and cancel all jobs."""
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        if self._process is not None:
            self._process.kill()  # It holds nothing, and may be in the middle of a job.
            await self._process.close()
