"""Real training scripts with `decod.CollaborativeOptimizer`: together they are one big batch."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from tests.support.scripts import BATCH, RunningScript, Scripts, check_accounts, require_equal
from tests.support.training_script import (
    OPTIMIZERS,
    Script,
    falling,
    flat,
    loss_of,
    make_model,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

STEPS = 2
"""Steps of each peer in a round, where shares are fixed."""
ROUNDS = 5
MANY = 25
"""Rounds after which a model has plainly learnt."""


def usual(num: int, **fields: object) -> Script:
    """A script in a run of some peers, each with a fixed share."""
    settings = {
        "target_batch_size": num * STEPS * BATCH,
        "batch_size_per_step": BATCH,
        "share": STEPS * BATCH,
        "verbose": False,
    }
    return replace(Script(settings=settings), **fields)  # type: ignore[arg-type]


def one_process(scripts: Sequence[Script], rounds: int) -> Tensor:
    """Return the parameters of one process that trains with the data of all scripts."""
    script = scripts[0]
    model = make_model(script)
    optimizer = OPTIMIZERS[script.optimizer](model.parameters())
    scheduler = falling(optimizer) if script.schedules else None
    for number in range(rounds):
        optimizer.zero_grad()
        losses = [
            loss_of(model, each, number * STEPS + step) for each in scripts for step in range(STEPS)
        ]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return flat(model)


def train_together(scripts: Sequence[RunningScript], rounds: int) -> list[Tensor]:
    """Have all train so many rounds; return the parameters of each."""
    for each in scripts:
        each.train(rounds)
    return [
        torch.tensor(each.wait_trained()["parameters"], dtype=torch.float64) for each in scripts
    ]


@pytest.mark.parametrize(
    ("num", "optimizer"),
    [
        (2, "sgd"),
        pytest.param(3, "adamw", marks=pytest.mark.slow),
        pytest.param(2, "adamw", marks=pytest.mark.slow),
    ],
)
def test_peers_with_fixed_shares_equal_one_process(
    tmp_path: Path, num: int, optimizer: str
) -> None:
    with Scripts(tmp_path, usual(num, optimizer=optimizer, schedules=True)) as group:
        scripts = group.start_run(num)
        found = train_together(scripts, ROUNDS)
        expected = one_process([each.script for each in scripts], ROUNDS)
        for parameters in found:
            assert (parameters - expected).abs().max() < 1e-9
            assert torch.equal(parameters, found[0])
        require_equal(scripts)


def local_updates(scripts: Sequence[Script], rounds: int) -> Tensor:
    """Return the parameters after rounds in which each peer goes its own way for some steps.

    The run then goes the mean way of all. Each peer keeps the state of its optimizer.
    """
    models = [make_model(script) for script in scripts]
    optimizers = [
        OPTIMIZERS[script.optimizer](model.parameters())
        for script, model in zip(scripts, models, strict=True)
    ]
    schedulers = [falling(optimizer) for optimizer in optimizers]
    for number in range(rounds):
        begun = flat(models[0])
        for script, model, optimizer in zip(scripts, models, optimizers, strict=True):
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, script, number * STEPS + step).backward()
                optimizer.step()
        way = torch.stack([begun - flat(model) for model in models]).mean(dim=0)
        for model, scheduler in zip(models, schedulers, strict=True):
            vector_to_parameters(begun - way, model.parameters())
            scheduler.step()
    return flat(models[0])


@pytest.mark.parametrize(
    ("num", "optimizer"), [(2, "adamw"), pytest.param(3, "sgd", marks=pytest.mark.slow)]
)
def test_local_updates_go_the_mean_way(tmp_path: Path, num: int, optimizer: str) -> None:
    script = usual(num, optimizer=optimizer, schedules=True)
    with Scripts(tmp_path, script) as group:
        scripts = group.start_run(num, use_local_updates=True)
        found = train_together(scripts, ROUNDS)
        expected = local_updates([each.script for each in scripts], ROUNDS)
        for parameters in found:
            assert (parameters - expected).abs().max() < 1e-9
            assert torch.equal(parameters, found[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *itertools.product(
            ("none", "fp16", "bf16", "int8", "int4", "lowrank", "lowrank+int4"),
            ({}, {"overlap": True}),
        ),
        ("cocktail", {}),
    ],
)
def test_averages_of_every_kind_train_and_leave_all_peers_equal(
    tmp_path: Path, method: str, settings: dict[str, bool]
) -> None:
    script = Script(
        settings={"target_batch_size": 8 * BATCH, "batch_size_per_step": BATCH, "verbose": False},
        dtype="float32",
        hidden=192,
        # Cocktail's elements arrive seldom, with all that they have gathered. An overlapped average
        # is a step late. Both are too much for Adam at this rate, in one process as well.
        optimizer="plain" if settings or method == "cocktail" else "adamw",
        step_s=0.02,
    )
    with Scripts(tmp_path, script) as group:
        scripts = group.start_run(2, compression=method, **settings)
        for each in scripts:
            each.train()
        for each in scripts:
            each.wait_for_round(MANY)
        learnt, *_ = [each.stand_still()["parameters"] for each in scripts]
        assert check_accounts(scripts) >= MANY
        assert require_equal(scripts) > MANY // 2
        model = make_model(script)
        begun = held_out_loss(model, script)
        vector_to_parameters(torch.tensor(learnt), model.parameters())
        assert held_out_loss(model, script) < 0.8 * begun


def held_out_loss(model: nn.Module, script: Script) -> float:
    """Return the mean loss over data that no peer trains with."""
    with torch.no_grad():
        losses = [loss_of(model, replace(script, peer=99), step) for step in range(64)]
    return float(torch.stack(losses).mean())
