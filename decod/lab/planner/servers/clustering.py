"""Clusters of hosts that are near to each other, and a short path through them."""

import math
import random
from collections.abc import Iterator, Sequence

Matrix = Sequence[Sequence[float]]
"""Symmetric distances, as rows."""

Clusters = list[list[int]]

_STEPS_PER_STOP = 150
"""Number of random changes per stop of a path. More don't shorten the path of 30 stops further."""
_COOLING = 1e-3
"""Last temperature of the annealing, relative to the first."""


def split_top_down(distances: Matrix) -> Iterator[Clusters]:
    """Yield the levels of a divisive hierarchical clustering: one cluster, then two, and so on.

    Each level divides the cluster with the largest diameter. The member with the largest mean
    distance to the others begins a splinter. Members follow it as long as they are nearer to the
    splinter than to the rest, the one with the most to gain first. Every level is a new list.

    Source: DIANA (Kaufman and Rousseeuw, "Finding groups in data", chapter 6).
    """
    clusters: Clusters = [list(range(len(distances)))]
    while True:
        yield [list(cluster) for cluster in clusters]
        large = [cluster for cluster in clusters if len(cluster) > 1]
        if not large:
            return
        widest = max(large, key=lambda cluster: _diameter(distances, cluster))
        rest, splinter = _divide(distances, widest)
        clusters[clusters.index(widest)] = rest
        clusters.append(splinter)


def _diameter(distances: Matrix, cluster: Sequence[int]) -> float:
    return max(distances[i][j] for i in cluster for j in cluster)


def _divide(distances: Matrix, cluster: Sequence[int]) -> tuple[list[int], list[int]]:
    def mean(i: int, others: Sequence[int]) -> float:
        counted = [distances[i][j] for j in others if j != i]
        return sum(counted) / len(counted) if counted else 0.0

    rest = list(cluster)
    first = max(rest, key=lambda i: mean(i, rest))
    rest.remove(first)
    splinter = [first]
    while len(rest) > 1:
        gains = [(mean(i, rest) - mean(i, splinter), i) for i in rest]
        gain, follower = max(gains)
        if gain <= 0:
            break
        rest.remove(follower)
        splinter.append(follower)
    return sorted(rest), sorted(splinter)


def mean_between(distances: Matrix, first: Sequence[int], second: Sequence[int]) -> float:
    """Return the mean distance between the members of two clusters."""
    total = sum(sum(map(distances[i].__getitem__, second)) for i in first)
    return total / (len(first) * len(second))


def shortest_path(edges: Matrix, ends: Sequence[float], rng: random.Random) -> list[int]:
    """Return an order of all stops with a small sum of edges, by simulated annealing.

    A change reverses a part of the path. It is kept if the path is shorter, or by chance, which
    falls with the temperature.

    Args:
        edges: (stops, stops). Symmetric.
        ends: The cost of a stop at either end of the path.
        rng: Source of the draws.
    """
    num = len(edges)
    path = list(range(num))
    if num < 2:
        return path

    def step(a: int, b: int) -> float:
        """Return the edge between two positions. Those outside the path are its ends."""
        if a < 0 or b >= num:
            return ends[path[b] if a < 0 else path[a]]
        return edges[path[a]][path[b]]

    length = sum(step(i, i + 1) for i in range(-1, num))
    best, least = list(path), length
    finite = [cost for row in edges for cost in row if 0 < cost < math.inf]
    warmth = sum(finite) / len(finite) if finite else 1.0
    num_steps = _STEPS_PER_STOP * num
    factor = _COOLING ** (1 / num_steps)
    for _ in range(num_steps):
        warmth *= factor
        i, j = sorted(rng.sample(range(num), 2))
        before = step(i - 1, i) + step(j, j + 1)
        path[i : j + 1] = path[i : j + 1][::-1]
        change = step(i - 1, i) + step(j, j + 1) - before
        if change <= 0 or rng.random() < math.exp(-change / warmth):
            length += change
            if length < least:
                best, least = list(path), length
        else:
            path[i : j + 1] = path[i : j + 1][::-1]
    return best
