"""What decod adds to autograd: layers that keep little, gradients from elsewhere, loss in chunks.

Autograd keeps every tensor that an operation may need again. decod has many microbatches in flight,
so the kept memory decides how many fit on a host. Norms and gates are cheap: `projected` computes
them again, and keeps only what they are made from. For width 256 and inner width 688 in float32,
that is 11 instead of 21 KiB per position and block.

With large vocabularies, the largest tensors of a run are the logits and the tensors that autograd
keeps of them: four of shape (N, V). `linear_cross_entropy` takes a few positions at a time, so that
the logits never exist whole. Each chunk of rows is turned into its own gradient in place, while it
is in the cache, and is then multiplied away. The backward pass only scales the gradients that the
forward pass computed. Their memory is that of the head's weights, in float32 or wider, whatever the
number of positions.

Legend: N positions, I inputs, O outputs of a layer, D width, V vocabulary, C positions of a chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from typing_extensions import override

from decod.model.shape import LOSS_ROWS_MIN


class Output:
    """An output that waits for its gradient. Keeps the graph, but not the output's memory.

    `torch.autograd.backward` takes gradients as arguments, but checks their shapes with a module
    that loads sympy. That costs half a second of CPU time and 34 MiB in each compute process
    (torch 2.13).

    Args:
        tensor: The output. It requires a gradient.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._shape = tensor.shape
        self._dtype = tensor.dtype
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
    make: Callable[..., Tensor], inputs: Sequence[Tensor], layers: Sequence[nn.Module]
) -> tuple[Tensor, ...]:
    """Return layers of `make(*inputs)`. Keep the inputs alone, and make it again.

    Args:
        make: A cheap function that gives the same bits each time.
        inputs: Its arguments. All get a gradient.
        layers: The layers. None: what was made is returned itself.

    Returns:
        The output of each layer, which can be differentiated once.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        # Nothing is kept, or the compiler decides what is.
        return _layers_of(make(*inputs), layers)
    again = _Again(make, inputs)
    made: Tensor = _Made.apply(again, *inputs)  # type: ignore[no-untyped-call]
    memory = made.untyped_storage().data_ptr()

    def pack(kept: Tensor) -> "Tensor | _View":
        if kept.untyped_storage().data_ptr() != memory:
            return kept
        return _View(again, kept.shape, kept.stride(), int(kept.storage_offset()))

    with saved_tensors_hooks(pack, _unpack):
        return _layers_of(made, layers)


def _layers_of(made: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    return tuple(layer(made) for layer in layers) if layers else (made,)


class _Again:
    """What makes a tensor again for a backward pass: once, however many layers ask."""

    def __init__(self, make: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        self.make = make
        self._inputs = inputs
        self._made: tuple[list[Tensor], Tensor] | None = None

    def made(self) -> Tensor:
        """Return the tensor."""
        return self._graph()[1].detach()

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradients of the inputs, and forget what was made."""
        inputs, made = self._graph()
        with torch.enable_grad():
            starts: Any = [Output(made).given(gradient)]
        torch.autograd.backward(starts)
        self._made = None
        return [each.grad for each in inputs]

    def _graph(self) -> tuple[list[Tensor], Tensor]:
        if self._made is None:
            inputs = [each.detach().requires_grad_(each.requires_grad) for each in self._inputs]
            with torch.enable_grad():
                self._made = inputs, self.make(*inputs)
        return self._made


class _Made(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, again: _Again, *inputs: Tensor) -> Tensor:
        ctx.again = again
        # For those who look at what is kept, and for autograd's check that nobody changes it.
        ctx.save_for_backward(*inputs)
        return again.make(*inputs)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.again.backward(gradient)


@dataclass(frozen=True, slots=True)
class _View:
    """A view of the tensor that is made again, in place of it."""

    again: _Again
    shape: torch.Size
    strides: Sequence[int]
    offset: int


def _unpack(kept: Tensor | _View) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.again.made().as_strided(kept.shape, kept.strides, kept.offset)


_CHUNK_ELEMENTS = 1 << 20
_CHUNK_ELEMENTS_ACCELERATOR = 1 << 26
"""Logits at a time: enough to fill a GPU, and few enough for a CPU's cache."""


