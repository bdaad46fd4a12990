"""Everything that commands print: results, progress, warnings and errors.

Results go to standard output, which may be full, or have lost its reader. All else goes to standard
error. An error is one line and an exit code, and no traceback; the codes are in
`decod.exit_codes`. The progress of a long operation is a bar on a terminal, and elsewhere a line
now and then.
"""

import errno
import io
import json
import math
import os
import re
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import click
from typing_extensions import override

from decod.cli.options import notes_of
from decod.config.node_config import default_cache_dir, default_state_dir
from decod.errors import ConfigError, DecodError, HardwareError
from decod.exit_codes import ExitCode
from decod.process import takes_a_line
from decod.texts import clean_text, size_text, span

# --- standard output -----------------------------------------------------------------------------
# Standard output of a command, which may be full, or have lost its reader.
#
# Neither is a bug of decod. A command that can't print its output ends with an error of its own. A
# node goes on: see `decod.journal.terminal`.


def json_text(value: object) -> str:
    """Return a value as JSON, which has no infinite numbers and no NaN: they become null."""
    return json.dumps(_with_nulls(value), allow_nan=False)


def _with_nulls(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _with_nulls(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(each) for each in value]
    return value


class OutputError(OSError):
    """Standard output takes no more data. The text says why."""


class ReaderGoneError(OutputError):
    """The reader of standard output has closed it."""


class _Output(io.FileIO):
    """Standard output whose errors differ from those of other files."""

    @override
    def write(self, data: Any) -> int:
        try:
            # None means that another process has made the file non-blocking, and it is full.
            while (written := super().write(data)) is None:
                select.select([], [self], [])
        except BrokenPipeError:
            # Without an errno: for EPIPE, click would end the command with its own exit code.
            raise ReaderGoneError("nobody reads it any more") from None
        except OSError as error:
            raise OutputError(error.strerror or str(error)) from error
        return written


def watch_output() -> None:
    """Replace `sys.stdout` so that every failure to write raises an `OutputError`."""
    sys.stdout.flush()
    output = io.BufferedWriter(_Output(1, "wb", closefd=False))
    sys.stdout = io.TextIOWrapper(output, encoding=sys.stdout.encoding, line_buffering=True)


def output_failed(error: OutputError) -> HardwareError:
    """Return the error for output that could not be printed."""
    return HardwareError(
        "what this command says can't be written to standard output",
        why=str(error),
        fix="free some space there, or write elsewhere; what the command does may be done",
        code="E-HW-013",
    )


# Progress of a long operation, on stderr: a bar on a terminal, and elsewhere a line now and then.
#
# The bar is gone when the operation ends, and rich leaves colours out if NO_COLOR is set. In a
# log or a pipe, an operation that is done within a second says nothing.

PATIENCE_S = 1.0
"""Time to the first line where there is no terminal."""

LINE_INTERVAL_S = 30.0
"""Time between two lines there."""

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
        with _Lines(title, num_bytes) as lines:
            yield lines.advance
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
    """Show that something is being done whose length is not known, while the context lasts."""
    if not sys.stderr.isatty():
        with _Lines(title):
            yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(title, total=None)
        yield


class _Lines:
    """The lines of one operation where there is no terminal. A thread of its own says them, since
    what is waited for may come to a standstill.
    """

    def __init__(self, title: str, num_bytes: int | None = None) -> None:
        self._title, self._num_bytes = title, num_bytes
        self._num_done = 0
        self._begun_s = time.monotonic()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._keep_telling, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()

    def advance(self, num_bytes: int) -> None:
        self._num_done += num_bytes

    def _keep_telling(self) -> None:
        pause_s = PATIENCE_S
        while not self._ended.wait(pause_s):
            pause_s = LINE_INTERVAL_S
            if takes_a_line(sys.stderr):
                with suppress(OSError, ValueError):
                    click.echo(f"{self._title}: {self._progress()}", err=True)

    def _progress(self) -> str:
        so_far_s, done = time.monotonic() - self._begun_s, self._num_done
        if self._num_bytes is None or not done:
            return f"{span(so_far_s)} so far"
        total = max(self._num_bytes, done)
        left = span(so_far_s * (total - done) / done)
        return f"{100 * done / total:.0f} % of {size_text(total)}, {left} left"


# Errors on the command line: one line on stderr and an exit code, no traceback.
#
# The exit codes are in `decod.exit_codes`.

_FAILURES_OF_HOST = frozenset(
    {
        errno.EIO,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.ESTALE,
        errno.ENODEV,
        errno.ENXIO,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
    }
)
"""System errors that are faults of the host, and not bugs of decod."""

ERROR_TEXT_MAX_CHARACTERS = 2000
_NAME_SHOWN = 100
_LONG_WORD = re.compile(r"\S{400,}")


def use_color() -> bool | None:
    """Return False if NO_COLOR is set (https://no-color.org), else None: click decides."""
    return False if os.environ.get("NO_COLOR") else None


def print_error(message: str) -> None:
    """Write one line on stderr, after cleaning it of control characters from files and peers.

    If it can't be written, the exit code must do.
    """
    label = click.style("error:", fg="red", bold=True)
    text = clean_text(_cut(message), limit=ERROR_TEXT_MAX_CHARACTERS)
    with suppress(OSError, ValueError):
        click.echo(f"{label} {text}", err=True, color=use_color())


def _cut(message: str) -> str:
    """Return a message whose remedy, at its end, is shown however long a value in it is."""
    if len(message) <= ERROR_TEXT_MAX_CHARACTERS:
        return message
    message = _LONG_WORD.sub(lambda word: f"{word[0][:_NAME_SHOWN]}...", message)
    half = ERROR_TEXT_MAX_CHARACTERS // 2
    if len(message) <= 2 * half:
        return message
    return f"{message[: half - 5]} ... {message[-half:]}"


def print_warning(message: str) -> None:
    """Write one line on stderr about what the operator should know, and may leave as it is.

    A pipe that nobody reads must not hold the command up: then the line is left out.
    """
    if not takes_a_line(sys.stderr):
        return
    label = click.style("warning:", fg="yellow", bold=True)
    text = clean_text(message, limit=ERROR_TEXT_MAX_CHARACTERS)
    with suppress(OSError, ValueError):
        click.echo(f"{label} {text}", err=True, color=use_color())


def report_decod_error(error: DecodError) -> int:
    """Print an error of decod with its notes, and return its exit code."""
    print_error(" ".join([str(error), *notes_of(error)]))
    return error.exit_code


def find_decod_error(error: Exception) -> DecodError | None:
    """Return the `DecodError` in `error`, which may be an exception group, or None."""
    if isinstance(error, DecodError):
        return error
    if isinstance(error, ExceptionGroup):
        return next(filter(None, map(find_decod_error, error.exceptions)), None)
    return None


@dataclass(slots=True)
class ReportPlace:
    """The folder for the report of an unexpected error. `cli.main` makes it the context's `obj`.

    Attributes:
        folder: The node's `--state-dir` once it is known. Each node of a host has its own.
    """

    folder: Path | None = None

    def use(self, folder: Path) -> None:
        """Write a report there."""
        self.folder = folder


def report_unexpected(error: Exception, place: ReportPlace) -> int:
    """Write the traceback to a file, print one line that names it, and return the exit code."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return report_decod_error(_too_long(error))
    path = _write_report(error, place.folder)
    if isinstance(error, OSError) and error.errno in _FAILURES_OF_HOST:
        where = f"{error.filename}: " if error.filename is not None else ""
        failed = HardwareError(
            f"{where}{error.strerror}",
            why="a disk or this host's system has failed decod",
            fix="mend that, and run the command again"
            + (f"; more about it is in {path}" if path else ""),
            code="E-HW-012",
        )
        return report_decod_error(failed)
    hint = f"report it with the file {path}" if path else "report it; no file could be written"
    print_error(
        f"E-INT-001 {type(error).__name__}: {error}: this is a bug in decod. Try: please {hint}"
    )
    return ExitCode.UNEXPECTED


def _too_long(error: OSError) -> ConfigError:
    return ConfigError(
        f"{str(error.filename)[:_NAME_SHOWN]}...: {error.strerror}",
        why="no file or folder can have that name",
        fix="check the paths that you have given",
        code="E-CFG-077",
    )


def _write_report(error: Exception, folder: Path | None) -> Path | None:
    """Write a report, into the node's folder unless a daemon uses it; return its path."""
    from decod.daemon.node_folder import is_in_use

    now = datetime.now(UTC)
    text = "".join([f"decod {' '.join(sys.argv[1:2])}\n", *traceback.format_exception(error)])
    folders = list[Path]()
    with suppress(ConfigError):  # Without a home, there may be no folder at all.
        folder = folder or default_state_dir()
        folders += [] if is_in_use(folder) else [folder]
        folders.append(default_cache_dir())
    for chosen in folders:
        path = chosen / f"crash-{now:%Y%m%dT%H%M%SZ}-{os.getpid()}.txt"
        # The unexpected error may be a failing disk.
        with suppress(OSError):
            chosen.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return path
    return None
