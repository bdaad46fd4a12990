"""Processes that a measurement starts: their lines with the instants they came, and their end.

Whatever happens to the measurement, nothing that it started goes on: `stop_all` is called at exit
and on SIGTERM.
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
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).resolve().parents[2]

_LOG_TAIL_LINES = 15


class BenchError(Exception):
    """A subject could not be measured."""


class Child:
    """A running process and what it prints.

    Args:
        arguments: What follows the interpreter on the command line.
        num_threads: For the numerical libraries in it.
        log: Takes its standard error.
        environment: Further variables.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        num_threads: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        paths = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "scripts")))}
        self.name = " ".join(arguments[:3])
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                (sys.executable, "-u", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **threads, **paths, **(environment or {})},
                # Signals go to the whole group, so what it starts ends with it.
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

    def next_line(self, deadline_s: float) -> tuple[float, str]:
        """Return the next line and the instant at which it came.

        Raises:
            BenchError: The process ended, or printed nothing until the deadline.
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
        """Ask it to end."""
        with suppress(psutil.Error):
            self._descendants |= set(psutil.Process(self.process.pid).children(recursive=True))
        self._signal(signal.SIGTERM)

    def stop(self, *, grace_s: float = 3.0) -> None:
        """End it and what it started: first politely, then for good. May be called twice."""
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=grace_s)
        self._signal(signal.SIGKILL)
        self.process.wait()
        # What it started may be in a group of its own; it leaves when its parent has gone.
        _, left = psutil.wait_procs(self._descendants, timeout=grace_s)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        if self in _running:
            _running.remove(self)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is not None and number is signal.SIGTERM:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


_running: list[Child] = []


def stop_all() -> None:
    """End every process that is still there."""
    while _running:
        # Takes itself out.
        _running[0].stop(grace_s=1.0)


def stop_all_at_exit() -> None:
    """Arrange that no process outlives this one, unless it is killed outright."""
    atexit.register(stop_all)

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    handler: Callable[[int, object], None] = leave
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGHUP, handler)
