"""Head and cross-entropy in one, a few positions at a time, so that the logits never exist whole.

With large vocabularies, the largest tensors of a run are the logits and the tensors that autograd
keeps of them: four of shape (N, V). Here each chunk of rows is turned into its own gradient in
place, while it is in the cache, and is then multiplied away. Backward only scales the gradients
that forward computed.

Legend: N positions, D width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from decod.model.fused import fused
from decod.model.product import add_weight_product, project

_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits at a time: enough to fill a GPU, and few enough for a CPU's cache."""

_ROWS_MIN = 128
"""Fewer rows would make the matrix products slow."""


def linear_cross_entropy(hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits `hidden_ND @ table_VD.T`.

    Args:
        hidden_ND: Normed residual stream.
        table_VD: The head's weights, with the dtype and device of `hidden_ND`.
        targets_N: int64, below V.

    Returns:
        A scalar in float32 or wider. It can be differentiated once.
    """
    result: Tensor = _LinearCrossEntropy.apply(hidden_ND, table_VD, targets_N)  # type: ignore[no-untyped-call]
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor) -> Tensor:
        num_rows, num_classes = len(hidden_ND), len(table_VD)
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        gradient_ND = torch.empty_like(hidden_ND)
        # Wide, because a bfloat16 sum of many chunks would lose the small ones.
        gradient_VD = torch.zeros_like(table_VD, dtype=wide)
        chunk = max(_ROWS_MIN, _CHUNK_ELEMENTS[hidden_ND.device.type] // num_classes)
        for start in range(0, num_rows, chunk):
            here = slice(start, start + chunk)
            rows_CD, targets_C1 = hidden_ND[here], targets_N[here, None]
            loss_of_chunk, gradient_CV = _loss_and_gradient(
                project(rows_CD, table_VD), targets_C1, num_rows, wide
            )
            loss += loss_of_chunk
            gradient_ND[here] = project(gradient_CV, table_VD.T)
            add_weight_product(gradient_VD, gradient_CV, rows_CD)
        ctx.save_for_backward(gradient_ND, gradient_VD.to(table_VD.dtype))
        return loss / num_rows

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient_ND, gradient_VD = ctx.saved_tensors
        return gradient_ND * gradient, gradient_VD * gradient, None


@fused
def _loss_and_gradient(
    logits_CV: Tensor, targets_C1: Tensor, num_rows: int, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sum of some rows' losses, and the gradient of the mean over all rows.

    Args:
        logits_CV: Overwritten if it has the wide dtype already.
        targets_C1: The right classes.
        num_rows: N.
        wide: Dtype of the loss. The gradient has that of the logits.
    """
    narrow, logits_CV = logits_CV.dtype, logits_CV.to(wide)
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    at_target_C1 = logits_CV.gather(1, targets_C1)
    sums_C1 = logits_CV.sub_(largest_C1).exp_().sum(-1, keepdim=True)
    loss = (sums_C1.log() + largest_C1 - at_target_C1).sum()
    # From here on the gradient of the mean: (softmax - one-hot) / N.
    logits_CV.mul_(1 / (sums_C1 * num_rows))
    at_target_C1 = logits_CV.gather(1, targets_C1) - 1 / num_rows
    return loss, logits_CV.scatter_(1, targets_C1, at_target_C1).to(narrow)
