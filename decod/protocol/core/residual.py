"""Walks through the residual network: how one unit of flow could be led otherwise, and what for.

The residual network of a routing has, for each node, an entrance and an exit. From an exit one may
go *forth* along a link (a unit more takes it, for its cost) to the next node's entrance; from an
entrance *back* along a link that carries a unit (which then no longer takes it, and its cost is
saved) to the exit of the node before; from a node's own entrance to its exit if it has room for
another unit, and from exit to entrance if it lets one go. A closed walk whose costs add up to less
than nothing is a change of the routing that makes it cheaper by just that; where there is none,
the routing is the cheapest there is (Klein, 1967). GWTF's Request Change (two nodes of a stage
exchange next hops) is the closed walk of four links, its Request Redirect one of four links that
leads through a node with room; longer ones are what its local search cannot see. A walk from where
a unit is stuck (unpaired inflow), or could begin, to where one is missing (unpaired outflow), or
could end, makes the flow larger: the same search finds it, with a reward at its begin.

Nodes find such walks as path-vector routing finds routes: each tells its neighbours the cheapest
walk that it knows to end at itself, with the nodes on it, and they prolong it.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

from decod.ids import NodeId
from decod.limits import (
    MEMBERS_MAX,
    AtLeast,
    AtMost,
    Each,
    Finite,
    SomeFlows,
    Unique,
    malformed,
    within,
)

ENTRANCE = False
EXIT = True

Place = tuple[NodeId, bool]
"""A node's entrance or exit."""

MAX_STEPS = 128
"""Longest walk, in places: bounds what one message can hold."""

LINK_COST_MAX = 1e9
"""A link that costs more, or is broken, counts as one that costs this. Bounds what is told of it,
and keeps powers of it finite."""

STEP_COST_MAX = 1e111
"""More than any step of a walk costs: (65536 * 1e9) ** 8 for the dearest link under
`Objective.MAX`. The reward of a further flow must be below it too."""

LinkCostValue = Annotated[float, within(0, LINK_COST_MAX, cut=True)]
"""A node cuts its own costs: they may be infinite, or include a peer's."""


class LinkCost(NamedTuple):
    """What the link to one node costs."""

    node_id: NodeId
    """At its end."""
    cost: LinkCostValue


LinkCosts = Annotated[
    tuple[tuple[NodeId, float], ...], Each(LinkCost), AtMost(MEMBERS_MAX), Unique("node_id")
]


class WalkPlace(NamedTuple):
    """The entrance or exit of a node in the residual network."""

    node_id: NodeId
    """The node."""
    exit: bool
    """True: its exit; else its entrance."""


class WalkStep(NamedTuple):
    """A place on a walk, and what it costs to get there."""

    node_id: NodeId
    """The node."""
    exit: bool
    """As in `WalkPlace`."""
    cost: Finite
    """From the walk's begin to here; at its begin 0, or less by a reward."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The cheapest way through the residual network, as far as known, that ends at its sender."""

    places: tuple[Place, ...]
    """Where it leads, its end last. Each place at most once."""
    costs: tuple[float, ...]
    """Cost from the walk's begin to each place. The first is 0, or less by a reward if a unit
    waits there to be led on."""
    units: int
    """How many units could take it; at least 1."""

    @property
    def cost(self) -> float:
        """From its begin to its end."""
        return self.costs[-1]

    def to(self, place: Place, cost: float, units: int) -> "Walk":
        """Return the walk prolonged by one step."""
        return Walk(
            (*self.places, place), (*self.costs, self.costs[-1] + cost), min(self.units, units)
        )


