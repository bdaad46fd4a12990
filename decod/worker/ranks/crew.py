"""Rank 0's end of the other ranks: starts them, gives them jobs, and notices their end.

Ranks are processes of one host that work on the same microbatches, each on a device of its own.
Rank 0 is the compute process that the node has started. It starts the others, and passes on to them
each job in which they take part, in the same form: one JSON object a line over a socket pair. They
map the same arena, where each finds its rows of an activation. Only sums of gradients and weights
travel between devices (`decod.worker.ranks.group`).

No rank outlives another. A thread waits for the end of each process here, so that it is noticed at
once, also within a collective. The others hold the end of a pipe whose other end is rank 0's.
"""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import IO, TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from decod.data.block import Block, BlockError
from decod.devices import ran_out
from decod.errors import DataError, DecodError, HardwareError
from decod.memory_files import new_memory_file, remove_orphans
from decod.protocol.core.job_codec import Request, line_of, parsed
from decod.protocol.core.jobs import BaseJob, Build, Configure, Reset
from decod.texts import why_of
from decod.worker.ranks.group import (
    AddUp,
    Collective,
    JoinRanks,
    MeasureFree,
    SettleSum,
    SpreadWeights,
    add_up,
    join_group,
    leave_group,
    spread,
)

if TYPE_CHECKING:
    from decod.train.weight_shards import Shards

R = TypeVar("R")

logger = logging.getLogger("decod.worker")

_COMMAND = (sys.executable, "-P", "-m", "decod.worker.ranks")

_END_S = 2.0
"""The time that a rank may take to end by itself before it is killed."""

_NOTICE_S = 10.0
"""The most time until a process's end is noticed after its socket has closed."""


class RankLostError(Exception):
    """Another rank has ended. This one can't go on, and ends too."""


