"""Which stage a new node should serve: the fullest stage gets the largest candidate."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from decod.ids import NodeId


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Flows through a relay stage and what it could carry."""

    stage_index: int
    num_flows: int
    capacity: int
    num_missing: int = 0
    """Nodes that the stage lacks before the run can begin."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A node that waits for a stage."""

    node_id: NodeId
    capacity: int


def assign_stages(candidates: Sequence[Applicant], loads: Sequence[StageLoad]) -> dict[NodeId, int]:
    """Return a stage for every candidate: largest capacity first, to the most utilised stage.

    A stage's utilisation is flows / capacity; stages that lack nodes come before all others, then
    those without capacity, and equally utilised stages are ordered by capacity, smallest first.

    Source: GWTF, section V-B. Deviation: a stage is ranked anew after each placement, with the
    capacity that it just got, where the paper gives one node to each stage in the order of one
    ranking. The two agree unless there are more candidates than stages or a stage starts empty.
    """
    ranking = [(_rank(load), load) for load in loads]
    heapq.heapify(ranking)
    placed: dict[NodeId, int] = {}
    for candidate in sorted(candidates, key=lambda c: (-c.capacity, c.node_id)):
        _, load = heapq.heappop(ranking)
        placed[candidate.node_id] = load.stage_index
        grown = StageLoad(
            load.stage_index,
            load.num_flows,
            load.capacity + candidate.capacity,
            max(0, load.num_missing - 1),
        )
        heapq.heappush(ranking, (_rank(grown), grown))
    return placed


def _rank(load: StageLoad) -> tuple[bool, float, int, int]:
    """Return a key that sorts the stage most in need first, and never ties."""
    utilisation = load.num_flows / load.capacity if load.capacity else float("inf")
    return (load.num_missing == 0, -utilisation, load.capacity, load.stage_index)
