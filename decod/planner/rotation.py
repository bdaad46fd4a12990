"""Better assignments: who should give what to whom, found as a negative cycle.

Everybody holds one thing. `weights[i][j]` says what it would cost more than now if i held what j
holds. Where things can be passed round a ring so that it costs less in all, that ring is a cycle of
negative weight; where there is none, the assignment is the cheapest there is (Klein, 1967).
"""

from collections.abc import Sequence


def negative_cycle(weights: Sequence[Sequence[float]], *, slack: float) -> list[int]:
    """Return a cycle whose weights add up to less than nothing, or an empty list.

    Each on it takes what the next one holds, the last what the first holds. Found by Bellman and
    Ford's relaxation from everywhere at once, in time of the number's cube at most.

    Args:
        weights: Square, with zeros on the diagonal.
        slack: Weights that differ by less count as equal: what rounding may bring about.
    """
    num = len(weights)
    distances = [0.0] * num
    parents = [-1] * num
    for _ in range(num + 1):
        relaxed = False
        for i, row in enumerate(weights):
            distance = distances[i]
            for j, weight in enumerate(row):
                if distance + weight < distances[j] - slack:
                    distances[j] = distance + weight
                    parents[j] = i
                    relaxed = True
        if not relaxed:
            return []
        if cycle := _cycle(parents):
            return cycle
    return []


def _cycle(parents: Sequence[int]) -> list[int]:
    """Return a cycle of parents, first parents first, or an empty list."""
    visits = [-1] * len(parents)
    for start in range(len(parents)):
        here = start
        while here >= 0 and visits[here] < 0:
            visits[here] = start
            here = parents[here]
        if here >= 0 and visits[here] == start:
            cycle = [here]
            while (parent := parents[cycle[-1]]) != here:
                cycle.append(parent)
            return cycle[::-1]
    return []
