"""Llama's block: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Qwen2 is the same with biases on the query, key and value projections. Qwen3 has no biases, but a
norm on every query and key, and heads whose width does not depend on the model's.

Legend: B sequences, T positions, D width, H query heads, K key-value heads, E a head's width.

Source: LLaMA (arXiv:2302.13971), section 2.2; GQA (arXiv:2305.13245).
"""

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from decod.model.attention import causal_attention
from decod.model.cache import KeyValueCache
from decod.model.later import WeightProducts
from decod.model.lean import add_gated_mlp, add_projection, norm_project, normed_rotated, rotated
from decod.model.norm import RmsNorm
from decod.model.rotary import Rotary, rotate
from decod.run.model_config import ModelConfig


class LlamaAttention(nn.Module):
    """Causal self-attention with rotary positions; several query heads may share a key head."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, bias = model.hidden_size, model.attention_bias
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
        self, hidden_BTD: Tensor, rotary: Rotary, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return attention's contribution to the residual stream, (B, T, D).

        With a cache, the positions follow those that it holds, and are added to it.
        """
        query_BTHE = self._split(self.q_proj(hidden_BTD))
        key_BTKE = self._split(self.k_proj(hidden_BTD))
        if self.q_norm is not None and self.k_norm is not None:
            query_BTHE, key_BTKE = self.q_norm(query_BTHE), self.k_norm(key_BTKE)
        query_BTHE, key_BTKE = rotate(query_BTHE, rotary), rotate(key_BTKE, rotary)
        value_BTKE = self._split(self.v_proj(hidden_BTD))
        result: Tensor = self.o_proj(causal_attention(query_BTHE, key_BTKE, value_BTKE, cache))
        return result

    def add_lean(
        self, hidden_BTD: Tensor, norm: RmsNorm, rotary: Rotary, later: WeightProducts | None
    ) -> Tensor:
        """Return the input plus `forward` of its norm. Keep less for backward."""
        linears = (self.q_proj, self.k_proj, self.v_proj)
        projected = norm_project(
            hidden_BTD,
            norm.weight,
            norm.eps,
            tuple(linear.weight for linear in linears),
            tuple(linear.bias for linear in linears),
            later,
        )
        query_BTHE, key_BTKE, value_BTKE = (self._split(part) for part in projected)
        query_BTHE = _placed_lean(query_BTHE, self.q_norm, rotary)
        key_BTKE = _placed_lean(key_BTKE, self.k_norm, rotary)
        mixed_BTD = causal_attention(query_BTHE, key_BTKE, value_BTKE)
        return add_projection(hidden_BTD, mixed_BTD, self.o_proj.weight, later)

    def _split(self, projected_BTD: Tensor) -> Tensor:
        return projected_BTD.view(*projected_BTD.shape[:-1], -1, self.head_width)


def _placed_lean(heads_BTHE: Tensor, norm: RmsNorm | None, rotary: Rotary) -> Tensor:
    """Return queries or keys at their positions, normed if there is a norm."""
    if norm is None:
        return rotated(heads_BTHE, rotary)
    return normed_rotated(heads_BTHE, norm.weight, norm.eps, rotary)


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
        """Return the network's contribution to the residual stream, (B, T, D)."""
        gated = functional.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD)
        result: Tensor = self.down_proj(gated)
        return result


class LlamaBlock(nn.Module):
    """Attention, then feed-forward, each on a normed copy of the residual stream.

    Args:
        model: Widths and numbers of heads.
        lean: Keep less for backward. False is plain autograd, which serves as the oracle and as
            the baseline of decod's benchmarks.
    """

    def __init__(self, model: ModelConfig, *, lean: bool = False) -> None:
        super().__init__()
        self.lean = lean
        self.input_layernorm = RmsNorm(model.hidden_size, model.norm_eps)
        self.self_attn = LlamaAttention(model)
        self.post_attention_layernorm = RmsNorm(model.hidden_size, model.norm_eps)
        self.mlp = SwiGlu(model)

    @override
    def forward(
        self,
        hidden_BTD: Tensor,
        rotary: Rotary,
        later: WeightProducts | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return the residual stream after the block, (B, T, D).

        Args:
            hidden_BTD: Residual stream before it.
            rotary: Angles of the positions.
            later: Takes the products of weights' gradients; lean blocks only.
            cache: Of the positions before; not for lean blocks.
        """
        before, after = self.input_layernorm, self.post_attention_layernorm
        if self.lean:
            hidden_BTD = self.self_attn.add_lean(hidden_BTD, before, rotary, later)
            mlp = self.mlp
            weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
            return add_gated_mlp(hidden_BTD, after.weight, after.eps, weights, later)
        hidden_BTD = hidden_BTD + self.self_attn(before(hidden_BTD), rotary, cache)
        result: Tensor = hidden_BTD + self.mlp(after(hidden_BTD))
        return result
