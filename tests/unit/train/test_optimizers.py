"""Schedules of the learning rate, with torch's as oracle."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import ConfigError
from decod.run.training_config import OptimizerConfig, Schedule
from decod.train.optimizers import cosine, learning_rate


def _torch_rates(optimizer: OptimizerConfig, num_iterations: int) -> list[float]:
    """Return the rates of torch's own schedulers."""
    warmup = optimizer.warmup_iterations
    num_falling = optimizer.decay_iterations - warmup
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=optimizer.lr)
    scheduler = torch.optim.lr_scheduler
    falling: torch.optim.lr_scheduler.LRScheduler
    if optimizer.schedule is Schedule.COSINE:
        least = optimizer.lr * optimizer.lr_min_ratio
        falling = scheduler.CosineAnnealingLR(sgd, T_max=num_falling, eta_min=least)
    else:
        ratio = optimizer.lr_min_ratio
        falling = scheduler.LinearLR(
            sgd, start_factor=1.0, end_factor=ratio, total_iters=num_falling
        )
    if warmup:
        rising = scheduler.LinearLR(sgd, start_factor=1 / (warmup + 1), total_iters=warmup)
        falling = scheduler.SequentialLR(sgd, [rising, falling], milestones=[warmup])
    rates = []
    for _ in range(num_iterations):
        rates.append(float(sgd.param_groups[0]["lr"]))
        sgd.step()
        falling.step()
    return rates


@pytest.mark.parametrize("schedule", [Schedule.LINEAR, Schedule.COSINE])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_schedules_are_those_of_torch(schedule: Schedule, warmup: int, ratio: float) -> None:
    optimizer = OptimizerConfig(
        lr=0.4,
        warmup_iterations=warmup,
        schedule=schedule,
        decay_iterations=40,
        lr_min_ratio=ratio,
    )
    found = [learning_rate(optimizer, iteration) for iteration in range(1, 42)]
    assert found == pytest.approx(_torch_rates(optimizer, 41), rel=1e-9, abs=1e-12)
    assert max(found) == pytest.approx(optimizer.lr)


@pytest.mark.parametrize("schedule", [Schedule.LINEAR, Schedule.COSINE])
def test_a_rate_that_has_fallen_stays(schedule: Schedule) -> None:
    optimizer = OptimizerConfig(
        lr=0.4, schedule=schedule, decay_iterations=10, lr_min_ratio=0.25, warmup_iterations=2
    )
    found = [learning_rate(optimizer, iteration) for iteration in (11, 12, 500)]
    assert found == pytest.approx([0.1, 0.1, 0.1], rel=1e-12)


def test_a_constant_rate_is_what_it_was_before_there_were_schedules() -> None:
    """The expression of old, bit for bit: runs go on with the same weights."""
    optimizer = OptimizerConfig(lr=0.3, warmup_iterations=6)
    for iteration in range(1, 100):
        assert learning_rate(optimizer, iteration) == 0.3 * min(iteration, 7) / 7


@given(st.floats(0, math.pi))
def test_the_cosine_needs_no_library_and_is_as_exact(angle: float) -> None:
    assert cosine(angle) == pytest.approx(math.cos(angle), abs=2e-15)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"schedule": Schedule.COSINE}, "decay_iterations"),
        ({"schedule": Schedule.LINEAR, "decay_iterations": 5, "warmup_iterations": 5}, "decay"),
        ({"decay_iterations": 5}, "decay_iterations"),
        ({"lr_min_ratio": 1.5}, "lr_min_ratio"),
        ({"lr_min_ratio": -0.1}, "lr_min_ratio"),
        ({"lr_min_ratio": float("nan")}, "lr_min_ratio"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.{key}"):
        OptimizerConfig(**values)
