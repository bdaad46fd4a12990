"""The common part of training frameworks, when decod takes a place in them."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from decod.optimizer.optimizer import CollaborativeOptimizer


def clip_averages(optimizer: torch.optim.Optimizer, norm: float) -> None:
    """Clip what an optimizer steps with: the average of a round, and not the gradient of a step.

    All hosts have the same average, so they clip it alike.

    Args:
        optimizer: That decod wraps.
        norm: The largest norm.
    """

    def clip(stepping: torch.optim.Optimizer, *_: Any) -> None:
        clip_grad_norm_([each for group in stepping.param_groups for each in group["params"]], norm)

    optimizer.register_step_pre_hook(clip)


def hand_over(scheduler: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Keep a framework from stepping a scheduler. Return what steps it.

    Args:
        scheduler: That the framework would step with each step of this host.
        optimizer: Whose rates the framework shows.
    """
    step: Callable[..., Any] = scheduler.step
    scheduler.step = lambda *_, **__: None
    scheduler.get_last_lr = lambda: [group["lr"] for group in optimizer.param_groups]
    return step


def show_join_string(optimizer: CollaborativeOptimizer) -> None:
    """Print what other hosts need, unless this host admits nobody."""
    if optimizer.join_string:
        sys.stdout.write(f"join string: {optimizer.join_string}\n")
        sys.stdout.flush()
