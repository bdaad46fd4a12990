"""GPT-2's block: LayerNorm, attention, GELU, biases everywhere; and both ends.

Legend: B sequences, T positions, D width, V vocabulary, H heads, E a head's width.

Source: Language Models are Unsupervised Multitask Learners (GPT-2), section 2.3. Deviation: no
dropout, because a microbatch that is recomputed on another host must give the same result.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from decod.model.attention import KeyValueCache, Rotary, causal_attention
from decod.run.model_config import ModelConfig


class Projection(nn.Module):
    """A linear layer with a weight of shape (inputs, outputs), as in GPT-2's checkpoints."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_inputs, num_outputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    @override
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return (B, T, outputs)."""
        flat = torch.addmm(self.bias, hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), self.weight)
        return flat.view(*hidden_BTD.shape[:-1], -1)


class Gpt2Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.num_heads = model.num_attention_heads
        self.c_attn = Projection(model.hidden_size, 3 * model.hidden_size)
        self.c_proj = Projection(model.hidden_size, model.hidden_size)

    @override
    def forward(
        self,
        hidden_BTD: Tensor,
        cache: KeyValueCache | None = None,
        mask_B1TT: Tensor | None = None,
    ) -> Tensor:
        """Return attention's contribution to the residual stream, (B, T, D).

        With a cache, the positions follow those that it holds, and are added to it. The mask is
        that of `causal_attention`.
        """
        width = hidden_BTD.shape[-1]
        split = (*hidden_BTD.shape[:-1], self.num_heads, width // self.num_heads)
        parts = self.c_attn(hidden_BTD).split(width, -1)
        query, key, value = (part.view(split) for part in parts)
        result: Tensor = self.c_proj(causal_attention(query, key, value, cache, mask_B1TT))
        return result


class Gpt2Mlp(nn.Module):
    """Feed-forward network with the tanh form of GELU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Projection(model.hidden_size, model.intermediate_size)
        self.c_proj = Projection(model.intermediate_size, model.hidden_size)

    @override
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the network's contribution to the residual stream, (B, T, D)."""
        result: Tensor = self.c_proj(functional.gelu(self.c_fc(hidden_BTD), approximate="tanh"))
        return result


class Gpt2Block(nn.Module):
    """Attention, then feed-forward, each on a normed copy of the residual stream."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(model.hidden_size, eps=model.norm_eps)
        self.attn = Gpt2Attention(model)
        self.ln_2 = nn.LayerNorm(model.hidden_size, eps=model.norm_eps)
        self.mlp = Gpt2Mlp(model)

    @override
    def forward(
        self,
        hidden_BTD: Tensor,
        rotary: Rotary | None,
        cache: KeyValueCache | None = None,
        mask_B1TT: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after the block, (B, T, D). Arguments as for Llama's."""
        hidden_BTD = hidden_BTD + self.attn(self.ln_1(hidden_BTD), cache, mask_B1TT)
        result: Tensor = hidden_BTD + self.mlp(self.ln_2(hidden_BTD))
        return result


class Gpt2Ends(nn.Module):
    """GPT-2's parts outside its blocks, except the head."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(model.vocab_size, model.hidden_size)
        self.wpe = nn.Embedding(model.max_position_embeddings, model.hidden_size)
        self.ln_f = nn.LayerNorm(model.hidden_size, eps=model.norm_eps)

    def enter(self, tokens_BT: Tensor, start: int = 0, places_BT: Tensor | None = None) -> Tensor:
        """Return the embedded tokens plus their positions, (B, T, D): from `start` on, or given."""
        if places_BT is None:
            positions_TD = self.wpe.weight[start : start + tokens_BT.shape[1]]
        else:
            positions_TD = self.wpe(places_BT)
        result: Tensor = self.wte(tokens_BT) + positions_TD
        return result

    def leave(self, hidden_BTD: Tensor) -> Tensor:
        """Return the normed residual stream, (B, T, D)."""
        result: Tensor = self.ln_f(hidden_BTD)
        return result

    def table(self) -> Tensor:
        """Return the embedding's weights, (V, D)."""
        return self.wte.weight
