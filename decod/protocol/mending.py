"""Who takes a lost relay's place, for each microbatch that went through it (GWTF V-D).

GWTF has the last live node before the gap choose. Here the data node does, for its own
microbatches: it knows their paths, so two choices never contradict each other, and any number of
adjacent stages may be missing. One more message's way is little beside the time that it takes to
find out that a relay is gone.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

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

    def renew(self, path: Path) -> Path:
        """Return the path at a round's begin: with others also where a relay is not ready."""
        at_once = [{m.node_id for m in self._at_once(stage)} for stage in range(len(path) + 1)]
        relays = [
            relay if relay in at_once[stage] else self._least_busy(stage)
            for stage, relay in enumerate(path, start=1)
        ]
        return tuple(relays)

    def _at_once(self, stage: int) -> Sequence[Member]:
        """Return who can begin at once, or all workers if nobody can."""
        workers = self._view.workers[stage]
        return [m for m in workers if m.since_iteration < self._newest] or workers

    def _least_busy(self, stage: int) -> NodeId:
        best = min(self._at_once(stage), key=lambda m: (self._work(m), m.node_id))
        self._loads[best.node_id] += 1
        return best.node_id

    def _work(self, member: Member) -> float:
        return (self._loads[member.node_id] + 1) / member.capacity


def replaced(view: View, paths: Sequence[Path], *, newest: int) -> list[Path]:
    """Return paths of an earlier view with relays that can begin a round in this one at once."""
    others = Substitutes(view, paths, newest=newest)
    return [others.renew(path) for path in paths]
