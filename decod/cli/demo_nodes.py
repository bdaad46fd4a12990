"""The demo's daemons and its output.

The daemons are real `decod` processes with folders and logs of their own. Each is started in a
session of its own. So Ctrl-C on the terminal reaches only the demo, which then ends all daemons.
And a kill ends a daemon's compute process too, as a power cut would. The output is a live line on a
terminal, and plain lines elsewhere.
"""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

import click
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from typing_extensions import override

from decod.cli.options import environment_of_nodes
from decod.errors import DecodError
from decod.texts import clean_text

PROGRAM = (sys.executable, "-u", "-m", "decod")
"""The `decod` of this installation, with unbuffered output."""

_LOG_TAIL_LINES = 12
_LOG_TAIL_BYTES = 16_384
_END_TIMEOUT_S = 8.0
"""Time from SIGTERM to SIGKILL."""


class DemoError(DecodError):
    """The demo failed: a daemon died, or the model did not learn."""

    code = "E-RUN-020"
    log_tail: Sequence[str] = ()
    """The last lines of the daemon in question, shown above the error."""


@dataclass(slots=True)
class Child:
    """One daemon."""

    name: str
    process: subprocess.Popen[str]
    log_path: Path
    state_dir: Path
    killed: bool = False
    """The demo itself has killed it, on purpose."""

    def log_tail(self) -> list[str]:
        """Return the last lines of its log, with control characters replaced."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        return [clean_text(line) for line in text.splitlines()[-_LOG_TAIL_LINES:]]


class Fleet:
    """All daemons of the demo. Leaving the `with` block ends them all, even after an error.

    Args:
        folder: Gets a state folder for each node, and `logs/`.
        program: Command line that starts `decod`.
        options: Given to every daemon.
    """

    def __init__(
        self, folder: Path, *, program: Sequence[str] = PROGRAM, options: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self._program = tuple(program)
        self._options = tuple(options)
        self._readers: list[threading.Thread] = []
        self.children: list[Child] = []
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        """The lines that the child with `listen=True` prints."""

    def __enter__(self) -> "Fleet":
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start(self, name: str, arguments: Sequence[str], *, listen: bool = False) -> Child:
        """Start `decod ARGUMENTS --name NAME` with one thread, on a free port of the loopback.

        Args:
            name: The name of the node, its state folder, and its log.
            arguments: The command and its arguments.
            listen: Put its stdout into `lines`. Otherwise it goes to the log.
        """
        state_dir = self._folder / name
        log_path = self._folder / "logs" / f"{name}.log"
        common = ["--listen", "127.0.0.1:0", "--threads", "1", "--name", name]
        command = [*self._program, *arguments, *common, *self._options]
        command += ["--state-dir", str(state_dir)]
        with log_path.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own program, arguments as a list.
                command,
                env=environment_of_nodes(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if listen else log,
                stderr=log,
                start_new_session=True,
                encoding="utf-8",
                errors="replace",
            )
        child = Child(name, process, log_path, state_dir)
        self.children.append(child)
        if listen:
            assert process.stdout is not None
            reader = threading.Thread(
                target=_copy_lines, args=(process.stdout, self.lines, log_path), daemon=True
            )
            reader.start()
            self._readers.append(reader)
        return child

    def next_line(self, *, timeout_s: float) -> str | None:
        """Return the next of `lines`, or None if none comes in time."""
        try:
            return self.lines.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def refuse_deaths(self) -> None:
        """Check that no daemon has died, except the relay that the demo has killed.

        Raises:
            DemoError: A daemon has ended with an error. Holds the last lines of its log.
        """
        for child in self.children:
            code = child.process.poll()
            if code and not child.killed:
                raise death_of(child, code)

    def kill(self, child: Child) -> None:
        """Kill a daemon and its compute process without warning, as a power cut would."""
        child.killed = True
        _signal_group(child, signal.SIGKILL)
        child.process.wait()

    def wait_for_ends(self, *, timeout_s: float) -> None:
        """Wait until all daemons have ended by themselves, or the time is up."""
        _wait(self.children, timeout_s=timeout_s)

    def end(self) -> None:
        """Ask all daemons to end, then kill those that have not."""
        try:
            for child in self.children:
                if child.process.poll() is None:
                    # Only the node process gets the signal: it ends its compute process itself.
                    with contextlib.suppress(ProcessLookupError):
                        child.process.terminate()
            _wait(self.children, timeout_s=_END_TIMEOUT_S)
        finally:
            # Even if the node process has ended, its compute process may be left.
            for child in self.children:
                _signal_group(child, signal.SIGKILL)
                child.process.wait()
            # The other ends of their pipes are closed now, so they end too.
            for reader in self._readers:
                reader.join(timeout=_END_TIMEOUT_S)


def death_of(child: Child, code: int) -> DemoError:
    """Return the error for a daemon that has ended."""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return blame(child, f"{child.name} ended with {how}", why="the demo needs all of its nodes")


def blame(child: Child, what: str, *, why: str) -> DemoError:
    """Return an error that holds the last lines of a daemon's log."""
    error = DemoError(what, why=why, fix=f"read {child.log_path}")
    error.log_tail = [f"{child.name}: {line}" for line in child.log_tail()]
    return error


