"""Runs the points of a grid, one after another. Hosts are processes that all points share."""

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import decod.daemon  # noqa: F401 - workers inherit its OMP_WAIT_POLICY: threads wait idly.
from decod.errors import NotRunningError
from decod.lab.study.grid import Point
from decod.lab.study.results import PointResult

_COMMAND = (sys.executable, "-P", "-m", "decod.lab.study.study_worker")
_ANSWER_S = 600.0
"""Longest time for one point. It is reached only if something hangs."""
_END_S = 15.0
_TAIL_CHARACTERS = 600


class StudyWorker:
    """A process that is a host in one point after another.

    Args:
        folder: For its log and the state of its nodes.
        number: Of this worker.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self.number = folder, number
        self._log = folder / f"worker-{number}.log"
        self._connection, there = socket.socketpair()
        self._connection.settimeout(_ANSWER_S)
        with self._log.open("wb") as log, there:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, by this interpreter.
                (*_COMMAND, "--socket-fd", str(there.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[there.fileno()],
            )
        self._stream = self._connection.makefile("rb")

    def say(self, **fields: Any) -> None:
        """Send a line.

        Raises:
            NotRunningError: The process has ended.
        """
        try:
            self._connection.sendall(json.dumps(fields).encode() + b"\n")
        except OSError as error:
            raise self._failed(str(error)) from error

    def next(self) -> dict[str, Any]:
        """Return the next line.

        Raises:
            NotRunningError: The process has ended, or hangs.
        """
        try:
            line = self._stream.readline()
        except OSError as error:
            raise self._failed("it does not answer") from error
        if not line:
            raise self._failed("it has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def _failed(self, what: str) -> NotRunningError:
        tail = self._log.read_text(errors="replace")[-_TAIL_CHARACTERS:].strip()
        return NotRunningError(
            f"host {self.number} of the study has failed: {what}",
            why=f"its last words were {tail!r}" if tail else "it has said nothing",
            fix="run the study again with more free memory, or report it",
            code="E-RUN-046",
        )

    def close(self) -> None:
        """End the process."""
        self._stream.close()
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def workers(num_workers: int) -> Iterator[list[StudyWorker]]:
    """Start worker processes; end them, and remove their folder, at the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="decod-study-")))
        found = []
        for number in range(num_workers):
            worker = StudyWorker(folder, number)
            stack.callback(worker.close)
            found.append(worker)
        yield found


def run_point(point: Point, hosts: Sequence[StudyWorker], folder: Path) -> PointResult:
    """Run one point.

    Args:
        point: The point.
        hosts: One worker for each host.
        folder: For the state of their nodes. Each point needs another.

    Raises:
        NotRunningError: A worker has failed.
    """
    join = ""
    for index, worker in enumerate(hosts):
        state_dir = str(folder / str(index))
        worker.say(point=asdict(point), index=index, join=join, state_dir=state_dir)
        # The first host's string lets the others in.
        join = join or worker.next()["join"] if index == 0 else join
    for worker in hosts[1:]:
        worker.next()
    for worker in hosts:
        worker.say()
    return _merged(point, [worker.next() for worker in hosts])


def _merged(point: Point, found: Sequence[dict[str, Any]]) -> PointResult:
    def mean(name: str) -> float:
        return float(sum(each[name] for each in found) / len(found))

    best = max(found, key=lambda each: each["accuracy"])
    return PointResult(
        point=point,
        runtime_s=max(each["runtime_s"] for each in found),
        accuracy=best["accuracy"],
        loss=best["loss"],
        optimizer_s=mean("optimizer_s"),
        wait_s=mean("wait_s"),
        sent_bytes=round(mean("sent_bytes")),
        rounds=max(each["rounds"] for each in found),
        whole_rounds=mean("whole_rounds"),
        averaging_s=mean("averaging_s"),
        dropped=sum(each["dropped"] for each in found),
    )


def run_grid(points: Sequence[Point], tell: Callable[[str], None]) -> list[PointResult]:
    """Run all points of a grid.

    Args:
        points: The grid.
        tell: Takes a line on each point.

    Raises:
        NotRunningError: A worker has failed.
    """
    results = []
    num_hosts = max(max(1, point.peers) for point in points)
    with workers(num_hosts) as hosts, tempfile.TemporaryDirectory(prefix="decod-study-") as place:
        for number, point in enumerate(points, 1):
            folder = Path(place) / str(number)
            result = run_point(point, hosts[: max(1, point.peers)], folder)
            results.append(result)
            tell(
                f"{number}/{len(points)}  {point.name}: {result.runtime_s:.1f} s, "
                f"accuracy {100 * result.accuracy:.0f} %"
            )
    return results
