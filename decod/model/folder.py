"""Model folders: `config.json` and `model.safetensors`, as transformers writes and reads them.

Reading never runs code from a file: it opens only safetensors, and refuses pickled weights.
Writing is atomic per file: a reader sees the old file or the complete new one.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decod.model.config import ModelConfig
from decod.model.header import unreadable
from decod.model.shape import EMBEDDINGS, model_shapes
from decod.model.weights import check_tied, find_weights, refuse_weights
from decod.model.writing import ModelWriter
from decod.texts import why_of


def read_weights(
    folder: Path, model: ModelConfig, wanted: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the wanted parameters one by one, in sorted order of names.

    All names and shapes of the whole model are checked before the first parameter is yielded. A
    folder of another model is therefore refused even if this stage's part would fit.

    Args:
        folder: Contains `model.safetensors`, or several files and their index.
        model: The expected model.
        wanted: Names to read, from `model_shapes`. None: all.

    Yields:
        Name and tensor, on CPU, in the file's own floating-point dtype.

    Raises:
        DataError: A file is missing, damaged, pickled, or holds another model's weights.
    """
    found = find_weights(folder, model)
    names = sorted(found.places if wanted is None else wanted)
    if EMBEDDINGS[model.model_type] in names:
        check_tied(folder, found, model)
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for name in names:
            place = found.places[name]
            try:
                if place.path not in files:
                    opened = safe_open(place.path, framework="pt")
                    files[place.path] = stack.enter_context(opened)
                tensor = files[place.path].get_tensor(place.key)
            except (OSError, SafetensorError) as error:
                raise unreadable(place.path, why_of(error)) from error
            yield name, tensor


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
