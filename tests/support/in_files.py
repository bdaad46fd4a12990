"""A `decod` whose copies of its own state all go to files, as those of large states do.

python -m tests.support.in_files leader RUN.TOML ...
"""

import sys

PROGRAM = (sys.executable, "-u", "-m", "tests.support.in_files")


if __name__ == "__main__":
    from decod.cli.main import main
    from decod.driver import arena

    arena.IN_MEMORY_MAX_BYTES = 0
    sys.exit(main())
