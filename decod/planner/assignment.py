"""Assignment of new nodes to stages: the fullest stage gets the largest candidate."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from decod.ids import NodeId


@dataclass(frozen=True, slots=True)
class StageLoad:
    """A relay stage's flows and capacity."""

    stage_index: int
    num_flows: int
    capacity: int
    num_missing: int = 0
    """Number of nodes that the stage still needs before the run can begin."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A node that waits for a stage."""

    node_id: NodeId
    capacity: int


def assign_stages(candidates: Sequence[Applicant], loads: Sequence[StageLoad]) -> dict[NodeId, int]:
    """Return a stage for every candidate: largest capacity first, to the most utilised stage.

    A stage's utilisation is its flows over its capacity. Stages that still need nodes come first,
    then stages without capacity. Among equally utilised stages the smallest capacity comes first.

    Source: GWTF, section V-B. Deviation: each placement changes the stage's capacity and its rank.
    The paper ranks the stages once and gives one node to each in that order. The two agree unless
    there are more candidates than stages, or a stage starts empty.
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
    assert len(placed) == len(candidates), "every candidate has a stage"
    return placed


def _rank(load: StageLoad) -> tuple[bool, float, int, int]:
    """Return a key that sorts the stage most in need first, and never ties."""
    utilisation = load.num_flows / load.capacity if load.capacity else float("inf")
    return (load.num_missing == 0, -utilisation, load.capacity, load.stage_index)
