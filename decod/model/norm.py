"""RMSNorm: scales every position to a root mean square of 1, then by a learnt weight.

Statistics are computed in float32 or wider, as Hugging Face does.

Legend: B sequences, T positions, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from decod.model.fused import fused


class RmsNorm(nn.Module):
    """The norm with its weight (D,)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    @override
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the normed activations, (B, T, D)."""
        return rms_norm(hidden_BTD, self.weight, self.eps)


def rms_norm(hidden_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the normed activations, (B, T, D), in the input's dtype."""
    if hidden_BTD.is_cuda:
        return functional.rms_norm(hidden_BTD, weight_D.shape, weight_D, eps)
    # On CPUs torch's fused call is about three times slower than these operations.
    return scaled(hidden_BTD, rms_scale(hidden_BTD, eps), weight_D)


@fused
def rms_scale(hidden_BTD: Tensor, eps: float) -> Tensor:
    """Return the inverse of each position's root mean square, (B, T, 1), float32 or wider."""
    wide_BTD = hidden_BTD.to(torch.promote_types(hidden_BTD.dtype, torch.float32))
    return torch.rsqrt(wide_BTD.pow(2).mean(-1, keepdim=True) + eps)


@fused
def scaled(hidden_BTD: Tensor, scale_BT1: Tensor, weight_D: Tensor) -> Tensor:
    """Return the normed activations of an input, given its `rms_scale`."""
    return (hidden_BTD * scale_BT1).to(hidden_BTD.dtype) * weight_D


@fused
def rms_norm_backward(
    hidden_BTD: Tensor, scale_BT1: Tensor, weight_D: Tensor, gradient_BTD: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input, (B, T, D), and of the weight, (D,).

    The input may have more dims than three: (B, T, H, D) if it is heads.

    Args:
        hidden_BTD: Input of the norm.
        scale_BT1: Its `rms_scale`.
        weight_D: The norm's weight.
        gradient_BTD: Gradient of the norm's output.
    """
    wide_BTD, wide_D = hidden_BTD.to(scale_BT1.dtype), weight_D.to(scale_BT1.dtype)
    gradient_BTD = gradient_BTD.to(scale_BT1.dtype)
    products_ND = (gradient_BTD * wide_BTD).flatten(0, -2)
    weight_gradient_D = scale_BT1.flatten() @ products_ND
    along_BT1 = (products_ND @ wide_D).view_as(scale_BT1) * scale_BT1.pow(3) / -len(weight_D)
    result_BTD = (gradient_BTD * wide_D).mul_(scale_BT1).addcmul_(wide_BTD, along_BT1)
    return result_BTD.to(hidden_BTD.dtype), weight_gradient_D.to(weight_D.dtype)
