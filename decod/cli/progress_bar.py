"""Progress of a long operation, on stderr: a bar on a terminal, and elsewhere a line now and then.

The bar is gone when the operation ends, and rich leaves colours out if NO_COLOR is set. In a log or
a pipe, an operation that is done within half a minute says nothing.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click

from decod.process import takes_a_line
from decod.texts import size_text, span

LINE_INTERVAL_S = 30.0
"""Time between two lines where there is no terminal."""

Advance = Callable[[int], None]
"""Takes the number of bytes that have been dealt with since the last call."""


@contextmanager
def progress(title: str, num_bytes: int) -> Iterator[Advance]:
    """Show how much of some bytes has been dealt with, while the context lasts.

    Args:
        title: What is done, such as `reading text`.
        num_bytes: All bytes.
    """
    if not sys.stderr.isatty():
        yield _Lines(title, num_bytes, time.monotonic).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=num_bytes)
        yield lambda num: bar.advance(task, num)


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Show on a terminal that something is being done whose length is not known."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(title, total=None)
        yield


class _Lines:
    """The lines of one operation where there is no terminal."""

    def __init__(self, title: str, num_bytes: int, clock: Callable[[], float]) -> None:
        self._title, self._num_bytes, self._clock = title, num_bytes, clock
        self._begun_s = self._told_s = clock()
        self._num_done = 0

    def advance(self, num_bytes: int) -> None:
        self._num_done += num_bytes
        now_s = self._clock()
        if now_s - self._told_s < LINE_INTERVAL_S or not takes_a_line(sys.stderr):
            return
        self._told_s = now_s
        done, total = self._num_done, max(self._num_bytes, self._num_done, 1)
        left_s = (now_s - self._begun_s) * (total - done) / max(1, done)
        text = f"{self._title}: {100 * done / total:.0f} % of {size_text(total)}"
        with suppress(OSError, ValueError):
            click.echo(f"{text}, {span(left_s)} left", err=True)
