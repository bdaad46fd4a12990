"""Backward from a gradient that comes from elsewhere."""

import subprocess
import sys
import weakref

import pytest
import torch

from decod.train.output import Output
from tests.support.devices import on_devices

_ITERATION = """
import sys
from tests.unit.train.test_step import contribute, make_relay, measure
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
