"""Fragments cover all parameters once, and travel as the method says."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.compression.plan import CompressionConfig, CompressionError, Method, StagePlans

SHAPES = [(8, 16), (16,), (16, 16), (4, 16), (16,), (32, 16)]
shapes = st.lists(
    st.lists(st.integers(1, 20), min_size=1, max_size=2).map(tuple), min_size=1, max_size=12
)


@given(shapes, st.integers(1, 12))
def test_fragments_cover_all_parameters_once(of_stage: list[tuple[int, ...]], num: int) -> None:
    num = min(num, len(of_stage))
    whole, *fragments = StagePlans(of_stage, num).fragments
    assert [each.index for each in fragments] == list(range(1, num + 1))
    assert whole.here == slice(0, sum(map(math.prod, of_stage)))
    assert [shape for each in fragments for shape in each.shapes] == of_stage
    ends = [0, *(each.here.stop for each in fragments)]
    assert [each.here.start for each in fragments] == ends[:-1]
    assert ends[-1] == whole.here.stop
    assert all(each.num_elements == each.here.stop - each.here.start > 0 for each in fragments)


def test_fragments_are_as_even_as_whole_parameters_allow() -> None:
    fragments = StagePlans([(10, 10)] * 9, 3).fragments[1:]
    assert [each.num_elements for each in fragments] == [300, 300, 300]


def test_more_fragments_than_parameters_are_refused() -> None:
    with pytest.raises(CompressionError, match="fragments are 7, but the stage has 6"):
        StagePlans(SHAPES, 7)


def test_a_fragment_travels_with_the_rank_and_bits_of_its_average() -> None:
    config = CompressionConfig(method=Method.LOWRANK_INT4, rank=4)
    plans = StagePlans([(rows * 20, 200) for rows in range(1, 9)], 2, config)
    at_start, lower, wider = (plans.plan(1, *how) for how in ((0, 0), (2, 0), (0, 8)))
    assert at_start is not None
    assert lower is not None
    assert wider is not None
    assert max(at_start.ranks) == 4
    assert max(lower.ranks) == 2
    assert lower.num_bytes < at_start.num_bytes < wider.num_bytes
    assert StagePlans(SHAPES, 2).plan(1, 0, 0) is None


def test_bits_that_a_method_lacks_are_refused() -> None:
    for method, bits in ((Method.INT8, 5), (Method.COCKTAIL, 4)):
        with pytest.raises(CompressionError, match=f"bits are {bits}"):
            CompressionConfig(method=method, bits=bits)
