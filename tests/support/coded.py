"""Activations that are rounded at the cuts between stages, in plain torch.

With it, `tests.support.reference` is the oracle for runs that compress activations. It shares no
code with the formats under test.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from decod.model.stage import FirstStage
from decod.run.stages_config import StagesConfig, stage_blocks
from decod.run.training_config import ActivationCompression


def rounded(value_BTD: Tensor, compression: ActivationCompression) -> Tensor:
    """Return what is left of an activation or gradient after it has travelled."""
    wide_BTD = value_BTD.detach().to(torch.float32)
    if compression is ActivationCompression.BF16:
        return wide_BTD.to(torch.bfloat16).to(value_BTD.dtype)
    assert compression is ActivationCompression.INT8, compression
    assert value_BTD.shape[-1] <= 256, "a longer token has several scales"
    scale = (wide_BTD.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=torch.finfo().tiny)
    return (torch.round(wide_BTD / scale) * scale).to(value_BTD.dtype)


class _Cut(torch.autograd.Function):
    """Rounds the activation on its way forward, and its gradient on the way back."""

    @staticmethod
    @override
    def forward(ctx: Any, value_BTD: Tensor, compression: ActivationCompression) -> Tensor:
        ctx.compression = compression
        return rounded(value_BTD, compression)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None]:
        return rounded(gradient_BTD, ctx.compression), None


def cut(module: FirstStage, stages: StagesConfig, compression: ActivationCompression) -> None:
    """Round whatever a whole model hands from one stage to another."""

    def entering(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return _Cut.apply(arguments[0], compression), *arguments[1:]  # type: ignore[no-untyped-call]

    def leaving(_: Any, __: Any, output: Tensor) -> Any:
        return _Cut.apply(output, compression)  # type: ignore[no-untyped-call]

    relays = stage_blocks(module.config, stages)[1:]
    for blocks in relays:
        module.layers[str(blocks.start)].register_forward_pre_hook(entering)
    module.layers[str(relays[-1].stop - 1)].register_forward_hook(leaving)
