"""A `decod` whose nodes get papers for a few seconds, as if days were that short.

python -m tests.support.brief SECONDS leader RUN.TOML ...
"""

import sys

from decod.membership import papers

PROGRAM = (sys.executable, "-u", "-m", "tests.support.brief", "6")


if __name__ == "__main__":
    # In place: other modules may have imported it already.
    object.__setattr__(papers.TERMS, "certificate_s", float(sys.argv.pop(1)))
    from decod.cli.main import main

    sys.exit(main())
