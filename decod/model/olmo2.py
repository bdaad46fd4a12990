"""OLMo 2's block: as Llama's, but the norms come after attention and feed-forward network.

All queries of a position have one norm together, and all keys. Both ends are Llama's.

Legend: B sequences, T positions, D width, H query heads, K key-value heads, E a head's width.

Source: 2 OLMo 2 Furious (arXiv:2501.00656), section 3.1. Deviation in bfloat16: transformers rounds
after a norm's weight and after the rotation, and decod before them as well, as for Llama.
"""

from torch import Tensor, nn
from typing_extensions import override

from decod.model.attention import KeyValueCache, Rotary, causal_attention, rotate
from decod.model.autograd import projected
from decod.model.llama import RmsNorm, gated
from decod.run.model_config import ModelConfig


class Olmo2Attention(nn.Module):
    """Causal self-attention with rotary positions, and norms of queries and keys."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.hidden_size
        self.head_width = model.head_width
        self.q_proj = nn.Linear(width, model.query_width, bias=False)
        self.k_proj = nn.Linear(width, model.key_width, bias=False)
        self.v_proj = nn.Linear(width, model.key_width, bias=False)
        self.o_proj = nn.Linear(model.query_width, width, bias=False)
        self.q_norm = RmsNorm(model.query_width, model.norm_eps)
        self.k_norm = RmsNorm(model.key_width, model.norm_eps)

    @override
    def forward(
        self, hidden_BTD: Tensor, rotary: Rotary, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return what attention has read, (B, T, D). Arguments as for the block."""
        query_BTHE = rotate(self._heads(_normed(self.q_proj(hidden_BTD), self.q_norm)), rotary)
        key_BTKE = rotate(self._heads(_normed(self.k_proj(hidden_BTD), self.k_norm)), rotary)
        value_BTKE = self._heads(self.v_proj(hidden_BTD))
        result: Tensor = self.o_proj(causal_attention(query_BTHE, key_BTKE, value_BTKE, cache))
        return result

    def _heads(self, all_heads: Tensor) -> Tensor:
        return all_heads.view(*all_heads.shape[:-1], -1, self.head_width)


def _normed(activations: Tensor, norm: RmsNorm) -> Tensor:
    """Return the norm of what is kept for the backward pass, instead of the norm's parts."""
    return projected(norm.of, (activations, norm.weight), ())[0]


class Olmo2Mlp(nn.Module):
    """Feed-forward network whose inner layer is gated by a SiLU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    @override
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the network's output, (B, T, D)."""
        inputs = (self.gate_proj(hidden_BTD), self.up_proj(hidden_BTD))
        return projected(gated, inputs, (self.down_proj,))[0]


class Olmo2Block(nn.Module):
    """Attention, then feed-forward; a normed copy of each's output is added to the residual
    stream.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(model)
        self.post_attention_layernorm = RmsNorm(model.hidden_size, model.norm_eps)
        self.mlp = Olmo2Mlp(model)
        self.post_feedforward_layernorm = RmsNorm(model.hidden_size, model.norm_eps)

    @override
    def forward(
        self, hidden_BTD: Tensor, rotary: Rotary, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the residual stream after the block, (B, T, D). Arguments as for Llama's."""
        attended_BTD = self.self_attn(hidden_BTD, rotary, cache)
        hidden_BTD = hidden_BTD + _normed(attended_BTD, self.post_attention_layernorm)
        fed_BTD = self.mlp(hidden_BTD)
        return hidden_BTD + _normed(fed_BTD, self.post_feedforward_layernorm)