class _Rank:
    """One of the other ranks.

    Args:
        rank: Its number, from 1.
        device: Its device, as the operator named it.
        arena_fd: Descriptor of the memory that it shares with the node.
        lifeline_fd: The end of a pipe that closes when rank 0 ends.
    """

    def __init__(self, rank: int, device: str, arena_fd: int, lifeline_fd: int) -> None:
        self.name = f"rank {rank} on {device}"
        here, there = socket.socketpair()
        with there:
            passed = {"socket": there.fileno(), "arena": arena_fd, "lifeline": lifeline_fd}
            options = [word for name, fd in passed.items() for word in (f"--{name}-fd", str(fd))]
            self.process = subprocess.Popen(  # noqa: S603 - a fixed program and numbers.
                [*_COMMAND, *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=list(passed.values()),
            )
        self.socket = here
        self.lines = here.makefile("rb")

    def close(self) -> None:
        """End the process, and kill it if it takes too long."""
        self.lines.close()
        self.socket.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Crew:
    """The other ranks of this host. Every method but `close` may raise `RankLostError`.

    Args:
        devices: Of all ranks, as the operator named them. The first is this process's.
        arena_fd: Descriptor of the memory that all share with the node.
        ends: Called from a thread with the reason when a rank has ended that should not. It is to
            end this process.
    """

    def __init__(self, devices: list[str], arena_fd: int, ends: Callable[[str], None]) -> None:
        self.devices = devices
        self._ends = ends
        self._joined = self._closing = False
        self._lost = Event()
        self._num_jobs = 0
        self.disagrees = False
        """Whether some ranks have done the last job, and others have failed in it."""
        # If this process is killed, the next one on this host removes its file.
        remove_orphans()
        descriptor, self._file = new_memory_file()
        os.close(descriptor)
        read_fd, self._lifeline_fd = os.pipe()
        self._ranks = list[_Rank]()
        try:
            for rank, device in enumerate(devices[1:], 1):
                self._ranks.append(_Rank(rank, device, arena_fd, read_fd))
        except OSError as error:
            self.close()
            raise HardwareError(
                f"can't start a process for each of {len(devices)} devices",
                why=why_of(error),
                fix="free memory, or name fewer devices",
                code="E-HW-005",
            ) from error
        finally:
            os.close(read_fd)
        for each in self._ranks:
            Thread(target=self._watch, args=(each,), daemon=True).start()

    def close(self) -> None:
        """End the other ranks."""
        self._closing = True
        os.close(self._lifeline_fd)
        for each in self._ranks:
            each.close()
        leave_group()
        self._file.unlink(missing_ok=True)

    def _watch(self, rank: _Rank) -> None:
        code = rank.process.wait()
        if self._closing:
            return
        # The process ends without `close`.
        self._file.unlink(missing_ok=True)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._ends(f"{rank.name} ended ({how}), and its sum of gradients is lost")
        self._lost.set()

    # --- jobs ---------------------------------------------------------------------------------

    def configure(self, settings: Sequence[dict[str, Any]], device: str) -> list[dict[str, Any]]:
        """Configure the other ranks, and return their facts. The first time, join them.

        Args:
            settings: Of each.
            device: Rank 0's, as torch calls it.
        """
        for rank, own in zip(self._ranks, settings, strict=True):
            self._send(rank, Request(Configure(own)))
        facts = [each.facts for each in self._heard(Configure)]
        num_ranks = len(self.devices)
        if self._joined:
            return facts
        for number, rank in enumerate(self._ranks, 1):
            self._send(rank, Request(JoinRanks(str(self._file), number, num_ranks)))
        with self._together(JoinRanks):
            join_group(self._file, 0, num_ranks, device)
        self._joined = True
        # Only now do the collectives have their memory on each device.
        free = self.call(MeasureFree())
        return [
            {**each, "memory_bytes": now.memory_bytes}
            for each, now in zip(facts, free, strict=True)
        ]

    def share(
        self, request: Request[BaseJob], own: Callable[[], R], *, apart: bool = True
    ) -> list[R]:
        """Run a job on all ranks at the same time. Return the results in the order of ranks.

        Args:
            request: The job.
            own: Runs it on rank 0.
            apart: The ranks don't wait for each other within it. Otherwise a rank that fails there
                ends, and all with it.

        Raises:
            DecodError: A rank has failed in it. See `disagrees`.
        """
        self._tell(request)
        done = 0
        answered = True
        try:
            result = own()
            done = 1
        except (RuntimeError, MemoryError) as error:
            answered = apart
            if not apart and not ran_out(error):
                raise self._gone() from error
            raise
        finally:
            replies = self._replies() if answered else []
            num_done = done + sum(reply["ok"] is True for reply in replies)
            self.disagrees = 0 < num_done < len(self.devices)
        return [result, *self._results(type(request.job), replies)]

    def call(self, job: BaseJob) -> list[Any]:
        """Run a job on the other ranks.

        Raises:
            DecodError: One has failed in it.
        """
        self._tell(Request(job))
        return self._heard(type(job))

    def _tell(self, request: Request[BaseJob]) -> None:
        for rank in self._ranks:
            self._send(rank, request)

    def _send(self, rank: _Rank, request: Request[BaseJob]) -> None:
        line = line_of(request.message(self._num_jobs))
        self._num_jobs += 1
        try:
            rank.socket.sendall(line)
        except OSError as error:
            raise self._gone() from error

    def _heard(self, job_class: type[BaseJob]) -> list[Any]:
        return self._results(job_class, self._replies())

    def _replies(self) -> list[dict[str, Any]]:
        return [self._reply(rank.lines) for rank in self._ranks]

    def _reply(self, lines: IO[bytes]) -> dict[str, Any]:
        try:
            line = lines.readline()
        except OSError as error:
            raise self._gone() from error
        if not line.endswith(b"\n"):
            raise self._gone()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _results(self, job_class: type[BaseJob], replies: Sequence[Mapping[str, Any]]) -> list[Any]:
        for rank, reply in zip(self._ranks, replies, strict=True):
            if not reply["ok"]:
                raise _error_of(reply, rank.name)
        return [parsed(job_class.result, reply["result"]) for reply in replies]

    def _gone(self) -> RankLostError:
        """Wait until this process ends, as it does when the end of another is noticed."""
        self._lost.wait(_NOTICE_S)
        return RankLostError("another rank has ended, or does not answer")

    # --- what rank 0's executor needs of the others -----------------------------------------------

    def build(self, stage_index: int, *, trial: bool = False, blocks: Sequence[int] = ()) -> None:
        """Have the others build a stage, whose weights are undefined."""
        self.call(Build(stage_index, trial, tuple(blocks)))

    def add_sums(self, sum_P: Tensor, shards: "Shards | None" = None) -> str:
        """Add the others' sums of gradients to that of rank 0; see `decod.train.ranks`."""
        for reason in (each.spoiled for each in self.call(SettleSum())):
            if reason:
                return str(reason)
        self._tell(Request(AddUp()))
        with self._together(AddUp):
            add_up(sum_P) if shards is None else shards.add_up(sum_P)
        return ""

    def take_weights(self, weights_P: Tensor, shards: "Shards | None" = None) -> None:
        """Give the others the weights of rank 0."""
        self._tell(Request(SpreadWeights()))
        with self._together(SpreadWeights):
            spread(weights_P) if shards is None else shards.spread(weights_P)

    def reset(self) -> None:
        """Have the others forget held microbatches and gradients."""
        self.call(Reset())

    @contextmanager
    def _together(self, job_class: type[Collective]) -> Iterator[None]:
        """Run rank 0's part of a collective of which the others have been told.

        Raises:
            RankLostError: It failed. Whether the others wait in it is unknown, so all must end.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if self._lost.wait(_NOTICE_S):
                raise RankLostError("another rank has ended") from error
            # The devices or their driver refuse: no process has ended.
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise RankLostError(f"the devices can't exchange data: {reason}") from error
        self._heard(job_class)


def _error_of(reply: Mapping[str, Any], where: str) -> DecodError:
    """Return the error of another rank as this one would raise it."""
    told = reply["error"]
    what, why, fix, code = (str(told[name]) for name in ("what", "why", "fix", "code"))
    if reply.get("blocks"):
        blocks = [Block(*block) for block in reply["blocks"]]
        bad = DataError(what, why=why, fix=fix, code=code)
        return BlockError(dict.fromkeys(blocks, bad))
    return DecodError(f"{what} ({where})", why=why, fix=fix, code=code)
