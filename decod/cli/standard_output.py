"""Standard output of a command, which may be full, or have lost its reader.

Neither is a bug of decod. A command that can't print its output ends with an error of its own. A
node goes on: see `decod.journal.terminal`.
"""

import io
import json
import math
import select
import sys
from typing import Any

from typing_extensions import override

from decod.errors import HardwareError


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
