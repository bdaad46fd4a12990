"""The order of the data: every window once per epoch, the same on every host."""

from collections import Counter, OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.data.order import (
    EpochOrder,
    Permutation,
    count_windows,
    microbatch_windows,
    sequence_number,
)
from decod.errors import ConfigError, DataError
from decod.ids import MicrobatchId
from decod.run.training_config import BatchConfig


@given(size=st.integers(1, 300), key=st.binary(max_size=8))
def test_permutation_hits_every_value_once(size: int, key: bytes) -> None:
    permutation = Permutation(size, key)
    assert sorted(map(permutation, range(size))) == list(range(size))


@given(size=st.integers(2**40, 2**62), data=st.data())
def test_permutation_of_a_huge_range_stays_inside_and_does_not_collide(
    size: int, data: st.DataObject
) -> None:
    permutation = Permutation(size, b"key")
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8, unique=True))
    images = [permutation(position) for position in positions]
    assert all(0 <= image < size for image in images)
    assert len(set(images)) == len(images)


@given(
    num_windows=st.integers(1, 400),
    chunk_windows=st.integers(1, 9),
    num_lanes=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
)
def test_epoch_visits_every_window_once(
    num_windows: int, chunk_windows: int, num_lanes: int, seed: int
) -> None:
    order = EpochOrder(num_windows, seed, 3, chunk_windows, num_lanes)
    assert sorted(map(order, range(num_windows))) == list(range(num_windows))


@given(num_windows=st.integers(2**40, 2**62), data=st.data())
def test_order_of_a_huge_corpus_stays_inside_and_does_not_collide(
    num_windows: int, data: st.DataObject
) -> None:
    order = EpochOrder(num_windows, 1, 0, 256)
    last = num_windows - 1
    positions = data.draw(
        st.lists(st.integers(0, last) | st.integers(last - 9, last), min_size=2, unique=True)
    )
    windows = [order(position) for position in positions]
    assert all(0 <= window < num_windows for window in windows)
    assert len(set(windows)) == len(windows)


@pytest.mark.parametrize("num_lanes", [4, 64])
def test_order_differs_between_seeds_and_between_epochs(num_lanes: int) -> None:
    orders = [
        tuple(map(EpochOrder(50, seed, epoch, 3, num_lanes), range(50)))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


def test_order_of_a_known_key_never_changes() -> None:
    """A change of these lists changes what every run trains on: members would disagree."""
    assert list(map(EpochOrder(12, 7, 3, 256), range(12))) == GOLDEN_ORDER
    assert list(map(EpochOrder(14, 7, 3, 3, num_lanes=2), range(14))) == GOLDEN_LANES


@pytest.mark.parametrize("num_lanes", [20, 1000])
def test_order_looks_shuffled(num_lanes: int) -> None:
    """Mean displacement of a random permutation of n values is n / 3."""
    size = 1000
    order = EpochOrder(size, 1, 0, 8, num_lanes)
    mean = sum(abs(order(position) - position) for position in range(size)) / size
    assert 0.28 * size < mean < 0.39 * size


def test_large_corpus_needs_a_small_cache() -> None:
    """A cache of one block for each lane, and a few more, fetches every block only once or twice.

    Chunks are opened evenly: the cache fetches as much in each part of the epoch.
    """
    num_lanes, chunk_windows, lane_chunks = 32, 16, 40
    num_windows = num_lanes * chunk_windows * lane_chunks
    order = EpochOrder(num_windows, 5, 0, chunk_windows, num_lanes)
    cache: OrderedDict[int, None] = OrderedDict()
    fetched = []
    for position in range(num_windows):
        chunk = order(position) // chunk_windows
        if chunk not in cache:
            fetched.append(position)
        cache[chunk] = cache.pop(chunk, None)
        if len(cache) > num_lanes + 4:
            cache.popitem(last=False)
    assert len(fetched) <= num_lanes * (lane_chunks + 1)
    per_part = Counter(position * 10 // num_windows for position in fetched if position > num_lanes)
    assert max(per_part.values()) <= 1.1 * num_lanes * lane_chunks / 10


def test_neighbours_in_the_order_come_from_all_over_a_large_corpus() -> None:
    order = EpochOrder(32 * 16 * 40, 5, 0, 16, num_lanes=32)
    for start in range(0, 3200, 32):
        chunks = {order(position) // 16 for position in range(start, start + 32)}
        assert len(chunks) == 32
        assert max(chunks) - min(chunks) > 32 * 40 / 2


@given(
    num_windows=st.integers(1, 40),
    num_data_nodes=st.integers(1, 3),
    num_microbatches=st.integers(1, 3),
    microbatch_size=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_window_is_handed_out_once_per_epoch(
    num_windows: int, num_data_nodes: int, num_microbatches: int, microbatch_size: int, seed: int
) -> None:
    batch = BatchConfig(
        sequence_length=5,
        num_data_nodes=num_data_nodes,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
    )
    handed_out: list[int] = []
    iteration = 0
    while len(handed_out) < 2 * num_windows:
        iteration += 1
        for data_node_index in range(num_data_nodes):
            for index in range(num_microbatches):
                mb = MicrobatchId(iteration, data_node_index, index)
                assert sequence_number(mb, batch) == len(handed_out)
                handed_out += microbatch_windows(
                    mb, batch=batch, num_tokens=num_windows * 5 + 1, seed=seed
                )
    for epoch in range(2):
        seen = Counter(handed_out[epoch * num_windows : (epoch + 1) * num_windows])
        assert seen == Counter(range(num_windows))


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (13, 3)]
)
def test_window_needs_one_token_more_than_its_length(num_tokens: int, expected: int) -> None:
    assert count_windows(num_tokens, sequence_length=4) == expected


@pytest.mark.parametrize(
    "numbers", [(0, 0, 0), (-1, 0, 0), (1, 2, 0), (1, -1, 0), (1, 0, 3), (1, 0, -1)]
)
def test_id_outside_the_batch_is_refused(numbers: tuple[int, int, int]) -> None:
    mb = MicrobatchId(*numbers)
    batch = BatchConfig(num_data_nodes=2, num_microbatches=3)
    with pytest.raises(ConfigError, match="this run's batch"):
        microbatch_windows(mb, batch=batch, num_tokens=10_000, seed=0)


def test_corpus_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match="has 256 tokens but one sequence needs 257"):
        microbatch_windows(MicrobatchId(1, 0, 0), batch=BatchConfig(), num_tokens=256, seed=0)


GOLDEN_ORDER = [6, 9, 2, 8, 10, 5, 7, 1, 3, 4, 11, 0]
GOLDEN_LANES = [4, 9, 11, 5, 3, 10, 6, 2, 0, 7, 8, 1, 13, 12]
