"""A `decod` whose core raises an unexpected error, when it is told to.

    python -m tests.support.failing_core ORDER leader run.toml ...

ORDER is a file. Once it exists, the core fails at the next event. Everything else about the process
is real.
"""

import sys
from pathlib import Path
from typing import Any

from decod.cli.main import main
from decod.protocol.node_machine import NodeMachine


def doom(order: Path) -> None:
    """Make the core fail as the order says."""
    step = NodeMachine.step

    def watched(machine: NodeMachine, now_s: float, event: Any) -> list[Any]:
        if order.exists():
            raise ZeroDivisionError("a bug")
        return step(machine, now_s, event)

    NodeMachine.step = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    doom(Path(sys.argv.pop(1)))
    sys.exit(main())
