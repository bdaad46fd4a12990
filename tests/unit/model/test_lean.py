"""Blocks that keep little for backward have the outputs and gradients of plain autograd."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decod.model.later import WeightProducts
from decod.model.llama import LlamaBlock
from decod.model.rotary import rotary_tables
from decod.model.stage import TORCH_DTYPES, Stage
from decod.run.model_config import ModelConfig, ModelDtype
from decod.train.measure import held_bytes
from tests.support.devices import on_devices

SMALL = ModelConfig(
    vocab_size=11,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def random_block(
    model: ModelConfig, dtype: torch.dtype, *, lean: bool, device: str = "cpu"
) -> LlamaBlock:
    """A block whose every weight, norms and biases too, is random; the same for both kinds."""
    block = LlamaBlock(model, lean=lean)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = (0.3 * drawn + 0.1).to(device, dtype)
    return block


def outcome(
    model: ModelConfig, block: LlamaBlock, sums: list[Tensor] | None = None
) -> list[Tensor]:
    """The output, then the gradients of the input and of all parameters.

    With `sums`, one a parameter, weights' gradients are put off, and added to these in the end.
    """
    device = block.input_layernorm.weight.device
    later = None if sums is None else WeightProducts(zip(block.parameters(), sums, strict=True))
    generator, dtype = torch.Generator().manual_seed(1), next(block.parameters()).dtype
    hidden, gradient = (
        torch.randn(2, 7, 24, generator=generator, dtype=torch.float64).to(device, dtype)
        for _ in range(2)
    )
    before = hidden.requires_grad_().detach().clone()
    tables = rotary_tables(model, 7, dtype=dtype, device=str(device))
    output = block(hidden, tables, later)
    sent = gradient.clone()
    torch.autograd.backward([output], [gradient])
    assert torch.equal(hidden.detach(), before)
    assert torch.equal(gradient, sent)
    if later is not None and sums is not None:
        assert hidden.grad is not None
        later.compute()
        assert not later
        for parameter, total in zip(block.parameters(), sums, strict=True):
            parameter.grad = (total if parameter.grad is None else parameter.grad).to(dtype)
    gradients = [tensor.grad for tensor in (hidden, *block.parameters())]
    return [output.detach(), *(found for found in gradients if found is not None)]


@on_devices
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)],
)
@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": True}, {}, {"qk_norm": True}, {"qk_norm": True, "head_dim": 10}],
)
@pytest.mark.parametrize("put_off", [True, False])
def test_output_and_gradients_are_those_of_autograd(
    dtype: torch.dtype, tolerance: float, changes: dict[str, Any], device: str, *, put_off: bool
) -> None:
    """Plain autograd runs on the CPU."""
    model = replace(SMALL, **changes)
    ours = random_block(model, dtype, lean=True, device=device)
    theirs = random_block(model, dtype, lean=False)
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in ours.parameters()]
    if dtype == torch.float32:
        sums = [total.float() for total in sums]
    lean, plain = outcome(model, ours, sums if put_off else None), outcome(model, theirs)
    assert len(lean) == len(plain) == 2 + len(list(LlamaBlock(model).parameters()))
    for found, expected in zip(lean, plain, strict=True):
        assert found.dtype == expected.dtype
        error = (found.double().cpu() - expected.double()).norm() / expected.double().norm()
        assert float(error) <= tolerance


@on_devices
def test_less_is_kept(device: str) -> None:
    model = ModelConfig(
        vocab_size=11,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        dtype=ModelDtype.FLOAT32,
    )
    hidden = torch.randn(
        4, 64, 256, dtype=TORCH_DTYPES[model.dtype], device=device, requires_grad=True
    )
    found = []
    for kind in (True, False):
        stage = Stage(model, range(2), lean=kind).to(device)
        stage(hidden)  # Tables, and what libraries keep, are no part of a microbatch.
        num_bytes = held_bytes(lambda stage=stage: stage(hidden), stage, hidden)
        found.append(num_bytes / (2 * 4 * 64 * 1024))
    lean, plain = found
    assert lean < 13.5
    # CUDA's own norm keeps less for plain blocks, too.
    assert plain > (20 if device == "cpu" else lean)
