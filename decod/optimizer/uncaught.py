"""An error of decod that a script does not catch ends it as it ends a command of decod.

Python would print a traceback through decod, in which the reader must look for the message.
"""

import sys
import traceback
from pathlib import Path
from types import TracebackType

from decod.errors import DecodError

_OWN = str(Path(__file__).parents[1])
_BUGS = "E-INT-"
"""Prefix of codes of errors in decod itself. Their tracebacks are wanted."""


def show_plainly() -> None:
    """Show uncaught errors of decod as one message, and end with their exit codes.

    A hook that somebody else has set stays.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, DecodError) or error.code.startswith(_BUGS):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"error: {error}\n{_place(trace)}")
    sys.stderr.flush()
    # The interpreter ends with this code, after all that runs at exit.
    raise SystemExit(int(error.exit_code))


def _place(trace: TracebackType | None) -> str:
    """Return where in the user's code the error has come up."""
    frames = traceback.extract_tb(trace)
    own = next((k for k, frame in enumerate(frames) if frame.filename.startswith(_OWN)), 0)
    if not own:
        return ""
    frame = frames[own - 1]
    return f"  in {frame.filename}, line {frame.lineno}\n"
