"""A stage's output, whose gradient comes later and from elsewhere.

torch takes a gradient where backward starts, but checks its shape with a module that loads sympy:
half a second of a processor and 34 MiB in each compute process (torch 2.13).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from typing_extensions import override


class Output:
    """What is kept of an output until its gradient comes: its graph, and not its memory.

    Args:
        tensor: Needs a gradient.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._given: list[Tensor] = []
        self._edge = get_gradient_edge(_Given.apply(tensor, self._given))  # type: ignore[no-untyped-call]

    def given(self, gradient: Tensor) -> GradientEdge:
        """Return where backward starts, with this gradient, of the output's shape and dtype."""
        assert (gradient.shape, gradient.dtype) == (self._shape, self._dtype)
        self._given[:] = [gradient]
        return self._edge


class _Given(torch.autograd.Function):
    """A number that stands for the output: its gradient is the one that was given."""

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
