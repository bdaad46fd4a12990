"""A `decod` whose host says that its passes take longer than they do.

    python -m tests.support.dear SECONDS join JOINSTRING ...

To its peers it is a host that costs more by half of SECONDS on each link, as one with a slow device
would be, while a test on one machine stays quick.
"""

import sys
from typing import Any

from decod.cli.main import main
from decod.protocol.core.link_table import LinkTable

if __name__ == "__main__":
    more_s, measured = float(sys.argv[1]), LinkTable.compute_s

    def compute_s(self: LinkTable) -> Any:
        """Return what was measured, and more."""
        assert measured.fget is not None
        return measured.fget(self) + more_s

    LinkTable.compute_s = property(compute_s)  # type: ignore[assignment,method-assign]
    del sys.argv[1]
    sys.exit(main())
