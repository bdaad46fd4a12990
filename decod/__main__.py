"""`decod` and `python -m decod`: the part that runs before any slow import."""

import sys
from contextlib import suppress

from decod.exit_codes import ExitCode
from decod.process import leave_early, let_go, open_closed

_NODES = (["leader"], ["join"])
"""Commands that run a node. From here on, a request to leave ends the process in order."""


def run() -> int:
    """Run the command line and return its exit code. Ctrl-C counts from here on."""
    open_closed()
    try:
        if sys.argv[1:2] in _NODES:
            leave_early()
        from decod.cli.main import main
        from decod.cli.printing import watch_output

        watch_output()
        return main()
    except KeyboardInterrupt:
        # Most likely the command line was still being imported: it reports its own interrupts.
        with suppress(OSError):
            sys.stderr.write("interrupted\n")
        return ExitCode.INTERRUPTED
    finally:
        let_go()


if __name__ == "__main__":
    sys.exit(run())
