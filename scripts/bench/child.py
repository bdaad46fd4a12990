"""Processes that a measurement starts: their output lines with arrival times, and their end.

No process outlives the measurement, even if it fails: `stop_all` is called at exit and on SIGTERM.
"""

import atexit
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).resolve().parents[2]

_LOG_TAIL_LINES = 15


def import_path() -> str:
    """Return where a process looks for modules: here first, then where this one does."""
    here = (str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(filter(None, here))


class BenchError(Exception):
    """A subject could not be measured."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how a process runs."""

    prefix: tuple[str, ...] = ()
    """A command that runs what follows it, such as `ip netns exec NAME`."""
    python: str = sys.executable
    listens: bool = False
    """Whether `tell` writes to its standard input."""


HERE = Place()


class Child:
    """A running Python process and its output.

    Args:
        arguments: The command line after the interpreter.
        num_threads: Threads of the numerical libraries in it.
        log: The file for its standard error.
        environment: Further environment variables.
        place: Where it runs.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        num_threads: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        place: Place = HERE,
    ) -> None:
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        paths = {"PYTHONPATH": import_path()}
        self.name = " ".join(arguments[:3])
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                (*place.prefix, place.python, "-u", *arguments),
                stdin=subprocess.PIPE if place.listens else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **threads, **paths, **(environment or {})},
                # Signals go to the whole group, so the processes that it starts end with it.
                start_new_session=True,
            )
        self._descendants: set[psutil.Process] = set()
        _running.append(self)
        assert self.process.stdout is not None
        self._lines: queue.SimpleQueue[tuple[float, str] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put((time.monotonic(), line.rstrip("\n")))
        self._lines.put(None)

    def tell(self, line: str) -> None:
        """Write a line to the process, whose place `listens`.

        Raises:
            BenchError: The process has ended.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"{self.name}: has ended\n{self.log_tail()}") from None

    def next_line(self, deadline_s: float) -> tuple[float, str]:
        """Return the instant at which the next line came, and the line.

        Raises:
            BenchError: The process has ended, or printed nothing until the deadline.
        """
        try:
            item = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise BenchError(f"{self.name}: silent for too long\n{self.log_tail()}") from None
        if item is None:
            code = self.process.wait()
            raise BenchError(f"{self.name}: ended with exit code {code}\n{self.log_tail()}")
        return item

    def log_tail(self) -> str:
        """Return the last lines of its standard error."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(f"  | {line}" for line in text.splitlines()[-_LOG_TAIL_LINES:])

    def terminate(self) -> None:
        """Ask the process and its group to end."""
        self._note_descendants()
        self._signal(signal.SIGTERM)

    def _note_descendants(self) -> None:
        with suppress(psutil.Error):
            self._descendants |= set(psutil.Process(self.process.pid).children(recursive=True))

    def kill(self) -> None:
        """End the process and its descendants without notice, as if its machine had crashed."""
        self._note_descendants()
        self._signal(signal.SIGKILL)
        for process in self._descendants:
            with suppress(psutil.Error):
                process.kill()
        self.stop()

    def stop(self, *, grace_s: float = 3.0) -> None:
        """End the process and its descendants: ask first, then kill. May be called twice."""
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=grace_s)
        self._signal(signal.SIGKILL)
        self.process.wait()
        # Descendants may be in groups of their own. They should end when their parent has.
        _, left = psutil.wait_procs(self._descendants, timeout=grace_s)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        # Nobody holds the other end of its pipes any longer, so the reader ends.
        self._reader.join(timeout=grace_s)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        if self in _running:
            _running.remove(self)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is not None and number is signal.SIGTERM:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


_running: list[Child] = []


def stop_all() -> None:
    """End every process that still runs."""
    while _running:
        # `stop` removes the process from the list.
        _running[0].stop(grace_s=1.0)


def stop_all_at_exit() -> None:
    """Make sure that no child outlives this process, unless this is killed by SIGKILL."""
    atexit.register(stop_all)

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    handler: Callable[[int, object], None] = leave
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGHUP, handler)
