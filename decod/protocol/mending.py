"""Who takes a lost relay's place, for each microbatch that went through it (GWTF V-D).

GWTF has the last live node before the gap choose. Here the data node does, for its own
microbatches: it knows their paths, so two choices never contradict each other, and any number of
adjacent stages may be missing. One more message's way is little beside the time that it takes to
find out that a relay is gone.
"""

from collections import Counter
from collections.abc import Iterable

from decod.ids import NodeId
from decod.protocol.view import Member, View

Path = tuple[NodeId, ...]


class Substitutes:
    """Chooses relays of a view for those that are not in it, evenly for all paths of a data node.

    Args:
        view: Without the lost relays.
        paths: All that this data node's microbatches take, with and without lost relays.
        newest: Members admitted after this iteration may not hold their stage's parameters yet.
    """

    def __init__(self, view: View, paths: Iterable[Path], *, newest: int) -> None:
        self._view = view
        self._newest = newest
        self._loads = Counter(relay for path in paths for relay in path)

    def mend(self, path: Path) -> Path:
        """Return the path with another relay wherever one is lost. Every stage has a worker."""
        relays = [
            relay if relay in self._view else self._least_busy(stage)
            for stage, relay in enumerate(path, start=1)
        ]
        return tuple(relays)

    def _least_busy(self, stage: int) -> NodeId:
        workers = self._view.workers[stage]
        at_once = [m for m in workers if m.since_iteration < self._newest] or workers
        best = min(at_once, key=lambda m: (self._work(m), m.node_id))
        self._loads[best.node_id] += 1
        return best.node_id

    def _work(self, member: Member) -> float:
        return (self._loads[member.node_id] + 1) / member.capacity
