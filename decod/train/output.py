"""A stage's output, whose gradient comes later and from elsewhere.

`torch.autograd.backward` takes gradients as arguments, but checks their shapes with a module that
loads sympy. That costs half a second of CPU time and 34 MiB in each compute process (torch 2.13).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from typing_extensions import override


class Output:
    """An output that waits for its gradient. Keeps the graph, but not the output's memory.

    Args:
        tensor: The output. It requires a gradient.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._given: list[Tensor] = []
        self._edge = get_gradient_edge(_Given.apply(tensor, self._given))  # type: ignore[no-untyped-call]

    def given(self, gradient: Tensor) -> GradientEdge:
        """Return the start of a backward pass with this gradient. Shape and dtype must match."""
        assert (gradient.shape, gradient.dtype) == (self._shape, self._dtype)
        self._given[:] = [gradient]
        return self._edge


class _Given(torch.autograd.Function):
    """A number in place of the output. Its gradient is the given one."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, given: list[Tensor]) -> Tensor:
        ctx.given = given
        return tensor.new_zeros(())

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.given.pop(), None
