"""Standard output of a command: it may be full, or nobody may read it any more.

Neither is a bug of decod's. A command that can't print what it has to say ends with an error of its
own. A node goes on: see `decod.obs.terminal`.
"""

import io
import select
import sys
from typing import Any

from typing_extensions import override

from decod.errors import HardwareError


class OutputError(OSError):
    """Standard output takes nothing more; the text says why."""


class ReaderGoneError(OutputError):
    """The reader of standard output has closed it, having seen enough."""


class _Output(io.FileIO):
    """Standard output, whose errors can be told from those of other files."""

    @override
    def write(self, data: Any) -> int:
        try:
            # None: whoever shares it has made it not wait, and it has no room now.
            while (written := super().write(data)) is None:
                select.select([], [self], [])
        except BrokenPipeError:
            # Without a number: click would end the command with an exit code of its own.
            raise ReaderGoneError("nobody reads it any more") from None
        except OSError as error:
            raise OutputError(error.strerror or str(error)) from error
        return written


def watch_output() -> None:
    """Have whatever goes wrong on standard output raise an `OutputError`."""
    sys.stdout.flush()
    output = io.BufferedWriter(_Output(1, "wb", closefd=False))
    sys.stdout = io.TextIOWrapper(output, encoding=sys.stdout.encoding, line_buffering=True)


def output_failed(error: OutputError) -> HardwareError:
    """Return the error for what could not be printed."""
    return HardwareError(
        "what this command says can't be written to standard output",
        why=str(error),
        fix="free some space there, or write elsewhere; what the command does may be done",
        code="E-HW-013",
    )
