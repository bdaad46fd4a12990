"""Negative cycles in assignment problems, against all permutations."""

from itertools import pairwise, permutations
from random import Random

import pytest

from decod.planner.settlement import negative_cycle


def weights_of(rng: Random, num: int) -> list[list[float]]:
    costs = [[rng.uniform(0, 10) for _ in range(num)] for _ in range(num)]
    return [[cost - row[i] for cost in row] for i, row in enumerate(costs)]


@pytest.mark.parametrize("seed", range(50))
def test_a_cycle_is_found_just_where_an_assignment_is_better(seed: int) -> None:
    rng = Random(seed)
    num = rng.randint(1, 6)
    weights = weights_of(rng, num)
    least = min(
        sum(weights[i][j] for i, j in enumerate(order)) for order in permutations(range(num))
    )
    cycle = negative_cycle(weights, slack=1e-9)
    if not cycle:
        assert least >= -1e-6
        return
    assert len(set(cycle)) == len(cycle)
    assert sum(weights[i][j] for i, j in pairwise([*cycle, cycle[0]])) < 0


def test_differences_within_the_slack_are_no_improvement() -> None:
    assert negative_cycle([[0.0, -1e-12], [0.0, 0.0]], slack=1e-9) == []


def test_three_pass_their_things_round() -> None:
    dear = 9.0
    weights = [[0.0, -1.0, dear], [dear, 0.0, -1.0], [-1.0, dear, 0.0]]
    cycle = negative_cycle(weights, slack=1e-9)
    assert cycle[cycle.index(0) :] + cycle[: cycle.index(0)] == [0, 1, 2]
