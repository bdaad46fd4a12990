"""Parts of Llama's block with their own backward pass, which keeps less of the forward pass.

Autograd keeps every tensor that an operation may need again. These functions keep only inputs and
the results of matrix products, and recompute norms, gates and rotations. decod has many
microbatches in flight, so the kept memory decides how many fit on a host. It is 13 instead of 22
KiB per position and block, for width 256 and inner width 688 in float32. On CPUs this is also a
little faster, because memory is traversed less often. On CUDA the elementwise parts are compiled
(`decod.model.fused`). The oracle is the gradient of the modules in `decod.model.llama` by autograd.

If a function takes `later`, it postpones its weights' gradients. None returns them to autograd.

Legend: B sequences, T positions, N = B x T, D width, H heads, E a head's width, I inner
width, O outputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from decod.model.fused import fused
from decod.model.later import WeightProducts, weight_gradient
from decod.model.norm import rms_norm, rms_norm_backward, rms_scale, scaled
from decod.model.product import add_product, project
from decod.model.rotary import Rotary, rotate


def norm_project(
    hidden_BTD: Tensor,
    norm_D: Tensor,
    eps: float,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    later: WeightProducts | None = None,
) -> tuple[Tensor, ...]:
    """Return several linear projections of the normed input. Keep only the input.

    Args:
        hidden_BTD: Residual stream.
        norm_D: The norm's weight.
        eps: The norm's epsilon.
        weights: One per projection, each (outputs, D).
        biases: One per projection, each (outputs,) or None.
        later: Takes the weights' products.

    Returns:
        Tensors (B, T, outputs), which can be differentiated once.
    """
    result: tuple[Tensor, ...] = _NormProject.apply(
        later, hidden_BTD, norm_D, eps, *weights, *biases
    )  # type: ignore[no-untyped-call]
    return result


def rotated(heads_BTHE: Tensor, rotary: Rotary) -> Tensor:
    """Return `rotate`. Keep only the angles."""
    result: Tensor = _Rotated.apply(heads_BTHE, *rotary)  # type: ignore[no-untyped-call]
    return result


def normed_rotated(heads_BTHE: Tensor, norm_E: Tensor, eps: float, rotary: Rotary) -> Tensor:
    """Return `rotate` of the normed heads. Keep only the heads.

    Args:
        heads_BTHE: Queries or keys.
        norm_E: The norm's weight.
        eps: The norm's epsilon.
        rotary: Angles of the positions.
    """
    result: Tensor = _NormedRotated.apply(heads_BTHE, norm_E, eps, *rotary)  # type: ignore[no-untyped-call]
    return result


def add_projection(
    hidden_BTD: Tensor,
    input_BTI: Tensor,
    weight_DI: Tensor,
    later: WeightProducts | None = None,
) -> Tensor:
    """Return `hidden_BTD` plus a projection of `input_BTI`, (B, T, D). Keep only `input_BTI`."""
    result: Tensor = _AddProjection.apply(later, hidden_BTD, input_BTI, weight_DI)  # type: ignore[no-untyped-call]
    return result


def add_gated_mlp(
    hidden_BTD: Tensor,
    norm_D: Tensor,
    eps: float,
    weights: tuple[Tensor, Tensor, Tensor],
    later: WeightProducts | None = None,
) -> Tensor:
    """Return the input plus the SwiGLU network of its norm. Keep input, gate and up projection.

    Args:
        hidden_BTD: Residual stream.
        norm_D: The norm's weight.
        eps: The norm's epsilon.
        weights: Weights of the gate projection, to which SiLU is applied, (I, D), of the up
            projection, which is gated, (I, D), and of the projection back, (D, I).
        later: Takes the weights' products.

    Returns:
        The residual stream, (B, T, D), which can be differentiated once.
    """
    result: Tensor = _AddGatedMlp.apply(later, hidden_BTD, norm_D, eps, *weights)  # type: ignore[no-untyped-call]
    return result


class _NormProject(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        later: WeightProducts | None,
        hidden_BTD: Tensor,
        norm_D: Tensor,
        eps: float,
        *linears: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.later = later
        num_linears = len(linears) // 2
        weights, biases = linears[:num_linears], linears[num_linears:]
        ctx.eps = eps
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(hidden_BTD, norm_D, *weights)
        normed_BTD = rms_norm(hidden_BTD, norm_D, eps)
        normed_ND = normed_BTD.flatten(0, 1)
        shape = hidden_BTD.shape[:2]
        return tuple(
            _biased(project(normed_ND, weight), bias).view(*shape, -1)  # type: ignore[arg-type]
            for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_BTD, norm_D, *weights = ctx.saved_tensors
        scale_BT1 = rms_scale(hidden_BTD, ctx.eps)
        normed_ND = scaled(hidden_BTD, scale_BT1, norm_D).flatten(0, 1)
        flat = [gradient.flatten(0, 1) for gradient in gradients]
        weight_gradients = [
            weight_gradient(ctx.later, weight, gradient, normed_ND)
            for weight, gradient in zip(weights, flat, strict=True)
        ]
        bias_gradients = [
            gradient.sum(0) if has_bias else None
            for gradient, has_bias in zip(flat, ctx.has_bias, strict=True)
        ]
        normed_gradient_ND = _sum_of_products(flat, weights)
        hidden_gradient_BTD, norm_gradient_D = rms_norm_backward(
            hidden_BTD, scale_BT1, norm_D, normed_gradient_ND.view_as(hidden_BTD)
        )
        return None, hidden_gradient_BTD, norm_gradient_D, None, *weight_gradients, *bias_gradients


class _Rotated(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, heads_BTHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(heads_BTHE, (cos, sin))

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient_BTHE: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(gradient_BTHE, (cos, -sin)), None, None


class _NormedRotated(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, heads_BTHE: Tensor, norm_E: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(heads_BTHE, norm_E, cos, sin)
        return rotate(rms_norm(heads_BTHE, norm_E, eps), (cos, sin))

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient_BTHE: Tensor) -> tuple[Tensor | None, ...]:
        heads_BTHE, norm_E, cos, sin = ctx.saved_tensors
        normed_gradient_BTHE = rotate(gradient_BTHE, (cos, -sin))
        heads_gradient_BTHE, norm_gradient_E = rms_norm_backward(
            heads_BTHE, rms_scale(heads_BTHE, ctx.eps), norm_E, normed_gradient_BTHE
        )
        return heads_gradient_BTHE, norm_gradient_E, None, None, None


class _AddProjection(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        later: WeightProducts | None,
        hidden_BTD: Tensor,
        input_BTI: Tensor,
        weight_DI: Tensor,
    ) -> Tensor:
        ctx.later = later
        ctx.save_for_backward(input_BTI, weight_DI)
        projected_ND = project(input_BTI.flatten(0, 1), weight_DI)
        return projected_ND.view_as(hidden_BTD).add_(hidden_BTD)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor | None, ...]:
        input_BTI, weight_DI = ctx.saved_tensors
        gradient_ND = gradient_BTD.flatten(0, 1)
        return (
            None,
            gradient_BTD,
            project(gradient_ND, weight_DI.T).view_as(input_BTI),
            weight_gradient(ctx.later, weight_DI, gradient_ND, input_BTI.flatten(0, 1)),
        )


class _AddGatedMlp(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        later: WeightProducts | None,
        hidden_BTD: Tensor,
        norm_D: Tensor,
        eps: float,
        gate_ID: Tensor,
        up_ID: Tensor,
        down_DI: Tensor,
    ) -> Tensor:
        normed_ND = rms_norm(hidden_BTD, norm_D, eps).flatten(0, 1)
        gate_NI, up_NI = project(normed_ND, gate_ID), project(normed_ND, up_ID)
        ctx.later = later
        ctx.eps = eps
        ctx.save_for_backward(hidden_BTD, norm_D, gate_ID, up_ID, down_DI, gate_NI, up_NI)
        gated_NI = _gated(gate_NI, up_NI)
        return project(gated_NI, down_DI).view_as(hidden_BTD).add_(hidden_BTD)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor | None, ...]:
        hidden_BTD, norm_D, gate_ID, up_ID, down_DI, gate_NI, up_NI = ctx.saved_tensors
        gradient_ND = gradient_BTD.flatten(0, 1)
        gated_NI, gate_gradient_NI, up_gradient_NI = _gated_backward(
            gate_NI, up_NI, project(gradient_ND, down_DI.T)
        )
        down_gradient_DI = weight_gradient(ctx.later, down_DI, gradient_ND, gated_NI)
        scale_BT1 = rms_scale(hidden_BTD, ctx.eps)
        normed_ND = scaled(hidden_BTD, scale_BT1, norm_D).flatten(0, 1)
        normed_gradient_ND = _sum_of_products([gate_gradient_NI, up_gradient_NI], [gate_ID, up_ID])
        hidden_gradient_BTD, norm_gradient_D = rms_norm_backward(
            hidden_BTD, scale_BT1, norm_D, normed_gradient_ND.view_as(hidden_BTD)
        )
        return (
            None,
            hidden_gradient_BTD.add_(gradient_BTD),
            norm_gradient_D,
            None,
            weight_gradient(ctx.later, gate_ID, gate_gradient_NI, normed_ND),
            weight_gradient(ctx.later, up_ID, up_gradient_NI, normed_ND),
            down_gradient_DI,
        )


@fused
def _gated(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    return functional.silu(gate_NI).mul_(up_NI)


@fused
def _gated_backward(
    gate_NI: Tensor, up_NI: Tensor, gradient_NI: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gated product again, and the gradients of gate and up projection.

    The gradient of the product is overwritten.
    """
    open_NI = functional.silu(gate_NI)
    gated_NI = open_NI * up_NI
    gate_gradient_NI = torch.ops.aten.silu_backward(gradient_NI * up_NI, gate_NI)
    return gated_NI, gate_gradient_NI, gradient_NI.mul_(open_NI)


def _sum_of_products(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    result = project(lefts[0], rights[0].T)
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        add_product(result, left, right.T)
    return result


def _biased(projected_NO: Tensor, bias_O: Tensor | None) -> Tensor:
    return projected_NO if bias_O is None else projected_NO.add_(bias_O)
