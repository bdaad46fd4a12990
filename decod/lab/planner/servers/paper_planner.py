"""The paper's heuristic for the servers organisation, step by step.

1. Reliable hosts are clustered top-down. A level is accepted while equation (2), with equation (3)
   for the computation, does not rise.
2. The clusters become stages in the order of a short path through them (an open travelling
   salesman's path by simulated annealing).
3. A server is frontal if it is nearer to the stage before, and backward if it is nearer to the
   stage behind. If a duty has no server, it gets the slowest server of the other.
4. An unreliable host joins the stage whose servers are nearest.
5. Stages get layers by their power to compute.

"Near" is the paper's delay: latency + t / bandwidth, where t is an activation of one microbatch.

Where the paper leaves a choice, or decod differs from it:

- The paper does not say how a level divides. Here, the cluster with the largest diameter divides as
  in DIANA (`clustering.split_top_down`).
- Equation (2) needs neighbours, and the order of the stages comes only later. Here, each level is
  ordered as in step 2. The delays of two stages are those of the mean edge between them, which sums
  both directions. Bandwidths include the hosts' access to the network.
- Equation (3), DT = B |H| / (d p sum(C_s)), divides by the number of clusters p. A stage has 1 / p
  of the layers, but also only about 1 / p of the devices, so its time would stay the same. The sum
  is taken as it is written, over all reliable hosts. DT then falls with p, which serves the
  paper's aim of many stages. If no reliable host computes, the sum is over the unreliable ones.
- The paper has no data nodes. Here, they are neighbours of the first and of the last stage, in
  equation (2), on the path, and in step 3. With two ends in one place, the direction of the path is
  arbitrary.
- The neighbours' duties are not known in step 3, so the delays are means over all their hosts. If
  both sides are as near, the server becomes frontal. The single server of a stage has both duties.
- "The slowest device" of the fix-up is the one with the least power.
- In the paper every device computes. Here, a stage may be without a worker after step 4. It then
  gets the nearest client of a stage that keeps another worker.
- There are no more stages than layers. Servers that can't hold their stage's part pass layers on to
  other stages.

Source: "Reliable/unreliable parameter servers", section 3.3.3, equations (1) to (3).
"""

import itertools
import math
import random
from collections.abc import Sequence

from decod.lab.planner.hosts import HostKind, TrainingProblem
from decod.lab.planner.servers.clustering import mean_between, shortest_path, split_top_down
from decod.lab.planner.servers.layers import layers_by_power
from decod.lab.planner.servers.servers_layout import Draft, DraftStage, ServersLayout, to_layout


def paper_layout(
    problem: TrainingProblem, rng: random.Random, *, num_stages: int | None = None
) -> ServersLayout | None:
    """Return the layout of the paper's heuristic.

    Args:
        problem: Hosts, links and work.
        rng: Source of the annealing's draws.
        num_stages: Accept this level of the clustering, instead of what equation (2) says.

    Returns:
        None if it has none: fewer reliable hosts or layers than stages, or too little memory.
    """
    draft = PaperHeuristic(problem, rng).draft(num_stages)
    return None if draft is None else to_layout(problem, draft)


