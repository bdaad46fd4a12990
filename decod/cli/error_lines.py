"""Errors on the command line: one line on stderr and an exit code, no traceback.

The exit codes are in `decod.exit_codes`.
"""

import errno
import os
import re
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

from decod.cli.environment import notes_of
from decod.config.node_config import default_cache_dir, default_state_dir
from decod.daemon.node_folder import is_in_use
from decod.errors import ConfigError, DecodError, HardwareError
from decod.exit_codes import ExitCode
from decod.process import takes_a_line
from decod.texts import clean_text

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
