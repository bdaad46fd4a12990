"""Exit codes of `decod`. They are an interface: a number never changes its meaning.

docs/reference.md has the same table, with more words. Nothing is imported here but `enum`, since
the command line needs a code before it has imported anything else.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """The end of a command, for programs."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    CONFIG = 3
    NETWORK = 4
    REJECTED = 5
    HARDWARE = 6
    NOT_RUNNING = 7
    DEGRADED = 8
    DATA = 9
    TEMPORARY = 75
    """EX_TEMPFAIL of sysexits.h."""
    INTERRUPTED = 130
    """As in a shell: 128 + SIGINT."""
    READER_GONE = 141
    """As in a shell: 128 + SIGPIPE."""


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "All is well",
    ExitCode.UNEXPECTED: "Unexpected error",
    ExitCode.USAGE: "Wrong usage of the command line",
    ExitCode.CONFIG: "The configuration is invalid",
    ExitCode.NETWORK: "Network",
    ExitCode.REJECTED: "Rejected by the run",
    ExitCode.HARDWARE: "The hardware is unfit",
    ExitCode.NOT_RUNNING: "No daemon is running here",
    ExitCode.DEGRADED: "A daemon runs but does not train",
    ExitCode.DATA: "Data, model or checkpoint is missing",
    ExitCode.TEMPORARY: "Temporary",
    ExitCode.INTERRUPTED: "Interrupted by Ctrl-C",
    ExitCode.READER_GONE: "The reader of the output has gone",
}
"""The beginning of each code's row in docs/reference.md."""
