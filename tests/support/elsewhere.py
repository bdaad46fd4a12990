"""A `decod` that sees no other process of its host, as if it ran on a host of its own.

    python -m tests.support.elsewhere join JOINSTRING ...

Everything else about it is real. It may use a key that another process here uses.
"""

import secrets
import sys
from pathlib import Path

from decod.membership.identity import HostKey

PROGRAM = (sys.executable, "-u", "-m", "tests.support.elsewhere")


def _be_alone() -> None:
    from decod.daemon.node_folder import SoleUse
    from decod.system import HeldName

    def claim(self: SoleUse, _identity: HostKey, _state_dir: Path) -> None:
        self._name = HeldName(secrets.token_hex(8))

    SoleUse.__init__ = claim  # type: ignore[method-assign]


if __name__ == "__main__":
    from decod.cli.main import main

    _be_alone()
    sys.exit(main())
