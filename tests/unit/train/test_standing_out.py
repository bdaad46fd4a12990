"""What liars send stands out; honest contributions and means, with all their noise, hardly do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decod.train.standing_out import means_standing_out, standing_out
from tests.support.devices import on_devices

N = 3000


def contributions(
    num: int, weights: list[int], seed: int, *, noise: float = 2.0, size: int = N
) -> list[Tensor]:
    """Return sums over microbatches whose gradients are one direction and noise."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(size, generator=generator)
    return [
        sum(
            (direction + noise * torch.randn(size, generator=generator) for _ in range(weight)),
            start=torch.zeros(size),
        )
        for weight in weights[:num]
    ]


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "flipped": lambda true: -true,
    "scaled": lambda true: 10 * true,
    "random": lambda true: torch.randn_like(true) * true.std(),
    "zero": torch.zeros_like,
    "tiny": lambda true: true / 20,
}


@pytest.mark.parametrize("num", [3, 5, 8])
def test_honest_contributions_do_not(num: int) -> None:
    weights = [3, 2, 4, 1, 3, 2, 6, 1][:num]
    drawn = (contributions(num, weights, seed) for seed in range(50))
    alarms = sum(len(standing_out(each, weights)) for each in drawn)
    assert alarms <= 0.02 * 50 * num


@on_devices
@pytest.mark.parametrize("lie", [*LIES])
@pytest.mark.parametrize("num", [3, 6])
def test_a_lie_does(lie: str, num: int, device: str) -> None:
    weights = [2, 3, 2, 4, 2, 3]
    found = list[list[int]]()
    for seed in range(20):
        told = contributions(num, weights, seed, noise=1.0)
        told[1] = LIES[lie](told[1])
        found.append(standing_out([each.to(device) for each in told], weights[:num]))
    assert sum(each == [1] for each in found) >= 18, found


def test_two_can_not_stand_out_from_each_other() -> None:
    one, two = contributions(2, [2, 2], 1)
    assert standing_out([one, -two], [2, 2]) == []


def test_the_same_elements_of_all_are_looked_at() -> None:
    """Of long contributions only some elements are: another draw for each would look like noise."""
    told = contributions(3, [2, 2, 2], 1, noise=0.1, size=300_000)
    assert standing_out(told, [2, 2, 2]) == []


def test_nothing_at_all_is_no_lie_if_it_is_all_there_is() -> None:
    assert standing_out([torch.zeros(9)] * 3, [1, 1, 1]) == []


def means(num: int, weights: list[int], seed: int, *, noise: float) -> tuple[list[Tensor], Tensor]:
    """Return all parts of an honest average, and the first member's contribution."""
    given = contributions(num, weights, seed, noise=noise, size=num * N)
    whole = torch.stack(given).sum(0) / sum(weights[:num])
    return [*whole.chunk(num)], given[0]


@pytest.mark.parametrize("noise", [0.5, 2.0, 10.0])
@pytest.mark.parametrize("num", [3, 5, 8])
def test_honest_means_do_not(num: int, noise: float) -> None:
    alarms = 0
    for seed in range(20):
        parts, own = means(num, [2, 1, 4, 3, 3, 2, 6, 1], seed, noise=noise)
        alarms += len(means_standing_out(parts, own.chunk(num)))
    assert alarms == 0


@pytest.mark.parametrize("lie", [*LIES])
@pytest.mark.parametrize("num", [3, 6])
def test_a_false_mean_does(lie: str, num: int) -> None:
    for seed in range(20):
        parts, own = means(num, [2, 3, 2, 4, 2, 3], seed, noise=2.0)
        parts[1] = LIES[lie](parts[1])
        assert means_standing_out(parts, own.chunk(num)) == [1]


def test_who_has_contributed_nothing_can_not_say() -> None:
    parts, own = means(3, [2, 2, 2], 1, noise=1.0)
    assert means_standing_out([-parts[0], *parts[1:]], (0 * own).chunk(3)) == []
    assert means_standing_out([], []) == []
