"""Jobs of a process that computes: read from a socket, run one after another, answered.

A job is a message, one JSON object a line. The sender is our own node process, but a slip there
must end in an error and not in a wrong tensor. Whoever derives from `Runner` has one method for
each class of jobs, marked `@runs`. It takes a `Request`, and returns an object of the job's
`result` class, or None for `Nothing`. All processes with a runner take part in averages: parts and
means are in the arena.
"""

import argparse
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from time import perf_counter
from typing import IO, Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from decod.clocks import Purpose, Stopwatch
from decod.data.block import BlockError
from decod.devices import first_accelerator, is_lost, ran_out, shortened
from decod.errors import OUT_OF_MEMORY, DecodError, HardwareError, TrainingError
from decod.process import LEAVE_SIGNALS
from decod.protocol.core.job_codec import (
    FormError,
    Region,
    Request,
    fields_of,
    kind_of,
    line_of,
    methods_of,
    runs,
)
from decod.protocol.core.jobs import BaseJob, DoNothing, Gather, Nothing, Reduce, Squared
from decod.system import keep_freed_memory
from decod.train.copies import Departure
from decod.train.exchange import Exchange, Place, reduce_leniently
from decod.train.standing_out import standing_out
from decod.worker.device import Arena


def malformed(what: str) -> TrainingError:
    """Return the error for a message that no node of this version sends."""
    return TrainingError(
        what,
        why="the node process sent a job that this compute process does not understand",
        fix="report it with both logs: this is an error in decod",
        code="E-INT-003",
    )


def error_reply(job_id: object, error: DecodError) -> dict[str, Any]:
    """Return the reply that reports a failed job."""
    fields = {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix}
    blocks = error.blocks if isinstance(error, BlockError) else ()
    return {
        "job": job_id if type(job_id) is int else -1,
        "ok": False,
        "error": fields,
        "blocks": [[block.shard_index, block.offset, block.num_bytes] for block in blocks],
    }


_TIMED: tuple[Purpose, ...] = ("copy", "data", "backward")
"""Parts of a job's time that its reply names."""


def free_unused() -> None:
    """Give memory that nothing refers to back to the device."""
    # An error's traceback refers to frames, and these to it.
    gc.collect()
    device = first_accelerator()
    if device is not None:
        device.give_back_unused()


ReadyT = TypeVar("ReadyT")


