"""The loss that never holds all logits equals torch's, and so do its gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from decod.model import loss as loss_module
from decod.model.loss import linear_cross_entropy
from tests.support.devices import on_devices


def losses_and_gradients(
    hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return loss and both gradients (of 3 times the loss): ours, then torch's in one piece."""
    found = []
    for ours in (True, False):
        hidden, table = (x.clone().requires_grad_() for x in (hidden_ND, table_VD))
        if ours:
            loss = linear_cross_entropy(hidden, table, targets_N)
        else:
            logits = functional.linear(hidden, table)
            wide = torch.promote_types(logits.dtype, torch.float32)
            loss = functional.cross_entropy(logits.to(wide), targets_N)
        assert loss.dtype == torch.promote_types(hidden.dtype, torch.float32)
        torch.autograd.backward([3 * loss])
        assert hidden.grad is not None
        assert table.grad is not None
        found.append((loss.detach(), hidden.grad, table.grad))
    return found


@on_devices
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
)
@pytest.mark.parametrize("num_rows", [1, 5, 6, 13])
def test_loss_and_gradients_equal_torchs(
    dtype: torch.dtype,
    tolerance: float,
    num_rows: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_module, "_ROWS_MIN", 3)
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", {"cpu": 1, "cuda": 1})
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, 8, generator=generator, dtype=torch.float64).to(dtype)
    table = torch.randn(11, 8, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, 11, (num_rows,), generator=generator)
    given = (each.to(device) for each in (hidden, table, targets))
    for ours, theirs in zip(*losses_and_gradients(*given), strict=True):
        assert ours.dtype == theirs.dtype
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert float(error) <= tolerance


@on_devices
def test_huge_logits_neither_overflow_nor_lose_the_loss(device: str) -> None:
    table = torch.tensor([[1e4], [-1e4]], device=device)
    hidden = torch.tensor([[10.0], [10.0]], device=device)
    targets = torch.tensor([0, 1], device=device)
    assert float(linear_cross_entropy(hidden, table, targets)) == pytest.approx(1e5)


def test_what_is_not_finite_shows_in_the_loss() -> None:
    hidden = torch.tensor([[float("inf"), 1.0]])
    assert not torch.isfinite(linear_cross_entropy(hidden, torch.eye(2), torch.tensor([1])))
