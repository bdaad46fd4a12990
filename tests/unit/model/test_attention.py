"""Attention over long sequences never holds the scores of all pairs of positions."""

import pytest
import torch
from torch import Tensor

from decod.model.attention import causal_attention
from decod.model.stage import FirstStage
from decod.run.model_config import FAMILIES, Architecture, ModelConfig
from tests.support.allocations import allocations_of

torch.set_num_threads(1)


def heads(num: int, length: int, *, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, length, num, 8, generator=generator, dtype=torch.float64)
    return drawn.to(dtype).requires_grad_()


@pytest.mark.parametrize("num_key_heads", [1, 2, 6])
def test_grouped_heads_read_what_the_formula_says(num_key_heads: int) -> None:
    query, key, value = (
        heads(num, 11, seed=seed) for seed, num in enumerate((6, num_key_heads, num_key_heads))
    )
    found = causal_attention(query, key, value)
    groups = 6 // num_key_heads
    wide_key, wide_value = (x.repeat_interleave(groups, 2) for x in (key, value))
    scores = torch.einsum("bthe,bshe->bhts", query, wide_key) / 8**0.5
    future = torch.ones(11, 11, dtype=torch.bool).triu(1)
    chances = scores.masked_fill(future, -torch.inf).softmax(-1)
    expected = torch.einsum("bhts,bshe->bthe", chances, wide_value).flatten(2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64)
    gradients = [
        torch.autograd.grad([(each * weights).sum()], [query, key, value])
        for each in (found, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_sequences_of_8k_take_memory_that_grows_with_their_length(
    architecture: Architecture,
) -> None:
    length = 8192
    has = FAMILIES[architecture].has
    model = ModelConfig(
        model_type=architecture,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1 if "num_key_value_heads" in has else 2,
        max_position_embeddings=length,
        qk_norm="qk_norm" in has,
    )
    module = FirstStage(model, range(1))
    tokens = torch.randint(model.vocab_size, (1, length + 1))

    def train() -> None:
        loss = module.loss(module.embed(tokens[:, :-1]), tokens[:, 1:])
        torch.autograd.backward([loss])
        assert torch.isfinite(loss)

    assert allocations_of(train).peak < length * length, "a byte for each pair of positions"
