"""Rotary positions: each head's query and key are turned by an angle that grows with the position.

Pairs of the rotation are (i, i + E/2), as in Hugging Face checkpoints.

Legend: B sequences, T positions, H heads, E a head's width.

Source: RoFormer (arXiv:2104.09864), section 3.4.
"""

import torch
from torch import Tensor

from decod.model.config import ModelConfig

Rotary = tuple[Tensor, Tensor]
"""Cosines, and sines of which the first half is negative, each (T, 1, E) in the model's dtype."""


def rotary_tables(model: ModelConfig, length: int, *, dtype: torch.dtype, device: str) -> Rotary:
    """Return the tables of positions 0 .. length - 1.

    Angles are computed in float32 as Hugging Face does, in float64 for float64 models.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    head_width = model.hidden_size // model.num_attention_heads
    exponents = torch.arange(0, head_width, 2, dtype=wide) / head_width
    frequencies = 1.0 / (model.rope_theta**exponents)
    angles = torch.outer(torch.arange(length, dtype=wide), frequencies)[:, None]
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tables[0].to(device, dtype), tables[1].to(device, dtype)


def rotate(heads_BTHE: Tensor, rotary: Rotary) -> Tensor:
    """Return the heads, (B, T, H, E), turned by their positions' angles."""
    cos, sin = rotary
    first, second = heads_BTHE.chunk(2, dim=-1)
    # The few operations matter: on a CPU, four products and a concatenation take four times longer.
    return torch.cat((second, first), dim=-1).mul_(sin).addcmul_(heads_BTHE, cos)