def _copy_lines(stream: IO[str], lines: "queue.SimpleQueue[str]", log_path: Path) -> None:
    with stream, log_path.open("a", encoding="utf-8") as log:
        for line in stream:
            log.write(line)
            log.flush()
            lines.put(line.rstrip("\n"))


def _signal_group(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def _wait(children: Sequence[Child], *, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=max(0.0, deadline_s - time.monotonic()))


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that the block can clean up."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


_ITERATION = re.compile(
    r"(?:^|\s)iteration (?P<index>[0-9]{1,12})(?: of [0-9]{1,15})?"
    r"\s+loss (?P<loss>[0-9]{1,9}(?:\.[0-9]{1,9})?)(?: \([-+0-9.]{1,20}\))?"
    r"(?:\s+(?P<speed>[0-9]{1,12}(?:\.[0-9]+)?) tokens/s)?"
)
_PLAIN_EVERY = 5
"""A plain line is printed every so many iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCommit:
    """The leader's line about one iteration."""

    iteration: int
    loss: float
    """Mean over the iteration's tokens, in nats."""
    tokens_per_s: float | None


def parse_progress(line: str) -> DemoCommit | None:
    """Parse a line of `decod.daemon.progress_display`; return None if it is another line."""
    match = _ITERATION.search(line)
    if match is None:
        return None
    speed = match["speed"]
    return DemoCommit(
        iteration=int(match["index"]),
        loss=float(match["loss"]),
        tokens_per_s=None if speed is None else float(speed),
    )


class Display(Protocol):
    """An output for the demo's events."""

    def note(self, text: str) -> None:
        """Show a text that stays on the screen."""
        ...

    def progress(self, progress: DemoCommit) -> None:
        """Show that an iteration is done."""
        ...


class PlainDisplay(AbstractContextManager["PlainDisplay"]):
    """Plain lines, for a file or a pipe."""

    def __init__(self, num_iterations: int) -> None:
        self._num_iterations = num_iterations

    def note(self, text: str) -> None:
        click.echo(text)

    def progress(self, progress: DemoCommit) -> None:
        index = progress.iteration
        if index == 1 or index == self._num_iterations or index % _PLAIN_EVERY == 0:
            click.echo(f"iteration {index}/{self._num_iterations}  {_figures(progress)}")

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """A bar and figures that are redrawn, with notes above them."""

    def __init__(self, num_iterations: int) -> None:
        self._num_iterations = num_iterations
        self._console = Console(markup=False, highlight=False, emoji=False)
        self._latest: DemoCommit | None = None
        self._start_s = time.monotonic()
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=4,
            transient=True,
        )

    @override
    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def progress(self, progress: DemoCommit) -> None:
        self._latest = progress

    def _draw(self) -> Table:
        done = self._latest.iteration if self._latest else 0
        grid = Table.grid(padding=(0, 2, 0, 0))
        elapsed_s = time.monotonic() - self._start_s
        grid.add_row(
            ProgressBar(total=self._num_iterations, completed=done, width=24),
            f"iteration {done}/{self._num_iterations}",
            _figures(self._latest) if self._latest else "waiting for the nodes",
            f"{elapsed_s:.0f} s",
        )
        return grid


def make_display(num_iterations: int) -> PlainDisplay | LiveDisplay:
    """Return the display that suits stdout."""
    return (LiveDisplay if sys.stdout.isatty() else PlainDisplay)(num_iterations)


def _figures(progress: DemoCommit) -> str:
    text = f"loss {progress.loss:.3f}"
    if progress.tokens_per_s is not None:
        text += f"  {progress.tokens_per_s:.0f} tokens/s"
    return text