class Runner(Generic[ReadyT]):
    """A runner of jobs.

    Args:
        arena: Memory of the inputs and outputs.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._configured: ReadyT | None = None
        """What the jobs run on. None: no `Configure` came."""
        self._watch = Stopwatch()
        self._kind = ""
        """The kind of the job in hand, or of the last one."""
        self._departures: list[Departure] = []
        """Results of the job in hand that are on their way from the device into the arena."""
        self.ends: Callable[[str], None] = lambda _: None
        """Ends the process from any thread, and tells the node process why."""
        self._kinds: dict[str, tuple[type[BaseJob], Callable[..., object]]] = {
            kind_of(each): (each, run) for each, run in methods_of(self).items()
        }

    @property
    def _ready(self) -> ReadyT:
        """What the jobs run on."""
        if self._configured is None:
            raise malformed("no configure came before")
        return self._configured

    @runs(DoNothing)
    def _do_nothing(self, _: Request[DoNothing]) -> None: ...

    def run(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to one request. Raises only errors that are bugs, not DecodErrors."""
        job_id = message.get("job")
        kind = message.get("kind")
        try:
            if type(job_id) is not int or not isinstance(kind, str) or kind not in self._kinds:
                raise malformed(f"job {str(job_id)[:20]} is of kind {str(kind)[:100]}")
            job_class, method = self._kinds[kind]
            request = Request.parse(message, job_class)
            self._kind = kind
            start_s = perf_counter()
            before = dict(self._watch.seconds)
            self._begin()
            result = method(request) or Nothing()
            assert isinstance(result, job_class.result), f"{kind} ended with {result}"
            self._all_told()
            self._await_results()
            copy_s = self._watch.seconds["copy"] - before["copy"]
            seconds = self._busy_s(perf_counter() - start_s, copy_s)
        except FormError as error:
            return error_reply(job_id, malformed(str(error)))
        except DecodError as error:
            return error_reply(job_id, error)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error) or self._ends_with_others:
                raise
            failed = error_reply(job_id, _out_of_memory(str(kind), error))
        else:
            spent = self._watch.seconds
            parts = {f"{purpose}_seconds": spent[purpose] - before[purpose] for purpose in _TIMED}
            times = {"seconds": seconds, **parts}
            return {"job": job_id, "ok": True, **times, "result": fields_of(result)}
        # Only now is the error gone, whose traceback refers to all that the job has made.
        free_unused()
        return failed

    @property
    def _ends_with_others(self) -> bool:
        """Whether other processes may wait in vain for one that fails in a job."""
        return False

    def close(self) -> None:
        """Give up what the jobs have started. No more will come."""

    def _begin(self) -> None:
        """A job begins."""

    def _all_told(self) -> None:
        """The job has told the device all its work. Wait for what no departure waits for."""

    def _busy_s(self, wall_s: float, copy_s: float) -> float:  # noqa: ARG002 - a device's clock needs it.
        """Return how long the job took, of `wall_s` by the host's clock."""
        return wall_s

    def _await_results(self) -> None:
        """Wait until the job's results are in the arena."""
        for departure in self._departures:
            # Otherwise the copy would include the wait for the device.
            departure.wait_for_value()
            with self._watch.measure("copy"):
                departure.wait()
        self._departures.clear()

    # Averages

    @property
    def _num_phases(self) -> int:
        """Phases of each average."""
        raise NotImplementedError

    def _write(self, output: Tensor, value: Tensor) -> None:
        """Copy a result into the arena. From a device it is there when the job is answered."""
        if not value.is_cpu:
            self._departures.append(Departure(output, value))
            return
        with self._watch.measure("copy"):
            output.copy_(value)

    def _tensors(
        self, regions: Sequence[Region], dtype: torch.dtype, sizes: Sequence[int]
    ) -> list[Tensor]:
        """Return the flat tensors in some regions."""
        pairs = zip(regions, sizes, strict=bool(regions))
        return [self._arena.tensor(region, dtype, (size,)) for region, size in pairs]

    def _write_parts(
        self, request: Request[Gather], exchange: Exchange, parts: Sequence[Tensor]
    ) -> None:
        """Copy this member's parts of a phase into the outputs of a job."""
        sizes = exchange.part_sizes(request.job.phase, request.job.num_parts or 1)
        for output, part in zip(self._tensors(request.outputs, *sizes), parts, strict=True):
            self._write(output, part)

    def _later_parts(self, request: Request[Gather], exchange: Exchange) -> list[Tensor]:
        """Return this member's parts of a phase after the first: the inputs are the means."""
        num_parts = request.job.num_parts
        phase = request.job.phase
        before = exchange.mean_sizes(phase - 1, num_parts)
        return exchange.parts(phase, num_parts, self._tensors(request.inputs, *before))

    def _reduced(
        self,
        request: Request[Reduce],
        exchange: Exchange,
        square_sum: Callable[[Tensor], float],
        *,
        audited: bool,
    ) -> Squared:
        """Write the mean of one part. Return its square sum, and what is wrong with contributions
        to it."""
        request.expect(None, 1)
        job = request.job
        regions = request.inputs
        num_parts = job.num_parts
        part = job.part
        phase = job.phase
        weights = job.weights
        if part >= num_parts:
            raise malformed(f"part is {part} of {num_parts}")
        if len(weights) != len(regions):
            raise malformed(f"{len(weights)} weights of {len(regions)} inputs")
        dtype, sizes = exchange.mean_sizes(phase, num_parts)
        (output,) = self._tensors(request.outputs, dtype, [sizes[part]])
        dtype, sizes = exchange.part_sizes(phase, num_parts)
        place = Place(part, num_parts, phase)
        refused = dict[int, str]()
        odd = list[int]()
        if job.lenient:
            size = sizes[part]
            right = [region.num_bytes == size * dtype.itemsize for region in regions]
            chosen = [
                self._arena.tensor(region, dtype, (size,)) if fits else None
                for region, fits in zip(regions, right, strict=True)
            ]
            mean, refused = reduce_leniently(exchange, chosen, place, weights)
        else:
            inputs = self._tensors(regions, dtype, [sizes[part]] * len(regions))
            mean = exchange.reduce(inputs, place, weights)
            odd = standing_out(inputs, weights) if audited else []
        self._write(output, mean)
        reason = next(iter(refused.values()), "")
        return Squared(square_sum(mean), tuple(refused), reason, tuple(odd))

    def _means(
        self, regions: Sequence[Region], exchange: Exchange, num_phases: int | None = None
    ) -> list[Tensor]:
        """Return the means of all phases of an average."""
        num_phases = num_phases or self._num_phases
        num_parts = len(regions) // num_phases
        found = list[Tensor]()
        for phase in range(num_phases if num_parts else 0):
            of_phase = regions[phase * num_parts : (phase + 1) * num_parts]
            found += self._tensors(of_phase, *exchange.mean_sizes(phase, num_parts))
        return found


def _out_of_memory(kind: str, error: Exception) -> HardwareError:
    reason = next((line for line in str(error).splitlines() if line), type(error).__name__)
    return HardwareError(
        f"out of memory in a {kind} job",
        why=reason,
        fix="lower this node's --capacity, use --recompute on, or lower batch.microbatch_size",
        code=OUT_OF_MEMORY,
    )


_LINE_SIZE_MAX_BYTES = 8 << 20
"""The limit that the node process has too, in `decod.driver.compute`."""

logger = logging.getLogger("decod.worker")


def serve(connection: socket.socket, runner: Runner[Any]) -> int:
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
                reply = runner.run(message)
                fatal = False
            except DecodError as error:
                # After a broken line, the next bytes need not begin a message.
                reply = error_reply(-1, error)
                fatal = True
            except Exception as error:
                logger.exception("compute.failed")
                reply = _unexpected(message, error)
                fatal = True
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
        self._connection = connection
        self._lock = Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message. Raises `OSError` if nobody listens any more."""
        with self._lock:
            self._connection.sendall(line_of(message))

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
    if is_lost(error):
        lost = HardwareError(
            f"the device works no more: {shortened(str(error))}",
            why="driver or device have failed, and what was on it is lost",
            fix="look at the driver's words in `dmesg`; the node starts another compute process",
            code="E-HW-024",
        )
        return error_reply(job_id, lost)
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
    name: str, make_runner: Callable[[Arena], Runner[Any]], arguments: Sequence[str] | None = None
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
