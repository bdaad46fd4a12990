"""The order of the data: every window once per epoch, the same on every host."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.data.order import (
    Permutation,
    count_windows,
    epoch_permutation,
    microbatch_windows,
    sequence_number,
)
from decod.data.params import BatchConfig
from decod.errors import ConfigError, DataError
from decod.ids import MicrobatchId


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


def test_order_differs_between_seeds_and_between_epochs() -> None:
    orders = [
        tuple(map(epoch_permutation(num_windows=50, seed=seed, epoch=epoch), range(50)))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


def test_order_of_a_known_key_never_changes() -> None:
    """A change of this list changes what every run trains on: members would disagree."""
    order = epoch_permutation(num_windows=12, seed=7, epoch=3)
    assert list(map(order, range(12))) == GOLDEN_ORDER


def test_order_looks_shuffled() -> None:
    """Mean displacement of a random permutation of n values is n / 3."""
    size = 1000
    order = epoch_permutation(num_windows=size, seed=1, epoch=0)
    mean = sum(abs(order(position) - position) for position in range(size)) / size
    assert 0.28 * size < mean < 0.39 * size


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
