"""RMSNorm: scales every position to a root mean square of 1, then by a learnt weight.

Statistics are computed in float32 or wider, as Hugging Face does.

Legend: B sequences, T positions, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override


class RmsNorm(nn.Module):
    """The norm with its weight (D,)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    @override
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the normed activations, (B, T, D)."""
        return self.of(hidden_BTD, self.weight)

    def of(self, hidden_BTD: Tensor, weight_D: Tensor) -> Tensor:
        """Return the norm with a given weight, (B, T, D), in the input's dtype."""
        if hidden_BTD.is_cuda:
            return functional.rms_norm(hidden_BTD, weight_D.shape, weight_D, self.eps)
        # On CPUs torch's fused call is about three times slower than these operations.
        wide_BTD = hidden_BTD.to(torch.promote_types(hidden_BTD.dtype, torch.float32))
        scale_BT1 = torch.rsqrt(wide_BTD.pow(2).mean(-1, keepdim=True) + self.eps)
        return (hidden_BTD * scale_BT1).to(hidden_BTD.dtype) * weight_D
