"""Who takes a lost relay's place, for each microbatch that went through it (GWTF V-D).

GWTF has the last live node before the gap choose. Here the data node does, for its own
microbatches: it knows their paths, so two choices never contradict each other, and any number of
adjacent stages may be missing. One more message's way is little beside the time that it takes to
find out that a relay is gone.

Who would be done first is chosen, as far as the links between relays are known (`RemoteLinks`);
else who has least to do.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from decod.ids import NodeId
from decod.planner.graph import Link
from decod.protocol.core.context import Context
from decod.protocol.core.view import Member

Path = tuple[NodeId, ...]


class Substitutes:
    """Chooses relays of a view for those that are not in it, for all paths of a data node.

    Args:
        context: The data node's. Its view is without the lost relays.
        paths: All that this data node's microbatches take, with and without lost relays.
        newest: Members admitted after this iteration may not hold their stage's parameters yet.
    """

    def __init__(self, context: Context, paths: Iterable[Path], *, newest: int) -> None:
        self._context = context
        self._view = context.view
        self._newest = newest
        self._loads: Counter[NodeId] = Counter()
        self._uses: Counter[Link] = Counter()
        for path in paths:
            self._loads.update(path)
            self._uses.update(self._hops(path))

    def mend(self, path: Path) -> Path:
        """Return the path with another relay wherever one is lost. Every stage has a worker."""
        return self._chosen(path, lambda relay, _: relay in self._view)

    def renew(self, path: Path) -> Path:
        """Return the path at an iteration's begin: with others also where a relay is not ready."""
        at_once = [{m.node_id for m in self._at_once(stage)} for stage in range(len(path) + 1)]
        return self._chosen(path, lambda relay, stage: relay in at_once[stage])

    def _chosen(self, path: Path, keeps: Callable[[NodeId, int], bool]) -> Path:
        """Return the path with another relay wherever one can't be kept."""
        home = self._context.node_id
        relays = [*path]
        for stage, relay in enumerate(path, start=1):
            if keeps(relay, stage):
                continue
            before = relays[stage - 2] if stage > 1 else home
            behind = path[stage] if stage < len(path) else home
            relays[stage - 1] = self._best(stage, before, behind)
        changed = tuple(relays)
        if changed != path:
            self._uses.update(self._hops(changed))
        return changed

    def _hops(self, path: Path) -> Iterable[Link]:
        return pairwise((self._context.node_id, *path, self._context.node_id))

    def _at_once(self, stage: int) -> Sequence[Member]:
        """Return who can begin at once, or all workers if nobody can."""
        workers = self._view.workers[stage]
        return [m for m in workers if m.since_iteration < self._newest] or workers

    def _best(self, stage: int, before: NodeId, behind: NodeId) -> NodeId:
        """Return who of a stage would be done first between two nodes, of which one may be lost."""
        able = self._at_once(stage)
        delays_s = {m.node_id: self._delay_s(before, m.node_id, behind) for m in able}
        known_s = [delay_s for delay_s in delays_s.values() if delay_s is not None]
        usual_s = max(known_s, default=0.0)

        def order(member: Member) -> tuple[float, float, NodeId]:
            delay_s = delays_s[member.node_id]
            pipeline = (self._loads[member.node_id] + 1) / member.capacity
            return usual_s if delay_s is None else delay_s, pipeline, member.node_id

        best = min(able, key=order).node_id
        self._loads[best] += 1
        return best

    def _delay_s(self, before: NodeId, relay: NodeId, behind: NodeId) -> float | None:
        """Return how long a microbatch takes by way of a relay; None if its links are unknown.

        Others of this data node's use the same links and device before it.
        """
        hops = [(before, relay), (relay, behind)]
        ends = (before, behind)
        costs_s = [
            (self._context.distance_s(*hop), self._uses[hop])
            for hop, end in zip(hops, ends, strict=True)
            if end in self._view
        ]
        known_s = [cost_s * (1 + uses) for cost_s, uses in costs_s if cost_s is not None]
        if not known_s or len(known_s) < len(costs_s):
            return None
        pass_s = self._context.links.remote.compute_s(relay) or 0.0
        return sum(known_s) + 2 * pass_s * self._loads[relay]


def replaced(context: Context, paths: Sequence[Path], *, newest: int) -> list[Path]:
    """Return paths of an earlier view with relays that can begin an iteration in this one at
    once.
    """
    others = Substitutes(context, paths, newest=newest)
    return [others.renew(path) for path in paths]
