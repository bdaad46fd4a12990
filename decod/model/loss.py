"""Head and cross-entropy in one, a few positions at a time, so that the logits never exist whole.

With large vocabularies, the largest tensors of a run are the logits and the tensors that autograd
keeps of them: four of shape (N, V). Here each chunk of rows is turned into its own gradient in
place, while it is in the cache, and is then multiplied away. Backward only scales the gradients
that forward computed. Their memory is that of the head's weights, in float32 or wider, whatever the
number of positions.

Legend: N positions, D width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from decod.model.shape import LOSS_ROWS_MIN

_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits at a time: enough to fill a GPU, and few enough for a CPU's cache."""


def linear_cross_entropy(hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits `hidden_ND @ table_VD.T`.

    Args:
        hidden_ND: Normed residual stream.
        table_VD: The head's weights, with the dtype and device of `hidden_ND`.
        targets_N: int64, below V.

    Returns:
        A scalar in float32 or wider. It can be differentiated once.
    """
    if not torch.is_grad_enabled():
        return _loss_alone(hidden_ND, table_VD, targets_N)
    result: Tensor = _LinearCrossEntropy.apply(hidden_ND, table_VD, targets_N)  # type: ignore[no-untyped-call]
    return result


def _loss_alone(hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the loss, a third of the products, and no memory for gradients."""
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
    for here in _chunks(hidden_ND, table_VD):
        logits_CV = hidden_ND[here] @ table_VD.T
        loss += _loss_of(logits_CV, targets_N[here, None], wide)
        # Otherwise they would exist while the next ones are computed.
        del logits_CV
    return loss / len(hidden_ND)


def _chunks(hidden_ND: Tensor, table_VD: Tensor) -> Iterator[slice]:
    size = max(LOSS_ROWS_MIN, _CHUNK_ELEMENTS[hidden_ND.device.type] // len(table_VD))
    for start in range(0, len(hidden_ND), size):
        yield slice(start, start + size)


def _loss_of(logits_CV: Tensor, targets_C1: Tensor, wide: torch.dtype) -> Tensor:
    """Return the sum of some rows' losses. Logits of the wide dtype are changed."""
    return _exponentiate(logits_CV.to(wide), targets_C1)[1]


def _loss_to_gradient(
    logits_CV: Tensor, targets_C1: Tensor, num_rows: int, wide: torch.dtype
) -> Tensor:
    """Return the sum of some rows' losses. Make their logits the gradient of the mean of all.

    Args:
        logits_CV: Overwritten, so that logits and gradient take memory once.
        targets_C1: The right classes.
        num_rows: N.
        wide: Dtype of the loss.
    """
    # The same tensor if the logits are wide already.
    wide_CV = logits_CV.to(wide)
    sums_C1, loss = _exponentiate(wide_CV, targets_C1)
    # From here on the gradient of the mean: (softmax - one-hot) / N.
    wide_CV.mul_(1 / (sums_C1 * num_rows))
    at_target_C1 = wide_CV.gather(1, targets_C1) - 1 / num_rows
    logits_CV.copy_(wide_CV.scatter_(1, targets_C1, at_target_C1))
    return loss


def _exponentiate(logits_CV: Tensor, targets_C1: Tensor) -> tuple[Tensor, Tensor]:
    """Make logits their exponentials, less by one factor in each row. Return row sums and loss.

    Args:
        logits_CV: float32 or wider. Changed.
        targets_C1: int64, below V.

    Returns:
        Sums of the rows' exponentials, (C, 1), and the sum of the rows' losses, a scalar.
    """
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    at_target_C1 = logits_CV.gather(1, targets_C1)
    sums_C1 = logits_CV.sub_(largest_C1).exp_().sum(-1, keepdim=True)
    return sums_C1, (sums_C1.log() + largest_C1 - at_target_C1).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor) -> Tensor:
        num_rows = len(hidden_ND)
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        gradient_ND = torch.empty_like(hidden_ND)
        # Wide, because a bfloat16 sum of many chunks would lose the small ones.
        gradient_VD = torch.zeros_like(table_VD, dtype=wide)
        for here in _chunks(hidden_ND, table_VD):
            rows_CD, targets_C1 = hidden_ND[here], targets_N[here, None]
            gradient_CV = rows_CD @ table_VD.T
            loss += _loss_to_gradient(gradient_CV, targets_C1, num_rows, wide)
            gradient_ND[here] = gradient_CV @ table_VD
            if gradient_CV.dtype == wide:
                gradient_VD.addmm_(gradient_CV.T, rows_CD)
            else:
                gradient_VD.add_(gradient_CV.T @ rows_CD)
            # Otherwise it would exist while the next one is computed.
            del gradient_CV
        ctx.save_for_backward(gradient_ND, gradient_VD.to(table_VD.dtype))
        return loss / num_rows

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient_ND, gradient_VD = ctx.saved_tensors
        # In place, because a copy would take as much as the head's weights. A second backward pass
        # through the same graph is an error of autograd's.
        return gradient_ND.mul_(gradient), gradient_VD.mul_(gradient), None
