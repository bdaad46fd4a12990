"""The demo's output: a live line on a terminal, plain lines elsewhere."""

import re
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import click
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from typing_extensions import override

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
