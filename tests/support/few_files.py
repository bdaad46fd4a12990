"""Runs `decod` in a process that may have only so many files open.

python -m tests.support.few_files SOFT HARD leader RUN.TOML ...
"""

import resource
import sys


def program(hard: int, *, soft: int | None = None) -> tuple[str, ...]:
    """Returns how a daemon is started with these limits; the soft one is the hard one if absent."""
    limits = (str(hard if soft is None else soft), str(hard))
    return (sys.executable, "-u", "-m", "tests.support.few_files", *limits)


if __name__ == "__main__":
    from decod.cli.main import main

    limits = int(sys.argv.pop(1)), int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    sys.exit(main())
