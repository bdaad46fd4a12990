"""`decod`, and `python -m decod`: what can be done before anything is imported that takes time."""

import sys

_INTERRUPTED = 130
"""As `decod.cli.errors.EXIT_INTERRUPTED`, which may not be there yet."""


def run() -> int:
    """Run the command line and return its exit code; Ctrl-C counts from here on."""
    try:
        from decod.cli.main import main

        return main()
    except KeyboardInterrupt:
        # Most likely while the command line was being imported: it reports its own.
        sys.stderr.write("interrupted\n")
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())
