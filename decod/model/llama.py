"""Llama's block: RMSNorm, rotary positions, grouped-query attention, SwiGLU; and both ends.

Qwen2 is the same with biases on the query, key and value projections. Qwen3 has no biases, but a
norm on every query and key, and heads whose width does not depend on the model's.

Legend: B sequences, T positions, D width, V vocabulary, H query heads, K key-value heads, E a
head's width, I inner width.

Source: LLaMA (arXiv:2302.13971), section 2.2; GQA (arXiv:2305.13245).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from decod.model.attention import KeyValueCache, Rotary, causal_attention, rotate
from decod.model.autograd import projected
from decod.run.model_config import ModelConfig


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
        if not hidden_BTD.is_cpu:
            return functional.rms_norm(hidden_BTD, weight_D.shape, weight_D, self.eps)
        # On CPUs torch's fused call is about three times slower than these operations.
        wide_BTD = hidden_BTD.to(torch.promote_types(hidden_BTD.dtype, torch.float32))
        scale_BT1 = torch.rsqrt(wide_BTD.pow(2).mean(-1, keepdim=True) + self.eps)
        return (hidden_BTD * scale_BT1).to(hidden_BTD.dtype) * weight_D


class LlamaAttention(nn.Module):
    """Causal self-attention with rotary positions; several query heads may share a key head."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.hidden_size
        bias = model.attention_bias
        self.head_width = model.head_width
        self.q_proj = nn.Linear(width, model.query_width, bias=bias)
        self.k_proj = nn.Linear(width, model.key_width, bias=bias)
        self.v_proj = nn.Linear(width, model.key_width, bias=bias)
        self.o_proj = nn.Linear(model.query_width, width, bias=False)
        self.q_norm: RmsNorm | None = None
        self.k_norm: RmsNorm | None = None
        if model.qk_norm:
            self.q_norm = RmsNorm(self.head_width, model.norm_eps)
            self.k_norm = RmsNorm(self.head_width, model.norm_eps)

    @override
    def forward(
        self,
        hidden_BTD: Tensor,
        norm: RmsNorm,
        rotary: Rotary,
        cache: KeyValueCache | None = None,
        mask_B1TT: Tensor | None = None,
    ) -> Tensor:
        """Return attention's contribution to the residual stream, (B, T, D).

        Args:
            hidden_BTD: Residual stream.
            norm: Makes the normed copy of it that is read.
            rotary: Angles of the positions.
            cache: Holds the positions before. The positions are added to it.
            mask_B1TT: As for `causal_attention`.
        """
        linears = (self.q_proj, self.k_proj, self.v_proj)
        heads = projected(norm.of, (hidden_BTD, norm.weight), linears)
        query_BTHE, key_BTKE, value_BTKE = (
            part.view(*part.shape[:-1], -1, self.head_width) for part in heads
        )
        query_BTHE = _placed(query_BTHE, self.q_norm, rotary)
        key_BTKE = _placed(key_BTKE, self.k_norm, rotary)
        mixed_BTD = causal_attention(query_BTHE, key_BTKE, value_BTKE, cache, mask_B1TT)
        result: Tensor = self.o_proj(mixed_BTD)
        return result


def _placed(heads_BTHE: Tensor, norm: RmsNorm | None, rotary: Rotary) -> Tensor:
    """Return queries or keys at their positions, normed if there is a norm."""
    if norm is not None:
        (heads_BTHE,) = projected(norm.of, (heads_BTHE, norm.weight), ())
    return rotate(heads_BTHE, rotary)


class SwiGlu(nn.Module):
    """Feed-forward network whose inner layer is gated by a SiLU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.hidden_size
        inner = model.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    @override
    def forward(self, hidden_BTD: Tensor, norm: RmsNorm) -> Tensor:
        """Return the network's contribution to the residual stream, (B, T, D).

        Args:
            hidden_BTD: Residual stream.
            norm: Makes the normed copy of it that is read.
        """
        linears = (self.gate_proj, self.up_proj)
        gate_BTI, up_BTI = projected(norm.of, (hidden_BTD, norm.weight), linears)
        (result,) = projected(gated, (gate_BTI, up_BTI), (self.down_proj,))
        return result


def gated(gate_BTI: Tensor, up_BTI: Tensor) -> Tensor:
    """Return the inner activations of a SwiGLU network, (B, T, I)."""
    return functional.silu(gate_BTI) * up_BTI


class LlamaBlock(nn.Module):
    """Attention, then feed-forward, each on a normed copy of the residual stream."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(model.hidden_size, model.norm_eps)
        self.self_attn = LlamaAttention(model)
        self.post_attention_layernorm = RmsNorm(model.hidden_size, model.norm_eps)
        self.mlp = SwiGlu(model)

    @override
    def forward(
        self,
        hidden_BTD: Tensor,
        rotary: Rotary,
        cache: KeyValueCache | None = None,
        mask_B1TT: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after the block, (B, T, D).

        Args:
            hidden_BTD: Residual stream before it.
            rotary: Angles of the positions.
            cache: Of the positions before.
            mask_B1TT: As for `causal_attention`.
        """
        read_BTD = self.self_attn(hidden_BTD, self.input_layernorm, rotary, cache, mask_B1TT)
        hidden_BTD = hidden_BTD + read_BTD
        result: Tensor = hidden_BTD + self.mlp(hidden_BTD, self.post_attention_layernorm)
        return result


class LlamaEnds(nn.Module):
    """Llama's parts outside its blocks, except the head."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.norm = RmsNorm(model.hidden_size, model.norm_eps)

    def enter(
        self,
        tokens_BT: Tensor,
        start: int = 0,  # noqa: ARG002 - as GPT-2's.
        places_BT: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Return the embedded tokens, (B, T, D)."""
        result: Tensor = self.embed_tokens(tokens_BT)
        return result

    def leave(self, hidden_BTD: Tensor) -> Tensor:
        """Return the normed residual stream, (B, T, D)."""
        result: Tensor = self.norm(hidden_BTD)
        return result

    def table(self) -> Tensor:
        """Return the embedding's weights, (V, D)."""
        return self.embed_tokens.weight
