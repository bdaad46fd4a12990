"""Better assignments: a negative cycle shows the exchanges that save cost.

Every node holds one thing. `weights[i][j]` is the extra cost if node i held j's thing instead of
its own. If passing things round a ring lowers the total cost, that ring is a cycle of negative
weight. If there is no negative cycle, the assignment is the cheapest (Klein, 1967).
"""

from collections.abc import Sequence


def negative_cycle(weights: Sequence[Sequence[float]], *, slack: float) -> list[int]:
    """Return a cycle whose weights add up to less than 0, or an empty list.

    Each member of the cycle takes the next one's thing, and the last takes the first one's. The
    method is Bellman and Ford's relaxation from all nodes at once, in at most cubic time.

    Args:
        weights: Square, with zeros on the diagonal.
        slack: Tolerance for rounding: weights that differ by less count as equal.
    """
    num = len(weights)
    assert all(len(row) == num and not row[i] for i, row in enumerate(weights)), "as documented"
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
            assert len(set(cycle)) == len(cycle) > 1, "a ring passes each node once"
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
