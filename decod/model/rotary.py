"""Rotary positions: each head's query and key turn by an angle that grows with the position.

Pairs of the rotation are (i, i + E/2), as in Hugging Face checkpoints.

Legend: B sequences, T positions, H heads, E a head's width.

Source: RoFormer (arXiv:2104.09864), section 3.4. Scaling: Position Interpolation
(arXiv:2306.15595), section 3.2, for `linear`; Llama 3.1's own code for `llama3`.
"""

import math

import torch
from torch import Tensor

from decod.run.model_config import ModelConfig, RopeType

Rotary = tuple[Tensor, Tensor]
"""Cosines, and sines whose first half is negated, each (T, 1, E) in the model's dtype."""


def rotary_tables(model: ModelConfig, length: int, *, dtype: torch.dtype, device: str) -> Rotary:
    """Return the tables of positions 0 .. length - 1.

    Angles are computed in float32 as Hugging Face does, in float64 for float64 models.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.outer(torch.arange(length, dtype=wide), _frequencies(model, wide))[:, None]
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tables[0].to(device, dtype), tables[1].to(device, dtype)


def _frequencies(model: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Return the growth of each angle from one position to the next, (E / 2,)."""
    exponents = torch.arange(0, model.head_width, 2, dtype=dtype) / model.head_width
    plain = 1.0 / (model.rope_theta**exponents)
    if model.rope_type is RopeType.DEFAULT:
        return plain
    slow = plain / model.rope_factor
    if model.rope_type is RopeType.LINEAR:
        return slow
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    length = model.rope_original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    share = (length / wavelengths - low) / (high - low)
    # The order of operations is that of Hugging Face, because it decides the last bit.
    between = (1 - share) * plain / model.rope_factor + share * plain
    scaled = torch.where(wavelengths > length / low, slow, between)
    return torch.where(wavelengths < length / high, plain, scaled)


def rotate(heads_BTHE: Tensor, rotary: Rotary) -> Tensor:
    """Return the heads, (B, T, H, E), turned by their positions' angles."""
    cos, sin = rotary
    first, second = heads_BTHE.chunk(2, dim=-1)
    # Few operations matter here: on a CPU, four products and a concatenation take four times
    # longer.
    return torch.cat((second, first), dim=-1).mul_(sin).addcmul_(heads_BTHE, cos)