class PaperHeuristic:
    """The heuristic for one problem. Levels of the clustering are computed once."""

    def __init__(self, problem: TrainingProblem, rng: random.Random) -> None:
        self._problem = problem
        self._rng = rng
        self._data = problem.indexes(HostKind.DATA)
        self._reliable = problem.indexes(HostKind.RELIABLE)
        self._unreliable = problem.indexes(HostKind.UNRELIABLE)
        size, everyone = problem.work.activation_bytes, range(len(problem.hosts))
        self._one_way_s = [[problem.transfer_s(i, j, size) for j in everyone] for i in everyone]
        self._edges = [
            [self._one_way_s[i][j] + self._one_way_s[j][i] for j in everyone] for i in everyone
        ]
        self._levels = self._cluster()

    def draft(self, num_stages: int | None = None) -> Draft | None:
        """Return the layout of a level, by default of the one that equation (2) selects."""
        if num_stages is None:
            ordered = self._select()
        elif num_stages <= len(self._levels):
            ordered = self._order(self._levels[num_stages - 1])
        else:
            return None
        servers = [self._duties(ordered, index) for index in range(len(ordered))]
        clients = self._place_clients(ordered)
        limits = [min(self._limit(server) for server in cluster) for cluster in ordered]
        powers = [
            sum(self._problem.hosts[host].speed_layers_per_s for host in (*cluster, *near))
            for cluster, near in zip(ordered, clients, strict=True)
        ]
        layers = layers_by_power(powers, self._problem.work.num_layers, limits)
        if layers is None:
            return None
        return tuple(
            DraftStage(count, frontal, backward, tuple(sorted(near)))
            for count, (frontal, backward), near in zip(layers, servers, clients, strict=True)
        )

    def _cluster(self) -> list[list[list[int]]]:
        """Return the levels of the clustering, each with the hosts' indexes."""
        chosen = self._reliable
        distances = [[self._edges[i][j] for j in chosen] for i in chosen]
        levels = itertools.islice(split_top_down(distances), self._problem.work.num_layers)
        return [[[chosen[place] for place in cluster] for cluster in level] for level in levels]

    def _select(self) -> list[list[int]]:
        """Return the ordered level before the first at which equation (2) rises."""
        best: list[list[int]] = []
        least_s = math.inf
        for level in self._levels:
            ordered = self._order(level)
            time_s = self._pipeline_s(ordered)
            if best and time_s > least_s:
                break
            best, least_s = ordered, time_s
        return best

    def _pipeline_s(self, ordered: Sequence[Sequence[int]]) -> float:
        """Return equation (2), with equation (3) for the computation."""
        hops = itertools.pairwise([self._data, *ordered, self._data])
        slowest_s = max(mean_between(self._edges, here, there) for here, there in hops)
        hosts, work = self._problem.hosts, self._problem.work
        power = sum(hosts[index].speed_layers_per_s for index in self._reliable)
        power = power or sum(hosts[index].speed_layers_per_s for index in self._unreliable)
        compute_s = work.num_layers / (len(ordered) * power) if power else math.inf
        return work.num_microbatches * (slowest_s + compute_s)

    def _order(self, clusters: Sequence[list[int]]) -> list[list[int]]:
        edges = [
            [0.0 if a is b else mean_between(self._edges, a, b) for b in clusters] for a in clusters
        ]
        ends = [mean_between(self._edges, cluster, self._data) for cluster in clusters]
        return [clusters[place] for place in shortest_path(edges, ends, self._rng)]

    def _duties(
        self, ordered: Sequence[Sequence[int]], index: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the frontal and the backward servers of a stage."""
        cluster = ordered[index]
        if len(cluster) == 1:
            return tuple(cluster), tuple(cluster)
        before = ordered[index - 1] if index else self._data
        behind = ordered[index + 1] if index + 1 < len(ordered) else self._data
        frontal = [
            server
            for server in cluster
            if mean_between(self._edges, [server], before)
            <= mean_between(self._edges, [server], behind)
        ]
        backward = [server for server in cluster if server not in frontal]
        for empty, full in ((frontal, backward), (backward, frontal)):
            if not empty:
                slowest = min(full, key=lambda i: self._problem.hosts[i].speed_layers_per_s)
                full.remove(slowest)
                empty.append(slowest)
        return tuple(frontal), tuple(backward)

    def _place_clients(self, ordered: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the clients of each stage."""
        speed = [host.speed_layers_per_s for host in self._problem.hosts]

        def delay_s(client: int, stage: int) -> float:
            cluster = ordered[stage]
            return sum(self._one_way_s[client][server] for server in cluster) / len(cluster)

        stages = range(len(ordered))
        places = {
            client: min(stages, key=lambda stage: delay_s(client, stage))
            for client in self._unreliable
            if speed[client] > 0
        }

        def num_workers(stage: int) -> int:
            here = sum(place == stage for place in places.values())
            return here + sum(speed[server] > 0 for server in ordered[stage])

        for stage in stages:
            if num_workers(stage):
                continue
            spare = [client for client, place in places.items() if num_workers(place) > 1]
            if spare:
                places[min(spare, key=lambda client: delay_s(client, stage))] = stage
        return [[client for client, place in places.items() if place == stage] for stage in stages]

    def _limit(self, host: int) -> float:
        limit = self._problem.hosts[host].num_layers_max
        return math.inf if limit is None else limit
