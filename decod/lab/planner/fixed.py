"""Rigid pipelines, arranged as DT-FM would: each relay serves one pipeline, for good.

A pipeline is a data node and one relay of each stage. It carries as many flows as fit into the
smallest of them. A genetic search finds the relays of each pipeline. It crosses two parents at five
points and improves the child by local search. The child replaces the worse parent if it is no
worse.

In DT-FM, the cost of two adjacent stages is that of the slowest link between them, because all
pipelines advance in step. The cost of an arrangement is the sum of these. Deviations, most of them
because nodes here have a stage:

- DT-FM also chooses the nodes of each stage and the order of the stages (an open travelling
  salesman's path). Both are given here. Only the matching between adjacent stages is left, and the
  choice of idle relays if stages differ in size.
- The cost of averaging within a stage is left out, because it does not depend on the matching.
- Data nodes run the first and the last layers. Links to and from them count too, and a pipeline
  ends where it began. This and unequal capacities tie the matchings of all stages together; DT-FM
  matches two stages at a time. An arrangement with more flows always beats a cheaper one.
- Local search exchanges two relays of a stage as long as that helps. DT-FM moves nodes between
  stages along cycles.
- Of equally good arrangements, the one with the least total cost wins.

Source: Yuan et al., "Decentralized training of foundation models in heterogeneous environments"
(arXiv:2206.01288), section 3, and the scheduler in its public code; GWTF, table VI.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from decod.ids import NodeId
from decod.planner.graph import FlowGraph, Route

POPULATION_SIZE = 16
"""DT-FM keeps 100, for a search space that also contains the choice of stages."""
NUM_CROSSOVER_POINTS = 5

Arrangement = list[list[int]]
"""Per stage from 0, the index of its node in each pipeline, then the indexes of its idle nodes."""

Score = tuple[int, float, float]
"""Missing flows, DT-FM's cost, and sum of all flows' costs. Less is better, in this order."""


def fixed_routes(graph: FlowGraph, rng: random.Random, *, generations: int = 100) -> list[Route]:
    """Return the routes of the best arrangement found: one per flow of each pipeline.

    Args:
        graph: The nodes and links.
        rng: Source of the search's draws.
        generations: Number of children to try. Their time grows with stages x pipelines^3.
    """
    search = _Search(graph)
    if not search.num_pipelines:
        return []
    population = [search.aligned()]
    population += [search.shuffled(rng) for _ in range(POPULATION_SIZE - 1)]
    scored = [(search.score(arrangement), arrangement) for arrangement in population]
    for _ in range(generations):
        first, second = rng.sample(range(POPULATION_SIZE), 2)
        child = search.cross(scored[first][1], scored[second][1], rng)
        score = search.improve(child, rng)
        worse = max(first, second, key=lambda index: scored[index][0])
        if score <= scored[worse][0]:
            scored[worse] = (score, child)
    best = min(scored, key=lambda item: item[0])[1]
    score = search.improve(best, rng)
    while (improved := search.improve(best, rng)) < score:
        score = improved
    return search.routes(best)


@dataclass(frozen=True, slots=True)
class _Pipeline:
    path: tuple[NodeId, ...]
    num_flows: int


class _Search:
    """Arrangements of one graph, and their scores.

    Stage 0 holds each data node once per pipeline, because all pipelines may be its own. Entries
    beyond the number of pipelines are idle, as with relays.
    """

    def __init__(self, graph: FlowGraph) -> None:
        self._graph = graph
        self._stages: list[list[NodeId]] = []
        for stage_index in range(1, graph.num_stages + 1):
            able = [node for node in graph.stage(stage_index) if node.capacity]
            able.sort(key=lambda node: (-node.capacity, node.node_id))
            self._stages.append([node.node_id for node in able])
        self._homes = {node.node_id: node.capacity for node in graph.stage(0) if node.capacity}
        self.num_pipelines = min(map(len, self._stages)) if self._homes else 0
        self._wanted = sum(self._homes.values())
        self._stages.insert(0, self._share_homes())

    def _share_homes(self) -> list[NodeId]:
        """Return a data node for each pipeline, in turns by what each is due, then idle ones."""
        due = {node_id: float(capacity) for node_id, capacity in self._homes.items()}
        step = self._wanted / max(1, self.num_pipelines)
        shared = []
        for _ in range(self.num_pipelines):
            home = max(due, key=lambda node_id: (due[node_id], node_id))
            due[home] -= step
            shared.append(home)
        for home in self._homes:
            shared += [home] * (self.num_pipelines - shared.count(home))
        return shared

    def aligned(self) -> Arrangement:
        """Return the arrangement with the largest relay of each stage in one pipeline, and so on.

        If all links exist, it has the most flows.
        """
        return [list(range(len(stage))) for stage in self._stages]

    def shuffled(self, rng: random.Random) -> Arrangement:
        """Return a random arrangement."""
        return [rng.sample(range(len(stage)), len(stage)) for stage in self._stages]

    def cross(self, first: Arrangement, second: Arrangement, rng: random.Random) -> Arrangement:
        """Return the second parent, with five nodes moved to their places in the first parent."""
        child = [list(order) for order in second]
        for _ in range(NUM_CROSSOVER_POINTS):
            stage_index = rng.randrange(len(child))
            order = child[stage_index]
            place = rng.randrange(len(order))
            other = order.index(first[stage_index][place])
            order[place], order[other] = order[other], order[place]
        return child

    def improve(self, arrangement: Arrangement, rng: random.Random) -> Score:
        """Exchange nodes of a stage wherever that helps, once through all pairs. Return the score.

        Changes the arrangement in place.
        """
        best = self.score(arrangement)
        for stage_index in rng.sample(range(len(arrangement)), len(arrangement)):
            stage, order = self._stages[stage_index], arrangement[stage_index]
            for place in range(self.num_pipelines):
                for other in range(place + 1, len(order)):
                    if stage[order[place]] == stage[order[other]]:
                        continue  # Both places hold the same data node.
                    order[place], order[other] = order[other], order[place]
                    score = self.score(arrangement)
                    if score < best:
                        best = score
                    else:
                        order[place], order[other] = order[other], order[place]
        return best

    def score(self, arrangement: Arrangement) -> Score:
        """Return the score of an arrangement."""
        pipelines = self._pipelines(arrangement)
        costs = self._graph.costs
        slowest = [0.0] * (self._graph.num_stages + 1)
        total = 0.0
        missing = self._wanted
        for pipeline in pipelines:
            hops = itertools.pairwise(pipeline.path)
            for index, hop in enumerate(hops):
                cost = costs[hop]
                slowest[index] = max(slowest[index], cost)
                total += cost * pipeline.num_flows
            missing -= pipeline.num_flows
        return missing, sum(slowest), total

    def routes(self, arrangement: Arrangement) -> list[Route]:
        """Return the flows of an arrangement."""
        pipelines = self._pipelines(arrangement)
        return [Route(pipe.path) for pipe in pipelines for _ in range(pipe.num_flows)]

    def _pipelines(self, arrangement: Arrangement) -> Sequence[_Pipeline]:
        """Return the pipelines that carry flows. A data node fills its own in order."""
        left = dict(self._homes)
        nodes, costs = self._graph.nodes, self._graph.costs
        found = []
        for place in range(self.num_pipelines):
            relays = [
                stage[order[place]] for stage, order in zip(self._stages, arrangement, strict=True)
            ]
            path = (*relays, relays[0])
            home = relays[0]
            num_flows = min(left[home], *(nodes[relay].capacity for relay in relays[1:]))
            hops = itertools.pairwise(path)
            if num_flows and all(hop in costs for hop in hops):
                left[home] -= num_flows
                found.append(_Pipeline(path, num_flows))
        return found