def linear_cross_entropy(hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits `hidden_ND @ table_VD.T`.

    Args:
        hidden_ND: Normed residual stream.
        table_VD: The head's weights, with the dtype and device of `hidden_ND`.
        targets_N: int64, below V.

    Returns:
        A scalar in float32 or wider. It can be differentiated once.
    """
    if not torch.is_grad_enabled():
        return _loss_alone(hidden_ND, table_VD, targets_N)
    result: Tensor = _LinearCrossEntropy.apply(hidden_ND, table_VD, targets_N)  # type: ignore[no-untyped-call]
    return result


def _loss_alone(hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the loss, a third of the products, and no memory for gradients."""
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
    for here in _chunks(hidden_ND, table_VD):
        logits_CV = hidden_ND[here] @ table_VD.T
        loss += _loss_of(logits_CV, targets_N[here, None], wide)
        # Otherwise they would exist while the next ones are computed.
        del logits_CV
    return loss / len(hidden_ND)


def _chunks(hidden_ND: Tensor, table_VD: Tensor) -> Iterator[slice]:
    num_elements = _CHUNK_ELEMENTS if hidden_ND.is_cpu else _CHUNK_ELEMENTS_ACCELERATOR
    size = max(LOSS_ROWS_MIN, num_elements // len(table_VD))
    for start in range(0, len(hidden_ND), size):
        yield slice(start, start + size)


def _loss_of(logits_CV: Tensor, targets_C1: Tensor, wide: torch.dtype) -> Tensor:
    """Return the sum of some rows' losses. Logits of the wide dtype are changed."""
    return _exponentiate(logits_CV.to(wide), targets_C1)[1]


def _loss_to_gradient(
    logits_CV: Tensor, targets_C1: Tensor, num_rows: int, wide: torch.dtype
) -> Tensor:
    """Return the sum of some rows' losses. Make their logits the gradient of the mean of all.

    Args:
        logits_CV: Overwritten, so that logits and gradient take memory once.
        targets_C1: The right classes.
        num_rows: N.
        wide: Dtype of the loss.
    """
    # The same tensor if the logits are wide already.
    wide_CV = logits_CV.to(wide)
    sums_C1, loss = _exponentiate(wide_CV, targets_C1)
    # From here on the gradient of the mean: (softmax - one-hot) / N.
    wide_CV.mul_(1 / (sums_C1 * num_rows))
    at_target_C1 = wide_CV.gather(1, targets_C1) - 1 / num_rows
    logits_CV.copy_(wide_CV.scatter_(1, targets_C1, at_target_C1))
    return loss


def _exponentiate(logits_CV: Tensor, targets_C1: Tensor) -> tuple[Tensor, Tensor]:
    """Make logits their exponentials, less by one factor in each row. Return row sums and loss.

    Args:
        logits_CV: float32 or wider. Changed.
        targets_C1: int64, below V.

    Returns:
        Sums of the rows' exponentials, (C, 1), and the sum of the rows' losses, a scalar.
    """
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    at_target_C1 = logits_CV.gather(1, targets_C1)
    sums_C1 = logits_CV.sub_(largest_C1).exp_().sum(-1, keepdim=True)
    return sums_C1, (sums_C1.log() + largest_C1 - at_target_C1).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor) -> Tensor:
        num_rows = len(hidden_ND)
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        gradient_ND = torch.empty_like(hidden_ND)
        gradient_VD: Tensor | None = None
        if ctx.needs_input_grad[1]:
            # Wide, because a bfloat16 sum of many chunks would lose the small ones.
            gradient_VD = torch.zeros_like(table_VD, dtype=wide)
        for here in _chunks(hidden_ND, table_VD):
            rows_CD = hidden_ND[here]
            targets_C1 = targets_N[here, None]
            gradient_CV = rows_CD @ table_VD.T
            loss += _loss_to_gradient(gradient_CV, targets_C1, num_rows, wide)
            gradient_ND[here] = gradient_CV @ table_VD
            if gradient_VD is None:
                pass
            elif gradient_CV.dtype == wide:
                gradient_VD.addmm_(gradient_CV.T, rows_CD)
            else:
                gradient_VD.add_(gradient_CV.T @ rows_CD)
            # Otherwise it would exist while the next one is computed.
            del gradient_CV
        narrow_VD = None if gradient_VD is None else gradient_VD.to(table_VD.dtype)
        ctx.save_for_backward(gradient_ND, narrow_VD)
        return loss / num_rows

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gradient_ND, gradient_VD = ctx.saved_tensors
        # In place, because a copy would take as much as the head's weights. A second backward pass
        # through the same graph is an error of autograd's.
        if gradient_VD is not None:
            gradient_VD.mul_(gradient)
        return gradient_ND.mul_(gradient), gradient_VD, None
