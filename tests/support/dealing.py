"""Distribution of the tests among processes: real clusters to one process, the rest to others.

Daemons of a cluster take all processors that they can get, and wait for each other. Two clusters at
a time slow each other down, and a cluster beside tests that compute uses what is left over. The
first process therefore takes files from the front of the list, where `tests/integration` is, and
all others from its end, until they meet. The files dealt out last should be short. If the tests of
a file share nothing and may take long, each test is dealt out alone.
"""

from typing import Any

from xdist.scheduler import LoadFileScheduling

_APART = ("tests/sim/", "tests/unit/protocol/routing/test_draft.py")
"""Places where nothing is created once for all tests of a file."""


class FromBothEnds(LoadFileScheduling):
    """Deals out files, and single tests, in the order of collection."""

    def __init__(self, config: Any, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(_APART) else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if node.gateway.id != "gw0" and self.workqueue:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
