"""What the command line does with errors: one line on stderr and an exit code, no traceback.

The exit codes are an interface; docs/reference.md explains every one.
"""

import errno
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from decod.config.node import default_cache_dir, default_state_dir
from decod.daemon.folder import is_in_use
from decod.errors import DecodError, HardwareError
from decod.obs.text import clean_text

EXIT_OK: Final = 0
EXIT_UNEXPECTED: Final = 1
EXIT_USAGE: Final = 2
EXIT_DEGRADED: Final = 8
"""`decod status --check`: a daemon answers, but the run is not well."""
EXIT_TEMPORARY: Final = 75
"""Try again later: sysexits' EX_TEMPFAIL."""
EXIT_INTERRUPTED: Final = 130
"""Ended by Ctrl-C, as a shell would say it: 128 + SIGINT."""
EXIT_READER_GONE: Final = 141
"""Whoever read standard output has gone, as a shell would say it: 128 + SIGPIPE."""

EXIT_CODES: dict[int, str] = {
    EXIT_OK: "ok",
    EXIT_UNEXPECTED: "unexpected error; a report was written",
    EXIT_USAGE: "wrong usage of the command line",
    3: "the configuration is invalid",
    4: "network: nobody reachable, or the port is in use",
    5: "rejected by the run",
    6: "the hardware is unfit",
    7: "no daemon is running here",
    EXIT_DEGRADED: "running, but degraded (`status --check`)",
    9: "data or checkpoint missing or corrupt",
    EXIT_TEMPORARY: "temporary failure, try again",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_READER_GONE: "whoever read standard output has gone",
}
"""Every exit code of `decod`. A number is never given a second meaning."""

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
"""Errors of the system that say that it is not well, whatever decod does."""

ERROR_TEXT_MAX_CHARACTERS = 2000


def use_color() -> bool | None:
    """Returns False where colour is unwanted (https://no-color.org), else None: click decides."""
    return False if os.environ.get("NO_COLOR") else None


def print_error(message: str) -> None:
    """Writes one line on stderr. Text of files and peers in it is made harmless first.

    If it can't be written, the exit code still tells.
    """
    label = click.style("error:", fg="red", bold=True)
    text = clean_text(message, limit=ERROR_TEXT_MAX_CHARACTERS)
    with suppress(OSError, ValueError):
        click.echo(f"{label} {text}", err=True, color=use_color())


def report_decod_error(error: DecodError) -> int:
    """Prints an error of ours and returns its exit code."""
    print_error(str(error))
    return error.exit_code


def find_decod_error(error: Exception) -> DecodError | None:
    """Returns the error of ours in `error`, also from within a group that tasks failed with."""
    if isinstance(error, DecodError):
        return error
    if isinstance(error, ExceptionGroup):
        return next(filter(None, map(find_decod_error, error.exceptions)), None)
    return None


@dataclass(slots=True)
class ReportPlace:
    """Where the report of an unexpected error goes; `cli.main` passes it on as the context's `obj`.

    Attributes:
        folder: The node's `--state-dir` once it is known: each node of a host has its own.
    """

    folder: Path | None = None


def report_unexpected(error: Exception, place: ReportPlace) -> int:
    """Writes the traceback to a file, prints one line that names it, and returns the exit code."""
    path = _write_report(error, place.folder or default_state_dir())
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
    return EXIT_UNEXPECTED


def _write_report(error: Exception, folder: Path) -> Path | None:
    """Writes a report into a node's folder, unless another process runs the node."""
    now = datetime.now(UTC)
    text = "".join([f"decod {' '.join(sys.argv[1:2])}\n", *traceback.format_exception(error)])
    folders = [default_cache_dir()] if is_in_use(folder) else [folder, default_cache_dir()]
    for chosen in folders:
        path = chosen / f"crash-{now:%Y%m%dT%H%M%SZ}-{os.getpid()}.txt"
        # The disk may be what failed in the first place.
        with suppress(OSError):
            chosen.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return path
    return None
