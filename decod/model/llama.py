"""Llama's block: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Qwen2 is the same with biases on the query, key and value projections.

Legend: B sequences, T positions, D width, H query heads, K key-value heads, E a head's width.

Source: LLaMA (arXiv:2302.13971), section 2.2; RoFormer (arXiv:2104.09864), section 3.4; GQA
(arXiv:2305.13245). Pairs of the rotation are (i, i + E/2), as in Hugging Face checkpoints.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from decod.model.config import ModelConfig

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each (T, E/2) in the model's dtype."""


class RmsNorm(nn.Module):
    """Scales every position to a root mean square of 1, then by a learnt weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    @override
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the normed activations; the statistics are computed in float32 or wider."""
        if hidden_BTD.is_cuda:
            return functional.rms_norm(hidden_BTD, self.weight.shape, self.weight, self.eps)
        # On CPUs torch's fused call is about three times slower than these four operations.
        wide_BTD = hidden_BTD.float() if hidden_BTD.dtype == torch.bfloat16 else hidden_BTD
        mean_BT1 = wide_BTD.pow(2).mean(-1, keepdim=True)
        normed_BTD = wide_BTD * torch.rsqrt(mean_BT1 + self.eps)
        return normed_BTD.to(hidden_BTD.dtype) * self.weight


def rotary_tables(model: ModelConfig, length: int, *, dtype: torch.dtype, device: str) -> Rotary:
    """Return the cosines and sines of positions 0 .. length - 1.

    Angles are computed in float32 as Hugging Face does, in float64 for float64 models.

    Returns:
        Two tensors (length, E/2) of `dtype` on `device`.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    head_width = model.hidden_size // model.num_attention_heads
    exponents = torch.arange(0, head_width, 2, dtype=wide) / head_width
    frequencies = 1.0 / (model.rope_theta**exponents)
    angles = torch.outer(torch.arange(length, dtype=wide), frequencies)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _rotate(heads_BHTE: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = rotary
    first, second = heads_BHTE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class LlamaAttention(nn.Module):
    """Causal self-attention with rotary positions; several query heads may share a key head."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, bias = model.hidden_size, model.attention_bias
        self.head_width = width // model.num_attention_heads
        self.grouped = model.num_key_value_heads != model.num_attention_heads
        kv_width = self.head_width * model.num_key_value_heads
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=False)

    @override
    def forward(self, hidden_BTD: Tensor, rotary: Rotary) -> Tensor:
        """Return what attention adds to the residual stream, (B, T, D)."""
        split = (*hidden_BTD.shape[:2], -1, self.head_width)
        query_BHTE = _rotate(self.q_proj(hidden_BTD).view(split).transpose(1, 2), rotary)
        key_BKTE = _rotate(self.k_proj(hidden_BTD).view(split).transpose(1, 2), rotary)
        value_BKTE = self.v_proj(hidden_BTD).view(split).transpose(1, 2)
        mixed_BHTE = functional.scaled_dot_product_attention(
            query_BHTE, key_BKTE, value_BKTE, is_causal=True, enable_gqa=self.grouped
        )
        mixed_BTD = mixed_BHTE.transpose(1, 2).reshape(hidden_BTD.shape)
        result: Tensor = self.o_proj(mixed_BTD)
        return result


class SwiGlu(nn.Module):
    """Feed-forward network whose inner layer is gated by a SiLU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, inner = model.hidden_size, model.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    @override
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return what the network adds to the residual stream, (B, T, D)."""
        gated = functional.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD)
        result: Tensor = self.down_proj(gated)
        return result


class LlamaBlock(nn.Module):
    """Attention, then feed-forward, each on a normed copy of the residual stream."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(model.hidden_size, model.norm_eps)
        self.self_attn = LlamaAttention(model)
        self.post_attention_layernorm = RmsNorm(model.hidden_size, model.norm_eps)
        self.mlp = SwiGlu(model)

    @override
    def forward(self, hidden_BTD: Tensor, rotary: Rotary) -> Tensor:
        """Return the residual stream after the block, (B, T, D)."""
        hidden_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), rotary)
        result: Tensor = hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))
        return result
