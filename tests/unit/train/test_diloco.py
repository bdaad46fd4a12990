"""Which rates of the outer optimizer settle, as docs/slow-links.md tells."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decod.config.presets import PRESETS
from decod.run.training_config import OptimizerConfig, OptimizerName, SyncConfig, SyncMethod
from decod.train.checkpoint.entries import MOMENTUM_PREFIX
from decod.train.diloco import DiLoCo
from decod.train.layout import Layout, SharedState
from decod.train.optimizers import Segment
from decod.train.update_rule import NO_AVERAGE, StepInput

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "slow-links.md"
NUM_STEPS = 400


def distance(sync: SyncConfig) -> float:
    """Return how far from the optimum a weight of 1 is, after outer steps.

    Between two of them the member reaches the optimum, which is 0: it has one step of SGD for that,
    whose gradient is the weight.
    """
    plain = OptimizerConfig(name=OptimizerName.SGD, lr=1.0, beta1=0.0, weight_decay=0.0)
    rule = DiLoCo(plain, sync)
    shared = SharedState(torch.ones(1, dtype=torch.float64), {})
    begun = SharedState.without_moments(shared.weights, (MOMENTUM_PREFIX,))
    state = rule.begin(begun, 0, Layout({"weight": (1,)}))
    step = StepInput(state.weights, 1, 0, [Segment(0, 1, decayed=False)])
    for iteration in range(1, NUM_STEPS + 1):
        new = state.empty_like()
        step = replace(step, gradient=state.weights.clone(), iteration=iteration)
        if not sync.overlap:
            mean = rule.contribution(state, new, step)
            step = replace(step, own=replace(NO_AVERAGE, mean=mean))
        rule.average(state, new, step)
        if sync.overlap:
            step = replace(step, delayed=replace(NO_AVERAGE, mean=rule.sending(new)))
        state = new
    return abs(float(state.anchor))


def make_sync(momentum: float, lr: float, *, overlap: bool) -> SyncConfig:
    return SyncConfig(
        method=SyncMethod.DILOCO, overlap=overlap, outer_lr=lr, outer_momentum=momentum
    )


def documented() -> list[tuple[float, float, float]]:
    """Return momentum, and the largest rates without and with overlap."""
    rows = re.findall(r"^\| (0\.?\d*) \| ([\d.]+) \| ([\d.]+) \|$", DOCUMENT.read_text(), re.M)
    return [(float(momentum), float(waiting), float(ahead)) for momentum, waiting, ahead in rows]


def test_the_documented_rates_are_the_largest_that_settle() -> None:
    assert len(documented()) == 4
    for momentum, waiting, ahead in documented():
        for lr, overlap in ((waiting, False), (ahead, True)):
            assert distance(make_sync(momentum, lr * 0.97, overlap=overlap)) < 0.5
            assert distance(make_sync(momentum, lr * 1.06, overlap=overlap)) > 10


@pytest.mark.parametrize("name", ["diloco", "opendiloco", "muloco", "dilocox"])
def test_presets_settle(name: str) -> None:
    assert distance(PRESETS[name].sync) < 1e-6
