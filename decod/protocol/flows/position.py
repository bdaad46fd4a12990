"""A node's place in the flow graph, as far as the routing needs to know it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from decod.ids import NodeId
from decod.planner.graph import Objective
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.messages.routing_messages import Hop
from decod.protocol.core.residual import LINK_COST_MAX as LINK_COST_MAX

_EXPONENT = 8
"""A sum of 8th powers is governed by its largest terms: the smooth stand-in for the maximum."""

_ROUNDABOUT = 2
"""Places that a near walk may have beyond a straight one."""


@dataclass(frozen=True, slots=True)
class Position:
    """One node's neighbours and what it may carry."""

    node_id: NodeId
    out: EffectSink[Effect]
    """Where the node's search says what it wants done."""
    data: bool
    """A data node: flows begin and end here."""
    capacity: int
    num_stages: int
    """Relay stages that a flow passes."""
    previous: Sequence[NodeId]
    """Who may send the node microbatches."""
    next: Sequence[NodeId]
    """Whom the node may send microbatches to."""
    data_peers: Sequence[NodeId]
    """At a data node: the others."""
    cost_to: Callable[[NodeId], float]
    """d(i, j) of the link to a neighbour of the next stage."""
    cost_from: Callable[[NodeId], float]
    """d(i, j) of the link from a neighbour of the previous stage."""
    share: int | None = None
    """How many units a relay takes while the draft is built; None: as many as it can hold."""
    queue_cost: Callable[[], float] = lambda: 0.0
    """What each unit that a relay has already adds to the cost of one more. A device works on one
    microbatch at a time, so the others wait; GWTF's objective (2) knows only what a link costs, and
    with room for all would send all through the one best relay."""
    fair: bool = False
    """Data nodes get flows in proportion to their capacities, whoever is nearest: each has its own
    share of a batch to train. Else whoever gets them cheapest."""
    work_max: float = math.inf
    """What settling may take, in `planner.settlement`'s measure."""
    rooms: Callable[[], Sequence[Mapping[NodeId, int]]] | None = None
    """At the data node that settles: for each relay stage who works on it, and how many flows each
    may carry. With it flows are settled so that an iteration is short (`planner.deciding`), and
    costs are seconds; without it so that their costs are least."""
    heard: Callable[[Iterable[Hop]], None] = lambda _: None
    """At a data node: takes in what its claims have gathered; at the settling one, all claims."""
    objective: Objective = Objective.SUM
    stage_peers: Sequence[NodeId] = ()
    """At a relay: the others of its stage."""
    reward: float = 1e6
    """What one more flow is worth; above the cost of any path, in the same unit."""

    @property
    def near_places(self) -> int:
        """Longest walk to where a unit is missing that counts as near: straight, or nearly so.

        Longer ones may well have been made up by nodes that still believe each other when there is
        nothing to be had any more, as in any path-vector protocol.
        """
        return 2 * (self.num_stages + 1) + _ROUNDABOUT

    def complete_path(self, hops: Sequence[Hop]) -> bool:
        """Whether the hops are one for each stage, each linked to the one before."""
        if len(hops) != self.num_stages:
            return False
        linked = all(any(p == b.node_id for p, _ in a.costs) for a, b in pairwise(hops))
        return linked and len({hop.node_id for hop in hops}) == len(hops)

    @property
    def crowding(self) -> int:
        """The power to which the objective raises a link's load and cost."""
        return 1 if self.objective is Objective.SUM else _EXPONENT

    def unit_cost(self, neighbour: NodeId, nth: int, *, outward: bool) -> float:
        """Return what the `nth` unit on a link adds to the objective, counted from 1.

        With the objective MAX a link's cost grows with what it carries, as (f * d) ** 8. Deviation
        from GWTF, which says that each node lowers the maximum that it sees: sums of powers add up
        along a path, so the same search serves both objectives.
        """
        measured = self.cost_to(neighbour) if outward else self.cost_from(neighbour)
        cost = min(measured, LINK_COST_MAX)
        if self.objective is Objective.SUM:
            return cost
        return (cost * nth) ** _EXPONENT - (cost * (nth - 1)) ** _EXPONENT
