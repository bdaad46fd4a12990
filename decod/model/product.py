"""Matrix products with a layer's weight, by the fastest way that this torch has.

On CPUs torch multiplies float32 matrices with MKL, and narrower types with oneDNN. On AMD's Zen 4,
oneDNN takes 10 % less time for activations times weights: 98 to 111 instead of 81 to 99 GFLOP/s on
one core, at 1024 positions and widths of 256 to 4096. It is no faster for weights' gradients, which
are therefore left to MKL. The operator is the one that torch's compiler emits for linear layers. If
it is missing, the plain product is used.

On CUDA all products are cuBLAS's, which also adds. bfloat16 products are added to float32 sums
without a bfloat16 product in between.

Legend: N positions, I inputs, O outputs.
"""

from functools import cache

import torch
from torch import Tensor


def project(input_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return `input_NI @ weight_OI.T`, (N, O). Autograd does not see it."""
    if input_NI.dtype == torch.float32 and not input_NI.is_cuda and _has_onednn_linear():
        result: Tensor = _onednn_linear(input_NI, weight_OI)
        return result
    return input_NI @ weight_OI.T


def add_product(sum_NO: Tensor, input_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Add `project` to a sum in place, and return it."""
    if input_NI.is_cuda:
        # cuBLAS adds while it writes: one pass over the sum less.
        return sum_NO.addmm_(input_NI, weight_OI.T)
    return sum_NO.add_(project(input_NI, weight_OI))


def add_weight_product(sum_OI: Tensor, gradient_NO: Tensor, input_NI: Tensor) -> None:
    """Add `gradient_NO.T @ input_NI` to a sum of weights' gradients in place.

    Args:
        sum_OI: In the dtype of the others or a wider one.
        gradient_NO: Gradient of a layer's output.
        input_NI: The layer's input.
    """
    if sum_OI.dtype == gradient_NO.dtype:
        sum_OI.addmm_(gradient_NO.T, input_NI)
    elif gradient_NO.is_cuda and _adds_wide(gradient_NO.device, gradient_NO.dtype, sum_OI.dtype):
        _add_wide(sum_OI, gradient_NO.T, input_NI)
    else:
        sum_OI.add_(gradient_NO.T @ input_NI)


def _add_wide(sum_OI: Tensor, left_ON: Tensor, right_NI: Tensor) -> None:
    """Add a product of narrow matrices to a wide sum. The product is never rounded nor stored."""
    torch.addmm(sum_OI, left_ON, right_NI, out_dtype=sum_OI.dtype, out=sum_OI)


@cache
def _adds_wide(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether this torch has `_add_wide` for a device and these dtypes."""
    trial, total = torch.ones(16, 16, device=device, dtype=narrow), torch.ones(16, 16).to(device)
    total = total.to(wide)
    try:
        _add_wide(total, trial, trial)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def _onednn_linear(input_NI: Tensor, weight_OI: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(input_NI, weight_OI, None, "none", [], "")
    return result


@cache
def _has_onednn_linear() -> bool:
    trial = torch.ones(2, 2)
    try:
        return torch.equal(_onednn_linear(trial, trial), trial @ trial)
    except (AttributeError, RuntimeError, TypeError):
        return False
