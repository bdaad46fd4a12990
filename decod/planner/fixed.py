"""Rigid pipelines, arranged as DT-FM would: each relay serves one pipeline, for good.

A pipeline is a data node and one relay of each stage, and carries as many flows as the smallest of
them has room for. Which relays follow each other is found by a genetic search: parents are
crossed at five points, the child is improved by local search, and takes the place of the worse
parent if it is no worse than that one.

DT-FM's cost of an arrangement is, summed over adjacent stages, that of the slowest link between
them, as all pipelines advance in step. Deviations, most of them because nodes here have a stage:

- DT-FM also chooses which nodes form a stage and in what order stages follow each other (an open
  travelling salesman's path); both are given here. What is left is the matching between adjacent
  stages, and, where stages differ in size, which relays stay idle.
- The cost of averaging within a stage does not depend on the matching, so it is left out.
- Data nodes run the first and the last layers, so links to and from them count too, and a pipeline
  ends where it began. This and unequal capacities tie the matchings of all stages together; DT-FM
  matches two stages at a time. Arrangements with more flows always come before cheaper ones.
- Local search exchanges two relays of a stage as long as that helps, where DT-FM moves nodes
  between stages along cycles.
- Of equally good arrangements the one with the least total cost is taken.

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
"""DT-FM keeps 100, for a search space that also has the choice of stages in it."""
NUM_CROSSOVER_POINTS = 5

Arrangement = list[list[int]]
"""Per stage from 0, the index of its node in each pipeline, then of those that stay idle."""

Score = tuple[int, float, float]
"""Flows that are missing, DT-FM's cost, sum of all flows' costs: less is better, in this order."""


def fixed_routes(graph: FlowGraph, rng: random.Random, *, generations: int = 100) -> list[Route]:
    """Return the routes of the best arrangement that the search finds; each flow of a pipeline.

    Args:
        graph: What there is.
        rng: What the search draws from.
        generations: Children to try. Their time grows with stages x pipelines^3.
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
    """Arrangements of one graph, and what each is worth.

    Stage 0 holds each data node once for each pipeline, since all of them may be its own; what is
    more than the pipelines stays idle, as with relays.
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
        """Return a data node for each pipeline, in turns by what is due to each, then the idle."""
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
        """Return the arrangement with the largest relays of all stages in one pipeline, and so on.

        Where all links exist it has the most flows.
        """
        return [list(range(len(stage))) for stage in self._stages]

    def shuffled(self, rng: random.Random) -> Arrangement:
        """Return a random arrangement."""
        return [rng.sample(range(len(stage)), len(stage)) for stage in self._stages]

    def cross(self, first: Arrangement, second: Arrangement, rng: random.Random) -> Arrangement:
        """Return the second parent with five nodes put where the first one has them."""
        child = [list(order) for order in second]
        for _ in range(NUM_CROSSOVER_POINTS):
            stage_index = rng.randrange(len(child))
            order = child[stage_index]
            place = rng.randrange(len(order))
            other = order.index(first[stage_index][place])
            order[place], order[other] = order[other], order[place]
        return child

    def improve(self, arrangement: Arrangement, rng: random.Random) -> Score:
        """Exchange nodes of a stage wherever that helps, once through all pairs; return the score.

        The arrangement is changed in place.
        """
        best = self.score(arrangement)
        for stage_index in rng.sample(range(len(arrangement)), len(arrangement)):
            stage, order = self._stages[stage_index], arrangement[stage_index]
            for place in range(self.num_pipelines):
                for other in range(place + 1, len(order)):
                    if stage[order[place]] == stage[order[other]]:
                        continue  # A data node with itself.
                    order[place], order[other] = order[other], order[place]
                    score = self.score(arrangement)
                    if score < best:
                        best = score
                    else:
                        order[place], order[other] = order[other], order[place]
        return best

    def score(self, arrangement: Arrangement) -> Score:
        """Return what an arrangement is worth."""
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
        """Return the flows that an arrangement carries."""
        pipelines = self._pipelines(arrangement)
        return [Route(pipe.path) for pipe in pipelines for _ in range(pipe.num_flows)]

    def _pipelines(self, arrangement: Arrangement) -> Sequence[_Pipeline]:
        """Return the pipelines that carry something; a data node fills its own in their order."""
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
