"""Llama's block: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Qwen2 is the same with biases on the query, key and value projections.

Legend: B sequences, T positions, D width, H query heads, K key-value heads, E a head's width.

Source: LLaMA (arXiv:2302.13971), section 2.2; GQA (arXiv:2305.13245).
"""

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from decod.model.cache import KeyValueCache
from decod.model.config import ModelConfig
from decod.model.later import WeightProducts
from decod.model.lean import add_gated_mlp, add_projection, norm_project, rotated
from decod.model.norm import RmsNorm
from decod.model.rotary import Rotary, rotate


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
    def forward(
        self, hidden_BTD: Tensor, rotary: Rotary, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return attention's contribution to the residual stream, (B, T, D).

        With a cache, the positions follow those that it holds, and are added to it.
        """
        query_BTHE = rotate(self._split(self.q_proj(hidden_BTD)), rotary)
        key_BTKE = rotate(self._split(self.k_proj(hidden_BTD)), rotary)
        value_BTKE = self._split(self.v_proj(hidden_BTD))
        mixed_BTD = self._attend(query_BTHE, key_BTKE, value_BTKE, cache)
        result: Tensor = self.o_proj(mixed_BTD)
        return result

    def add_lean(
        self, hidden_BTD: Tensor, norm: RmsNorm, rotary: Rotary, later: WeightProducts | None
    ) -> Tensor:
        """Return the input plus `forward` of its norm. Keep less for backward."""
        linears = (self.q_proj, self.k_proj, self.v_proj)
        query_BTD, key_BTD, value_BTD = norm_project(
            hidden_BTD,
            norm.weight,
            norm.eps,
            tuple(linear.weight for linear in linears),
            tuple(linear.bias for linear in linears),
            later,
        )
        query_BTHE = rotated(self._split(query_BTD), rotary)
        key_BTKE = rotated(self._split(key_BTD), rotary)
        mixed_BTD = self._attend(query_BTHE, key_BTKE, self._split(value_BTD))
        return add_projection(hidden_BTD, mixed_BTD, self.o_proj.weight, later)

    def _split(self, projected_BTD: Tensor) -> Tensor:
        return projected_BTD.view(*projected_BTD.shape[:-1], -1, self.head_width)

    def _attend(
        self,
        query_BTHE: Tensor,
        key_BTKE: Tensor,
        value_BTKE: Tensor,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        key_BKTE, value_BKTE = key_BTKE.transpose(1, 2), value_BTKE.transpose(1, 2)
        if cache is not None:
            key_BKTE, value_BKTE = cache.extend(key_BKTE, value_BKTE)
        mixed_BHTE = functional.scaled_dot_product_attention(
            query_BTHE.transpose(1, 2),
            key_BKTE,
            value_BKTE,
            # A single new position may look at all that the cache holds.
            is_causal=cache is None or query_BTHE.shape[1] > 1,
            enable_gqa=self.grouped,
        )
        return mixed_BHTE.transpose(1, 2).flatten(2)


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
