"""How a vector is cut, and how blocks are dealt out."""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.planner.partition import dealt, part_sizes


@pytest.mark.parametrize(
    ("num_elements", "num_parts", "sizes"),
    [(10, 3, [4, 3, 3]), (2, 3, [1, 1, 0]), (0, 2, [0, 0]), (5, 1, [5]), (6, 3, [2, 2, 2])],
)
def test_parts_are_as_equal_as_can_be_longer_first(
    num_elements: int, num_parts: int, sizes: list[int]
) -> None:
    assert part_sizes(num_elements, num_parts) == sizes


@given(st.integers(0, 10**9), st.integers(1, 500))
def test_parts_cover_the_vector_and_differ_by_at_most_one(num: int, num_parts: int) -> None:
    sizes = part_sizes(num, num_parts)
    assert (len(sizes), sum(sizes)) == (num_parts, num)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("num_elements", "num_parts"), [(-1, 2), (3, 0)])
def test_a_cut_that_can_not_be_is_a_bug(num_elements: int, num_parts: int) -> None:
    with pytest.raises(AssertionError):
        part_sizes(num_elements, num_parts)


@given(
    st.integers(0, 8),
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 12)), min_size=1, max_size=4),
)
def test_blocks_are_dealt_as_the_best_of_all_cuts(num: int, hosts: list[tuple[float, int]]) -> None:
    """Each stage has a speed, and room for so many blocks."""
    num += len(hosts)

    def after(index: int, size: int) -> float:
        speed, room = hosts[index]
        return size / speed if size <= room else math.inf

    def slowest(sizes: Sequence[int]) -> float:
        return max(after(index, size) for index, size in enumerate(sizes))

    cuts = [
        sizes
        for sizes in itertools.product(range(1, num + 1), repeat=len(hosts))
        if sum(sizes) == num
    ]
    best = min(map(slowest, cuts))
    found = dealt(num, len(hosts), after)
    if best == math.inf:
        assert found == ()
    else:
        assert sum(found) == num
        assert slowest(found) == best
