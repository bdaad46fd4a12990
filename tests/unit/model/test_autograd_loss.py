"""The loss that never holds all logits equals torch's, and so do its gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from decod.model import autograd as loss_module
from decod.model.autograd import linear_cross_entropy
from tests.support.allocations import allocations_of
from tests.support.devices import on_devices

VOCABULARY = 128_256
"""Of Llama 3."""


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
    monkeypatch.setattr(loss_module, "LOSS_ROWS_MIN", 3)
    for name in ("_CHUNK_ELEMENTS", "_CHUNK_ELEMENTS_ACCELERATOR"):
        monkeypatch.setattr(loss_module, name, 1)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_gradients_the_loss_is_the_same(dtype: torch.dtype) -> None:
    hidden, table = torch.randn(300, 8).to(dtype), torch.randn(50_000, 8).to(dtype)
    targets = torch.randint(50_000, (300,))
    found = linear_cross_entropy(hidden, table.requires_grad_(), targets)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, table, targets), found.detach())
        taken = allocations_of(lambda: linear_cross_entropy(hidden, table, targets))
    assert taken.peak < 2.5 * 8 * 128 * 50_000


def test_a_vocabulary_of_128k_in_chunks_is_the_loss_in_one_piece() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 4, generator=generator, dtype=torch.float64)
    table = torch.randn(VOCABULARY, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (300,), generator=generator)
    for ours, theirs in zip(*losses_and_gradients(hidden, table, targets), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-12
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_logits_of_a_microbatch_never_exist_at_once() -> None:
    """Forward and backward: neither as one tensor, nor as the sum of several."""
    num_rows, width = 512, 16
    hidden = torch.randn(num_rows, width).requires_grad_()
    table = torch.randn(VOCABULARY, width).requires_grad_()
    targets = torch.randint(VOCABULARY, (num_rows,))

    def in_chunks() -> None:
        torch.autograd.backward([linear_cross_entropy(hidden, table, targets)])

    def in_one_piece() -> None:
        logits = functional.linear(hidden, table)
        torch.autograd.backward([functional.cross_entropy(logits, targets)])

    ours = allocations_of(in_chunks)
    hidden.grad = table.grad = None
    theirs = allocations_of(in_one_piece)
    whole_bytes = num_rows * VOCABULARY * 4
    gradient_bytes = VOCABULARY * width * 4
    assert ours.largest == whole_bytes / 4
    # Logits of a chunk, and the gradient of the head's weights once.
    assert ours.peak < 1.2 * (whole_bytes / 4 + gradient_bytes)
    assert theirs.peak >= 2 * whole_bytes


def test_a_second_backward_pass_is_an_error() -> None:
    """Gradients are scaled in place: a second scaling would be wrong without a word."""
    hidden, table = torch.randn(3, 2).requires_grad_(), torch.randn(5, 2).requires_grad_()
    loss = 2 * linear_cross_entropy(hidden, table, torch.tensor([0, 1, 2]))
    torch.autograd.backward([loss], retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward([loss])
