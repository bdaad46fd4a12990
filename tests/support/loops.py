"""Small training loops of the collaborative optimizer's tests."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import decod.optimizer.session
from decod.optimizer.muon import MuonWithAdamW
from decod.optimizer.optimizer import CollaborativeOptimizer
from tests.support.fake_node import FakeNode

BATCH = 4
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return MuonWithAdamW(nn.ParameterList(parameters), lr=0.01)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def make_model(dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model.to(dtype)


def batches(
    num: int, dtype: torch.dtype = torch.float64, seed: int = 2, size: int = BATCH
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 5, generator=generator, dtype=dtype),
            torch.randn(size, 3, generator=generator, dtype=dtype),
        )
        for _ in range(num)
    ]


def backward(model: nn.Module, batch: tuple[Tensor, Tensor], scale: float = 1.0) -> Tensor:
    """One pass of a loop; returns the loss."""
    inputs, targets = batch
    loss = nn.functional.mse_loss(model(inputs), targets)
    (loss * scale if scale != 1 else loss).backward()
    return loss


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models hold the same bits."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in ((a.detach().contiguous(), b.detach().contiguous()) for a, b in pairs)
    )


def collaborate(
    node: FakeNode, wrapped: torch.optim.Optimizer, **settings: Any
) -> CollaborativeOptimizer:
    """Wrap an optimizer, with a fake node."""
    before = decod.optimizer.session.start_node
    decod.optimizer.session.start_node = node.connect  # type: ignore[assignment]
    usual: dict[str, Any] = {"target_batch_size": BATCH, "batch_size_per_step": BATCH}
    try:
        return CollaborativeOptimizer(
            wrapped, **{"run": "test", "verbose": False, **usual, **settings}
        )
    finally:
        decod.optimizer.session.start_node = before


def assert_counts(optimizer: CollaborativeOptimizer) -> None:
    """Every sample is somewhere, and nowhere twice."""
    assert optimizer.samples_stepped == (
        optimizer.samples_contributed + optimizer.samples_outstanding + optimizer.samples_dropped
    )
