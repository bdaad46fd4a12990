"""Model folders from weights in memory. decod itself writes them a piece at a time."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decod.model.shape import model_shapes
from decod.model.weights import refuse_weights
from decod.model.writing import ModelWriter
from decod.run.model_config import ModelConfig


def write_folder(folder: Path, model: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Args:
        folder: Created if missing. Existing files of these names are replaced.
        model: The model. Weights are stored in its dtype.
        weights: Every parameter of `model_shapes`, any floating-point dtype and device.

    Raises:
        DataError: A parameter is missing, foreign or of another shape, or the disk refuses.
    """
    shapes = model_shapes(model)
    problems = [f"{name} is missing" for name in shapes if name not in weights]
    problems += [f"{name} is unknown" for name in weights if name not in shapes]
    problems += [
        f"{name} is {tuple(weights[name].shape)}, not {shape}"
        for name, shape in shapes.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    refuse_weights(folder, problems)
    dtype: torch.dtype = getattr(torch, model.dtype.value)
    with closing(ModelWriter(folder, model)) as writer:
        for name in shapes:
            # One at a time, so that the copy of no other tensor is in memory.
            tensor = weights[name].detach().to("cpu", dtype).contiguous()
            array: Any = tensor.view(-1).view(torch.uint8).numpy()
            writer.write(name, memoryview(array))
        writer.finish()
