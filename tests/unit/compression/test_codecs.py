"""Formats: error bounds, sizes on the wire, and what a receiver refuses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decod.compression.codecs import Noise, decode, encode
from decod.compression.plan import (
    BLOCK_SIZE,
    SCALE_BYTES,
    BlockCoding,
    Coding,
    CompressionError,
    FloatCoding,
    RotatedCoding,
    SparseCoding,
)

CODINGS = (
    FloatCoding("float32"),
    FloatCoding("float16"),
    FloatCoding("bfloat16"),
    BlockCoding(8),
    BlockCoding(4),
    BlockCoding(8, block_size=33),
    BlockCoding(4, block_size=48),
    SparseCoding(stride=10, num_kept=20),
    SparseCoding(stride=1, num_kept=256),
)
any_coding = pytest.mark.parametrize("coding", CODINGS, ids=str)
lengths = st.integers(0, 3000)
seeds = st.integers(0, 2**40)
powers = st.integers(-20, 10)


def values(length: int, seed: int, power: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator) * 2.0**power


@any_coding
@given(lengths, seeds)
def test_the_size_is_known_beforehand(coding: Coding, length: int, seed: int) -> None:
    coded = encode(coding, values(length, seed), seed=seed)
    assert coded.shape == (coding.num_bytes(length),)
    assert decode(coding, coded, length, seed=seed).shape == (length,)


@pytest.mark.parametrize("bits", [8, 4])
@given(st.integers(1, 3000), seeds, powers)
def test_an_element_is_wrong_by_half_a_scale_at_most(
    bits: int, length: int, seed: int, power: int
) -> None:
    """Source of the bound: rounding to the nearest multiple of the scale."""
    coding, original = BlockCoding(bits), values(length, seed, power)
    error = (decode(coding, encode(coding, original), length) - original).abs()
    for start in range(0, length, BLOCK_SIZE):
        here = slice(start, start + BLOCK_SIZE)
        scale = float(original[here].abs().max()) / coding.code_max
        assert float(error[here].max()) <= scale / 2 * (1 + 1e-5)


@given(st.integers(1, 20_000))
def test_no_block_belongs_to_two_rows(row_size: int) -> None:
    block_size = BlockCoding.of_rows(8, row_size).block_size
    assert row_size % block_size == 0
    assert block_size <= BLOCK_SIZE
    if row_size % 64 == 0:
        # As a model's width is: scales add 6 % to the codes at most.
        assert block_size >= 64
    if row_size <= BLOCK_SIZE:
        assert block_size == row_size


@given(st.integers(1, 600), st.integers(2, 5), seeds)
def test_large_elements_of_a_row_leave_the_others_as_they_are(
    row_size: int, num_rows: int, seed: int
) -> None:
    coding = BlockCoding.of_rows(8, row_size)
    rows = values(num_rows * row_size, seed).view(num_rows, row_size)
    spoiled = rows.clone()
    spoiled[0] *= 1e6
    found = [
        decode(coding, encode(coding, each.view(-1)), rows.numel()).view_as(rows)
        for each in (rows, spoiled)
    ]
    assert torch.equal(found[0][1:], found[1][1:])


@any_coding
@given(st.integers(1, 3000), seeds, powers)
def test_coding_is_a_contraction(coding: Coding, length: int, seed: int, power: int) -> None:
    """What is left out is shorter than what was there, so error feedback stays bounded."""
    original = values(length, seed, power)
    left = original - decode(coding, encode(coding, original, seed=seed), length, seed=seed)
    assert float(left.norm()) <= float(original.norm())


@any_coding
@given(st.integers(1, 3000), seeds)
def test_coding_again_changes_nothing(coding: Coding, length: int, seed: int) -> None:
    once = decode(coding, encode(coding, values(length, seed), seed=seed), length, seed=seed)
    again = decode(coding, encode(coding, once, seed=seed), length, seed=seed)
    torch.testing.assert_close(again, once, rtol=1e-6, atol=0)


@given(st.integers(1, 5000), seeds, st.sampled_from([1, 2, 7, 10]))
def test_the_largest_candidates_travel(length: int, seed: int, stride: int) -> None:
    coding, original = SparseCoding(stride=stride, num_kept=10), values(length, seed)
    decoded = decode(coding, encode(coding, original, seed=seed), length, seed=seed)
    num_blocks = math.ceil(coding.num_candidates(length) / BLOCK_SIZE)
    assert int((decoded != 0).sum()) <= num_blocks * coding.num_kept
    largest = int(decoded.abs().argmax())
    assert abs(float(decoded[largest] - original[largest])) <= float(original.abs().max()) / 14.0


@given(st.integers(2, 5000), seeds)
def test_members_draw_the_same_candidates_and_others_in_each_average(
    length: int, seed: int
) -> None:
    coding = SparseCoding(stride=2, num_kept=256)
    first, second, later = (
        decode(coding, encode(coding, values(length, 1 + k) + 9, seed=drawn), length, seed=drawn)
        for k, drawn in enumerate((seed, seed, seed + 1))
    )
    assert torch.equal(first != 0, second != 0)
    if length > 500:
        assert not torch.equal(first != 0, later != 0)


@any_coding
def test_zeros_stay_zeros(coding: Coding) -> None:
    assert not decode(coding, encode(coding, torch.zeros(700)), 700).any()


@pytest.mark.parametrize(
    "coding", [c for c in CODINGS if c != SparseCoding(stride=10, num_kept=20)]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_compressed(coding: Coding, bad: float) -> None:
    spoiled = values(700, 1)
    spoiled[600] = bad
    with pytest.raises(CompressionError, match="NaN"):
        encode(coding, spoiled)


def test_what_is_too_large_for_a_short_float_is_not_compressed() -> None:
    with pytest.raises(CompressionError, match="too large for float16"):
        encode(FloatCoding("float16"), torch.tensor([7e4]))


@any_coding
@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_number_of_bytes_is_refused(coding: Coding, change: int) -> None:
    coded = torch.zeros(coding.num_bytes(700) + change, dtype=torch.uint8)
    with pytest.raises(CompressionError, match="bytes came for 700 elements"):
        decode(coding, coded, 700)


@pytest.mark.parametrize(
    "coding", [BlockCoding(8), BlockCoding(4), SparseCoding(stride=1, num_kept=20)]
)
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e-42])
def test_an_impossible_scale_is_refused(coding: Coding, bad: float) -> None:
    coded = encode(coding, values(700, 1))
    coded[SCALE_BYTES : 2 * SCALE_BYTES].view(torch.float32)[0] = bad
    with pytest.raises(CompressionError, match="the scale of block 1"):
        decode(coding, coded, 700)


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([5, 5], "ascending"),
        ([9, 3], "ascending"),
        ([3, 200], "behind the last candidate"),
    ],
)
def test_impossible_positions_are_refused(places: list[int], reason: str) -> None:
    coding = SparseCoding(stride=1, num_kept=2)
    coded = encode(coding, torch.ones(100))
    coded[SCALE_BYTES : SCALE_BYTES + 2] = torch.tensor(places, dtype=torch.uint8)
    with pytest.raises(CompressionError, match=reason):
        decode(coding, coded, 100)


@given(
    row_size=st.sampled_from([2, 48, 128, 384]),
    num_rows=st.integers(1, 9),
    num_sequences=st.integers(0, 3),
    seed=seeds,
    power=powers,
    noisy=st.booleans(),
)
def test_a_rotated_tile_is_wrong_by_half_a_scale_at_most(
    row_size: int, num_rows: int, num_sequences: int, seed: int, power: int, *, noisy: bool
) -> None:
    """Rounded at random, by a scale. The transform is an isometry but for a factor, so each code's
    error counts 1 / sqrt(K).
    """
    coding = RotatedCoding(row_size, num_rows)
    original = values(row_size * num_rows * num_sequences, seed, power)
    coded = encode(coding, original, noise=Noise(seed) if noisy else None)
    assert coded.shape == (coding.num_bytes(len(original)),)
    num_means, num_scales, _ = coding.runs(len(original))
    scales = coded[num_means:][:num_scales].clone().view(torch.bfloat16).double()
    error = (decode(coding, coded, len(original)) - original).double()
    bound = scales * (1.0 if noisy else 0.5)
    tile_norms = original.double().view(-1, coding.tile_size).norm(dim=1)
    rounding = 1e-5 * (tile_norms + 2.0**power)
    assert bool((error.view(-1, coding.tile_size).norm(dim=1) <= bound + rounding).all())


@pytest.mark.parametrize(
    ("row_size", "tile_size"), [(4096, 128), (896, 128), (192, 64), (48, 16), (34, 2)]
)
def test_no_tile_belongs_to_two_rows(row_size: int, tile_size: int) -> None:
    coding = RotatedCoding(row_size, 1)
    assert coding.tile_size == tile_size
    rows = values(3 * row_size, 1).view(3, row_size)
    rows[1] *= 1e6
    alone = decode(coding, encode(coding, rows[0]), row_size)
    together = decode(coding, encode(coding, rows.view(-1)), rows.numel())
    assert torch.equal(together[:row_size], alone)


def test_what_tokens_have_in_common_and_large_elements_cost_little() -> None:
    """All rows are near 100 times the same one, and one channel is 50 times as large."""
    original = values(128 * 512, 3).view(512, 128)
    original[:, 7] *= 50.0
    apart = float(original.norm())
    flat = (original + 100.0 * values(128, 4)).view(-1)

    def error(coding: Coding) -> float:
        return float((decode(coding, encode(coding, flat), flat.numel()) - flat).norm()) / apart

    assert error(RotatedCoding(128, 512)) < 0.15
    assert error(BlockCoding(4, block_size=128)) > 1.0


def test_rounding_at_random_is_right_on_average() -> None:
    coding = RotatedCoding(64, 8)
    original = values(64 * 32, 5)
    one = decode(coding, encode(coding, original, noise=Noise(1)), len(original)) - original
    num = 400
    mean = torch.zeros_like(original)
    for seed in range(num):
        mean += decode(coding, encode(coding, original, noise=Noise(seed)), len(original)) / num
    # The error of a mean of independent ones, with room for chance.
    assert float((mean - original).norm()) < 1.2 * float(one.norm()) / num**0.5


def test_noise_depends_on_the_tensor_and_the_place_alone() -> None:
    """Several devices code their sequences apart, and come to the bytes of one."""
    coding, original = RotatedCoding(32, 16), values(32 * 64, 6)
    whole = encode(coding, original, noise=Noise(9))
    assert torch.equal(encode(coding, original, noise=Noise(9)), whole)
    assert not torch.equal(encode(coding, original, noise=Noise(10)), whole)
    half = len(original) // 2
    behind = encode(coding, original[half:], noise=Noise(9, first=half))
    *_, num_codes = coding.runs(half)
    assert torch.equal(behind[-num_codes:], whole[-num_codes:])
    other = encode(coding, original[half:], noise=Noise(9))
    assert not torch.equal(other[-num_codes:], whole[-num_codes:])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_rotated_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    original = values(256, 7)
    original[100:103] = bad
    with pytest.raises(CompressionError, match="NaN, infinite or too large"):
        encode(RotatedCoding(128, 2), original)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-40])
def test_an_impossible_scale_of_a_tile_is_refused(scale: float) -> None:
    coding = RotatedCoding(128, 2)
    coded = encode(coding, values(256, 8))
    coded[256:258] = torch.tensor([scale]).to(torch.bfloat16).view(torch.uint8)
    with pytest.raises(CompressionError, match="the scale of block 0"):
        decode(coding, coded, 256)
