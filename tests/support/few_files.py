"""A `decod` whose process may open only a limited number of files.

python -m tests.support.few_files SOFT HARD leader RUN.TOML ...
"""

import resource
import sys


def program(hard: int, *, soft: int | None = None) -> tuple[str, ...]:
    """Return the command that starts a daemon with these limits. `soft` defaults to `hard`."""
    limits = (str(hard if soft is None else soft), str(hard))
    return (sys.executable, "-u", "-m", "tests.support.few_files", *limits)


if __name__ == "__main__":
    from decod.cli.main import main

    limits = int(sys.argv.pop(1)), int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    sys.exit(main())
