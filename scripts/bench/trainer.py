"""Common parts of the two baselines: initial weights, AdamW, and the line after an iteration."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from decod.model import llama
from decod.model.stage import Stage, initial_weight
from decod.run.run_config import RunConfig
from decod.run.training_config import OptimizerConfig


def _plain(
    make: Callable[..., Tensor], inputs: Sequence[Tensor], layers: Sequence[nn.Module]
) -> tuple[Tensor, ...]:
    made = make(*inputs)
    return tuple(layer(made) for layer in layers) or (made,)


def place_initial(stage: Stage, run: RunConfig) -> None:
    """Fill a module that was built without weights with decod's initial weights.

    Its blocks compute nothing again in their backward passes, as plain modules do.
    """
    llama.projected = _plain  # type: ignore[attr-defined]  # The name that its blocks call.
    stage.place(
        {
            name: initial_weight(run.model, seed=run.seed, name=name, shape=tuple(parameter.shape))
            for name, parameter in stage.parameters_by_name().items()
        }
    )


def make_adamw(
    parameters: Iterable[nn.Parameter], optimizer: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return torch's fused AdamW, with decod's settings and weight decay on the same parameters."""
    groups: list[dict[str, object]] = [{"params": [], "weight_decay": 0.0}]
    groups.append({"params": [], "weight_decay": optimizer.weight_decay})
    for parameter in parameters:
        members = groups[parameter.ndim >= 2]["params"]
        assert isinstance(members, list)
        members.append(parameter)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        fused=True,
    )


def parser() -> argparse.ArgumentParser:
    """Return a parser of the options that both baselines have."""
    result = argparse.ArgumentParser()
    result.add_argument("--run", type=Path, required=True)
    result.add_argument("--threads", type=int, required=True)
    return result


def announce(iteration: int, loss: float) -> None:
    """Tell the measuring process that an iteration is over."""
    print(f"iteration {iteration}  loss {loss:.7f}", flush=True)
