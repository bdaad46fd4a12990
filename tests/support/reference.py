"""The oracle: the same training in one process, in plain PyTorch.

It shares only the modules and the initial weights with the executor. It has its own loop, torch's
AdamW and one module, whose gradients are plain autograd's. A run must compute the same weights as
this oracle.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from decod.data.index import BEGINS, TARGET
from decod.model import llama
from decod.model.shape import model_shapes
from decod.model.stage import TORCH_DTYPES, FirstStage, empty_model, initial_weight
from decod.run.model_config import ModelConfig
from decod.run.training_config import OptimizerConfig, OptimizerName


def _exchange(parameters: Sequence[torch.nn.Parameter], pending: list[Tensor]) -> list[Tensor]:
    """Give parameters the gradients of the iteration before, and return those of this one."""
    own = [torch.clone(p.grad) for p in parameters if p.grad is not None]
    for parameter, gradient in zip(parameters, pending, strict=False):
        parameter.grad = gradient
    return own


@contextmanager
def plain_autograd() -> Iterator[None]:
    """Let autograd keep what it likes of Llama's blocks, and compute nothing again."""

    def plain(
        make: Callable[..., Tensor], inputs: Sequence[Tensor], linears: Sequence[nn.Linear]
    ) -> tuple[Tensor, ...]:
        made = make(*inputs)
        return tuple(layer(made) for layer in linears) or (made,)

    with mock.patch.object(llama, "projected", plain):
        yield


@plain_autograd()
class DecayedSGD(torch.optim.SGD):
    """SGD whose weights decay apart from the gradient, as those of AdamW."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["decay"])
        super().step(closure)


class Steppers:
    """Two optimizers that step as one."""

    def __init__(self, *steppers: torch.optim.Optimizer) -> None:
        self._steppers = steppers
        self.param_groups = [group for each in steppers for group in each.param_groups]

    def step(self) -> None:
        for each in self._steppers:
            each.step()

    def zero_grad(self) -> None:
        for each in self._steppers:
            each.zero_grad()


def make_stepper(
    weights: Iterable[Tensor], optimizer: OptimizerConfig, hidden: Sequence[Tensor] = ()
) -> torch.optim.Optimizer | Steppers:
    """Return torch's optimizer. Matrices decay, other weights don't. Muon steps the hidden ones."""
    if optimizer.name is OptimizerName.MUON:
        known = {id(weight) for weight in hidden}
        others = [weight for weight in weights if id(weight) not in known]
        adamw = make_stepper(others, replace(optimizer, name=OptimizerName.ADAMW))
        assert isinstance(adamw, torch.optim.Optimizer)
        if not hidden:
            return adamw
        muon = torch.optim.Muon(
            hidden,
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            momentum=optimizer.beta1,
            adjust_lr_fn="match_rms_adamw",
        )
        return Steppers(muon, adamw)
    matrices, others = list[Tensor](), list[Tensor]()
    for weight in weights:
        (matrices if weight.ndim >= 2 else others).append(weight)
    decay = optimizer.weight_decay
    if optimizer.name is OptimizerName.SGD:
        return DecayedSGD(
            [{"params": matrices, "decay": decay}, {"params": others, "decay": 0.0}],
            lr=optimizer.lr,
            momentum=optimizer.beta1,
        )
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}],
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
    )


def documents_apart(
    tokens: "np.ndarray[Any, Any]", marks: "np.ndarray[Any, Any]"
) -> "list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]":
    """Return the documents of a microbatch as `train_on_targets` takes them, each by itself.

    Args:
        tokens: (B, T + 1) ids.
        marks: Alike, as `TokenSource.marks` has them.
    """
    targets = np.where(marks[:, 1:] & TARGET, tokens[:, 1:], -100)
    found = []
    for row, row_targets, begins in zip(tokens, targets, marks & BEGINS, strict=True):
        places = np.flatnonzero(begins[1:-1]) + 1
        pieces = (np.split(each[None], places, axis=1) for each in (row[:-1], row_targets))
        found += zip(*pieces, strict=True)
    return found


def train_on_targets(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    seed: int,
    batches: "Iterable[Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]]",
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on inputs and targets, (B, T) each, of which those of -100 are not learnt.

    Else as `train_reference`. The mean is over the targets of a whole batch, in which T may differ.
    """
    module = empty_model(model)
    drawn = {
        name: initial_weight(model, seed=seed, name=name, shape=shape).to(TORCH_DTYPES[model.dtype])
        for name, shape in model_shapes(model).items()
    }
    module.place(drawn)
    parameters = list(module.parameters())
    stepper = make_stepper(parameters, optimizer)
    losses = []
    for iteration, batch in enumerate(batches, start=1):
        for group in stepper.param_groups:
            group["lr"] = optimizer.lr * min(1.0, iteration / (optimizer.warmup_iterations + 1))
        stepper.zero_grad()
        logits = torch.cat([module(torch.from_numpy(read)).flatten(0, 1) for read, _ in batch])
        targets = torch.cat([torch.from_numpy(told).flatten() for _, told in batch])
        loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100)
        torch.autograd.backward([loss])
        if optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, optimizer.clip_norm)
        stepper.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in module.parameters_by_name().items()}


def train_reference(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    seed: int,
    batches: "Iterable[Sequence[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]]",
    *,
    delay: int = 0,
    change: Callable[[FirstStage], None] = lambda _: None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train from the seed's initial weights, one step per batch, on one CPU.

    Args:
        model: In float64 or float32. A bfloat16 model has master weights, which this loop lacks.
        optimizer: Its name and rates.
        seed: Seed of the initial weights.
        batches: The microbatches of each iteration, each (B, T + 1) token ids.
        delay: 1: each step is taken one iteration late, and the last is not taken.
        change: Called with the module before it trains.

    Returns:
        The mean loss of every iteration, and the final weights by name.
    """
    assert model.dtype.value != "bfloat16", model.dtype
    module = empty_model(model)
    dtype = TORCH_DTYPES[model.dtype]
    shapes = model_shapes(model).items()
    drawn = {name: initial_weight(model, seed=seed, name=name, shape=s) for name, s in shapes}
    module.place({name: weight.to(dtype) for name, weight in drawn.items()})
    change(module)
    parameters = list(module.parameters())
    stepper = make_stepper(parameters, optimizer)
    losses, pending = [], list[Tensor]()
    for iteration, batch in enumerate(batches, start=1):
        warmth = min(1.0, (iteration - delay) / (optimizer.warmup_iterations + 1))
        for group in stepper.param_groups:
            group["lr"] = optimizer.lr * warmth
        stepper.zero_grad()
        total = 0.0
        for microbatch in batch:
            tokens = torch.from_numpy(microbatch)
            logits, targets = module(tokens[:, :-1]), tokens[:, 1:].reshape(-1)
            flat = logits.reshape(-1, model.vocab_size)
            loss = torch.nn.functional.cross_entropy(flat, targets)
            torch.autograd.backward([loss])
            total += float(loss.detach())
        # Not the losses: gradients that are rounded on their way would be rounded otherwise.
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= len(batch)
        if optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, optimizer.clip_norm)
        pending = _exchange(parameters, pending) if delay else pending
        if iteration > delay:
            stepper.step()
        losses.append(total / len(batch))
    return losses, {name: p.detach() for name, p in module.parameters_by_name().items()}
