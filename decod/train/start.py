"""The state in which a stage begins: from the seed, or from a model folder."""

from pathlib import Path

import torch
from torch import Tensor

from decod.errors import DataError
from decod.model.config import ModelConfig
from decod.model.folder import read_config, read_weights
from decod.model.initial import initial_weight
from decod.train.layout import Layout
from decod.train.reduction import require_finite


def initial_weights(
    model: ModelConfig, layout: Layout, *, seed: int, dtype: torch.dtype, folder: Path | None
) -> Tensor:
    """Return a stage's first weights, flat in the order of its layout, (P,) `dtype` on CPU.

    Args:
        model: The whole model.
        layout: The stage's parameters.
        seed: Used without a folder.
        dtype: float32 or float64.
        folder: A model folder that holds at least this stage; None builds weights from the seed.

    Raises:
        DataError: The folder cannot be read or holds another model.
        NonFiniteError: Its weights are not finite.
    """
    weights_P = torch.empty(layout.num_elements, dtype=dtype)
    targets = dict(layout.views(weights_P))
    if folder is None:
        for name, target in targets.items():
            target.copy_(initial_weight(model, seed=seed, name=name, shape=layout.shapes[name]))
        return weights_P
    if read_config(folder, dtype=model.dtype) != model:
        raise DataError(
            f"{folder} holds another model than the run file describes",
            why="its weights would be read as something that they are not",
            fix="copy the model's fields from its config.json into the run file",
            code="E-DAT-017",
        )
    for name, tensor in read_weights(folder, model, targets):
        targets[name].copy_(tensor)
    require_finite(weights_P, f"the model in {folder}")
    return weights_P
