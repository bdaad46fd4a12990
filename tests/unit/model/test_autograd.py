"""Blocks that keep little have the outputs and gradients of plain autograd, as given outputs do."""

import subprocess
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decod.model.attention import rotary_tables
from decod.model.autograd import Output
from decod.model.llama import LlamaBlock
from decod.model.stage import TORCH_DTYPES, Stage
from decod.run.model_config import ModelConfig, ModelDtype
from decod.train.measure import held_bytes
from tests.support.devices import on_devices
from tests.support.reference import plain_autograd

SMALL = ModelConfig(
    vocab_size=11,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)

_ITERATION = """
import sys
from tests.unit.train.test_executor import contribute, make_relay, measure
relay = make_relay()
measure(relay, 1)
contribute(relay)
contribute(relay)
relay.propose(1, [], weights_total=1)
relay.commit(1)
print(*(name for name in ("sympy", "torch._dynamo") if name in sys.modules))
"""


@on_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_torch_s_to_the_last_bit(dtype: torch.dtype, device: str) -> None:
    entry = torch.randn(3, 4, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(4, 5, dtype=dtype, device=device, requires_grad=True)
    gradient = torch.randn(3, 5, dtype=dtype, device=device)
    torch.autograd.backward([(entry @ weight).tanh()], [gradient])
    expected = [entry.grad, weight.grad]
    entry.grad = weight.grad = None
    torch.autograd.backward([Output((entry @ weight).tanh()).given(gradient)])
    for tensor, grad in zip((entry, weight), expected, strict=True):
        assert grad is not None
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, grad)


def test_neither_output_nor_gradient_is_kept() -> None:
    entry = torch.ones(3, requires_grad=True)
    tensor, gradient = entry + 1.0, torch.ones(3)
    refs = weakref.ref(tensor), weakref.ref(gradient)
    output = Output(tensor)
    del tensor
    assert refs[0]() is None
    torch.autograd.backward([output.given(gradient)])
    del gradient
    entry.grad = None
    assert refs[1]() is None


def test_an_iteration_loads_neither_sympy_nor_torch_s_compiler() -> None:
    """They cost a compute process a second of a processor, and tens of MiB."""
    command = [sys.executable, "-c", _ITERATION]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.split()) == (0, []), ended


def random_block(model: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> LlamaBlock:
    """A block whose every weight, norms and biases too, is random, and the same each time."""
    block = LlamaBlock(model).to(device, dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(0.3 * drawn + 0.1)
    return block


def outcome(model: ModelConfig, block: LlamaBlock) -> list[Tensor]:
    """The output, then the gradients of the input and of all parameters."""
    weight = block.input_layernorm.weight
    generator = torch.Generator().manual_seed(1)
    hidden, gradient = (
        torch.randn(2, 7, 24, generator=generator, dtype=torch.float64).to(weight) for _ in range(2)
    )
    before = hidden.requires_grad_().detach().clone()
    output = block(hidden, rotary_tables(model, 7, dtype=weight.dtype, device=str(weight.device)))
    sent = gradient.clone()
    torch.autograd.backward([output], [gradient])
    assert torch.equal(hidden.detach(), before)
    assert torch.equal(gradient, sent)
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
def test_output_and_gradients_are_those_of_autograd(
    dtype: torch.dtype, tolerance: float, changes: dict[str, Any], device: str
) -> None:
    """Plain autograd runs on the CPU."""
    model = replace(SMALL, **changes)
    ours = outcome(model, random_block(model, dtype, device))
    with plain_autograd():
        theirs = outcome(model, random_block(model, dtype))
    assert len(ours) == len(theirs) == 2 + len(list(LlamaBlock(model).parameters()))
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype
        error = (found.double().cpu() - expected.double()).norm() / expected.double().norm()
        assert float(error) <= tolerance


@on_devices
def test_outputs_have_the_same_bits_whether_anything_is_kept_or_not(device: str) -> None:
    block = random_block(SMALL, torch.float32, device)
    hidden = torch.randn(2, 7, 24, device=device)
    tables = rotary_tables(SMALL, 7, dtype=torch.float32, device=device)
    kept = block(hidden, tables)
    with torch.no_grad():
        assert torch.equal(block(hidden, tables), kept)


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
    for kind in (nullcontext(), plain_autograd()):
        stage = Stage(model, range(2)).to(device)
        with kind:
            stage(hidden)  # Tables, and what libraries keep, are no part of a microbatch.
            num_bytes = held_bytes(lambda stage=stage: stage(hidden), stage, hidden)
        found.append(num_bytes / (2 * 4 * 64 * 1024))
    ours, plain = found
    assert ours < 12
    # A GPU's own norm keeps less for plain blocks, too.
    assert plain > (20 if device == "cpu" else ours)
