"""Muon for a whole model: hidden matrices take its steps, everything else those of AdamW."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from decod.errors import ConfigError


class MuonWithAdamW(torch.optim.Optimizer):
    """Steps the hidden matrices of a model with `torch.optim.Muon`, and all else with AdamW.

    A hidden matrix is a trained parameter with two dimensions that belongs neither to an embedding
    nor to the model's head. Steps of both are equally long at the same rate. It keeps one moment of
    a matrix, where AdamW keeps two.

    Source: Muon (kellerjordan.github.io/posts/muon), its rate as AdamW's (arXiv:2502.16982), and
    as an inner optimizer MuLoCo (arXiv:2505.23725).

    Args:
        model: Its parameters are trained. A model of transformers knows its head.
        lr: Rate of both.
        weight_decay: Of both.
        momentum: Of Muon.
        betas: Of AdamW.
        head: Parameters of the head, if the model can't say which they are.

    Raises:
        ConfigError: The model has no hidden matrix.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        head: Collection[Tensor] = (),
    ) -> None:
        matrices, others = _parted(model, head)
        if not matrices:
            raise ConfigError(
                "the model has no hidden matrix that is trained",
                why="Muon steps only those",
                fix="use torch.optim.AdamW, or name fewer parameters as the head",
            )
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices,
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        ]
        if others:
            self._optimizers.append(
                torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas)
            )
        groups = [group for each in self._optimizers for group in each.param_groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both. For the argument see `torch.optim.Optimizer`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer, group in zip(self._optimizers, self.param_groups, strict=True):
            # A loaded state comes with groups and dictionaries of its own.
            optimizer.param_groups, optimizer.state = [group], self.state
            optimizer.step()
        return loss


def _parted(model: nn.Module, head: Collection[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the hidden matrices of a model, and its other trained parameters."""
    apart = {id(each) for each in head}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is output:
            apart.update(id(each) for each in module.parameters())
    matrices, others = list[Tensor](), list[Tensor]()
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_hidden = parameter.ndim == 2 and id(parameter) not in apart
            (matrices if is_hidden else others).append(parameter)
    return matrices, others
