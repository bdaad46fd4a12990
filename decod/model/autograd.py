"""What decod adds to autograd: layers that keep little, and gradients that come from elsewhere.

Autograd keeps every tensor that an operation may need again. decod has many microbatches in flight,
so the kept memory decides how many fit on a host. Norms and gates are cheap: `projected` computes
them again, and keeps only what they are made from. For width 256 and inner width 688 in float32,
that is 11 instead of 21 KiB per position and block.

Legend: N positions, I inputs, O outputs of a layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from typing_extensions import override


class Output:
    """An output that waits for its gradient. Keeps the graph, but not the output's memory.

    `torch.autograd.backward` takes gradients as arguments, but checks their shapes with a module
    that loads sympy. That costs half a second of CPU time and 34 MiB in each compute process
    (torch 2.13).

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


def projected(
    make: Callable[..., Tensor], inputs: Sequence[Tensor], linears: Sequence[nn.Linear]
) -> tuple[Tensor, ...]:
    """Return linear layers of `make(*inputs)`. Keep the inputs alone, and make it again.

    Args:
        make: A cheap function that gives the same bits each time.
        inputs: Its arguments. All get a gradient.
        linears: The layers. None: what was made is returned itself.

    Returns:
        The output of each layer, which can be differentiated once.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        # Nothing is kept, or the compiler decides what is.
        return _projected(make(*inputs), [(layer.weight, layer.bias) for layer in linears])
    parameters = [each for layer in linears for each in (layer.weight, layer.bias)]
    result: tuple[Tensor, ...] = _Projected.apply(make, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    return result


def _projected(
    made: Tensor, parameters: Sequence[tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, ...]:
    if not parameters:
        return (made,)
    return tuple(functional.linear(made, weight_OI, bias_O) for weight_OI, bias_O in parameters)


class _Projected(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, make: Callable[..., Tensor], num_inputs: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.make, ctx.num_inputs = make, num_inputs
        ctx.save_for_backward(*tensors)
        inputs, parameters = tensors[:num_inputs], tensors[num_inputs:]
        return _projected(make(*inputs), list(zip(parameters[::2], parameters[1::2], strict=True)))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        inputs = [each.detach().requires_grad_() for each in tensors[: ctx.num_inputs]]
        weights, biases = tensors[ctx.num_inputs :: 2], tensors[ctx.num_inputs + 1 :: 2]
        with torch.enable_grad():
            made = ctx.make(*inputs)
            output = Output(made)
        made_NI = made.detach().flatten(0, -2)
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        made_gradient_NI = flat[0] @ weights[0] if weights else flat[0]
        for gradient_NO, weight_OI in zip(flat[1:], weights[1:], strict=True):
            made_gradient_NI.addmm_(gradient_NO, weight_OI)
        found: list[Tensor | None] = []
        for bias_O, gradient_NO in zip(biases, flat, strict=False):
            found.append(gradient_NO.T @ made_NI)
            found.append(None if bias_O is None else gradient_NO.sum(0))
        starts: Any = [output.given(made_gradient_NI.view_as(made))]
        torch.autograd.backward(starts)
        return None, None, *(each.grad for each in inputs), *found
