"""Sketches tell how far tensors are from each other, and nobody can forge them without the seed."""

import math
import random
import secrets

import pytest
import torch

from decod.protocol.core.fingerprints import (
    ERROR_MAX,
    NUM_SUMS,
    SEED_BYTES,
    SKETCH_BYTES,
    Sketch,
    added,
    error_of,
)
from decod.train.standing_out import Sketcher, error_between, sketch_of
from tests.support.devices import on_devices

SEED = bytes(range(SEED_BYTES))


def error_in(tensor: torch.Tensor, told: Sketch) -> float:
    """Return how far a tensor is from the one that a sketch is of."""
    return error_of(told, sketch_of(tensor, told.seed))


def draw(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num", [1, 31, 1000, 65_536, 200_000])
def test_errors_of_what_liars_send(num: int) -> None:
    true = draw(num)
    told = sketch_of(true, SEED)
    assert error_in(true, told) == 0.0
    assert error_in(-true, told) == ERROR_MAX
    assert error_in(2 * true, told) == pytest.approx(0.5)
    assert error_in(torch.zeros(num), told) == 1.0
    assert error_in(torch.full((num,), math.nan), told) == ERROR_MAX


def test_the_distance_of_two_tensors_that_are_both_there() -> None:
    true = draw(1000)
    assert error_between(true, true.clone()) == 0.0
    assert error_between(-true, true) == ERROR_MAX
    assert error_between(2 * true, true) == pytest.approx(0.5)
    assert error_between(torch.zeros(1000), true) == pytest.approx(1.0)
    assert error_between(torch.full((1000,), math.nan), true) == ERROR_MAX
    assert error_between(torch.zeros(7), torch.zeros(7)) == 0.0


def test_two_zeros_are_the_same() -> None:
    assert error_in(torch.zeros(7), sketch_of(torch.zeros(7), SEED)) == 0.0


@pytest.mark.parametrize("distance", [0.001, 0.05, 0.5])
def test_the_error_is_the_distance_on_average(distance: float) -> None:
    true, noise = draw(10_000), draw(10_000, 2)
    other = true + distance * noise
    seeds = random.Random(4)
    errors = [error_in(other, sketch_of(true, seeds.randbytes(SEED_BYTES))) for _ in range(100)]
    share = distance / math.hypot(1, distance)
    assert sum(errors) / len(errors) == pytest.approx(share, rel=0.1)
    assert 0.5 * distance < min(errors) <= max(errors) < 2 * distance


@pytest.mark.parametrize("pattern", ["constant", "ramp", "one element", "alternating"])
def test_no_simple_change_goes_unseen(pattern: str) -> None:
    """Signs look random: no regular change cancels out in all sums."""
    num = 10_000
    change = {
        "constant": torch.ones(num),
        "ramp": torch.arange(num) / num,
        "one element": torch.eye(1, num)[0],
        "alternating": torch.arange(num) % 2 * 2.0 - 1,
    }[pattern]
    length = math.sqrt(float(change @ change))
    seeds = random.Random(5)
    for _ in range(20):
        seed = seeds.randbytes(SEED_BYTES)
        assert math.hypot(*sketch_of(change, seed).sums) == pytest.approx(length, rel=0.6)


def test_sketches_with_one_seed_add_up() -> None:
    parts = [draw(1000, k) for k in range(5)]
    whole = sketch_of(torch.stack(parts).sum(0), SEED)
    assert error_of(whole, added([sketch_of(part, SEED) for part in parts])) < 1e-6


def test_sketches_with_other_signs_are_not_compared() -> None:
    true = draw(100)
    assert (
        error_of(sketch_of(true, SEED), sketch_of(true, secrets.token_bytes(SEED_BYTES)))
        == ERROR_MAX
    )


def test_kept_signs_are_those_of_new_ones() -> None:
    sketcher = Sketcher(SEED)
    for num in (100, 70_000, 300):
        assert sketcher.sketch(draw(num)) == sketch_of(draw(num), SEED)


def test_a_sketch_survives_its_way() -> None:
    told = sketch_of(draw(1000), SEED)
    data = told.to_bytes()
    assert len(data) == SKETCH_BYTES
    assert error_of(Sketch.from_bytes(data), told) < 1e-6
    for other in (data[:-1], data + b"\0", b""):
        with pytest.raises(ValueError, match="bytes"):
            Sketch.from_bytes(other)


def test_what_does_not_fit_into_a_float_is_far_from_everything() -> None:
    huge = Sketch(SEED, (1e300,) * NUM_SUMS)
    told = Sketch.from_bytes(huge.to_bytes())
    assert error_of(told, sketch_of(draw(10), SEED)) == ERROR_MAX


@on_devices
def test_signs_are_the_same_on_every_device(device: str) -> None:
    true = draw(100_000)
    told = sketch_of(true.to(device), SEED)
    assert error_of(told, sketch_of(true, SEED)) < 1e-9