@dataclass(frozen=True, slots=True)
class WalkSteps:
    """A way through the residual network, as it travels: each place with its cost."""

    steps: Annotated[tuple[WalkStep, ...], AtLeast(1), AtMost(MAX_STEPS), Unique("node_id", "exit")]
    """In order. From one step to the next the cost changes by at most 1e111 up or down."""
    units: SomeFlows
    """How many units could take it."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if costs change by more than a step may cost."""
        first = self.steps[0].cost
        if not -STEP_COST_MAX <= first <= 0:
            raise malformed("cost", first, allowed=f"from {-STEP_COST_MAX} to 0 at a walk's begin")
        for before, after in pairwise(self.steps):
            if not abs(after.cost - before.cost) <= STEP_COST_MAX:
                allowed = f"at most {STEP_COST_MAX} from the one before"
                raise malformed("cost", after.cost, allowed=allowed)

    @staticmethod
    def of(walk: Walk) -> "WalkSteps":
        """Return a walk as it travels."""
        if len(walk.places) != len(walk.costs):
            raise malformed("costs", len(walk.costs), allowed="one for each place")
        pairs = zip(walk.places, walk.costs, strict=True)
        return WalkSteps(tuple(WalkStep(*place, cost) for place, cost in pairs), walk.units)

    def told(self) -> Walk:
        """Return the walk."""
        places: tuple[Place, ...] = tuple((step.node_id, step.exit) for step in self.steps)
        return Walk(places, tuple(step.cost for step in self.steps), self.units)


def empty_walk(place: Place, *, units: int, cost: float = 0.0) -> Walk:
    """Return the walk that begins and ends at `place`."""
    return Walk((place,), (cost,), units)


@dataclass(frozen=True, slots=True)
class Improvement:
    """A walk worth leading units along."""

    places: tuple[Place, ...]
    cost: float
    """Of one unit. Below 0 for an improvement."""
    units: int
    closed: bool
    """From its last place it goes on to its first. Else it leads from where units are stuck, or
    could begin, to where they are missing, or could end."""


def closed(walk: Walk, place: Place, cost: float, units: int) -> Improvement:
    """Return the cycle that a step to `place`, which is on the walk, would close."""
    begin = walk.places.index(place)
    total = walk.cost + cost - walk.costs[begin]
    return Improvement(walk.places[begin:], total, min(walk.units, units), closed=True)


def last_part(detour: Improvement, num_places: int) -> Improvement:
    """Return the last part of an open detour, of at most `num_places`, or the least there can be.

    It begins where a unit comes in no more, or where one more goes on: there one is missing then.
    """
    places = detour.places
    shortened = range(len(places) - num_places, len(places) - 1) if len(places) > num_places else ()
    for begin in shortened:
        (before, _), (here, side), (behind, _) = places[begin - 1 : begin + 2]
        if here != behind and (side == ENTRANCE or before == here):
            return Improvement(places[begin:], detour.cost, detour.units, closed=False)
    return detour


@dataclass(frozen=True, slots=True)
class Change:
    """What a detour changes at one node, for each unit."""

    outward: dict[NodeId, int]
    """+1 or -1 for each link from this node, by its end."""
    inward: dict[NodeId, int]
    """+1 or -1 for each link to this node, by its begin."""

    @property
    def net_out(self) -> int:
        return sum(self.outward.values())

    @property
    def net_in(self) -> int:
        return sum(self.inward.values())


def change_at(node_id: NodeId, places: tuple[Place, ...], *, is_closed: bool) -> Change:
    """Return what one unit along a detour changes at a node."""
    outward: dict[NodeId, int] = {}
    inward: dict[NodeId, int] = {}
    following = (*places[1:], places[0]) if is_closed else places[1:]
    for (begin, begin_side), (end, end_side) in zip(places, following, strict=False):
        if begin == end or begin_side == end_side:
            continue  # Through a node, or from one data node to another: no link is used.
        if begin_side == EXIT and begin == node_id:
            outward[end] = outward.get(end, 0) + 1
        elif begin_side == EXIT and end == node_id:
            inward[begin] = inward.get(begin, 0) + 1
        elif begin_side == ENTRANCE and end == node_id:
            outward[begin] = outward.get(begin, 0) - 1
        elif begin_side == ENTRANCE and begin == node_id:
            inward[end] = inward.get(end, 0) - 1
    return Change(outward, inward)
