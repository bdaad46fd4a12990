"""Reading of model folders: `config.json` and `model.safetensors`, as transformers writes them.

Reading never runs code from a file: it opens only safetensors, and refuses pickled weights. See
`decod.model.writing` for the other direction.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decod.model.adapter_folder import ADAPTER_FILE, PEFT_PREFIX, base_of, read_adapter
from decod.model.shape import LORA_A, LORA_B, model_shapes
from decod.model.stage import TORCH_DTYPES
from decod.model.weights import (
    Stored,
    check_tied,
    find_weights,
    read_config,
    refuse_weights,
    stored_bytes,
    unreadable,
)
from decod.model.writing import ModelWriter
from decod.run.model_config import ModelConfig
from decod.texts import why_of

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Dtypes by their names in safetensors."""


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
    places = _wanted_places(folder, model, wanted)
    shapes = model_shapes(model)
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for name, parts in places:
            tensors = []
            for place in parts:
                try:
                    if place.path not in files:
                        opened = safe_open(place.path, framework="pt")
                        files[place.path] = stack.enter_context(opened)
                    tensors.append(files[place.path].get_tensor(place.key))
                except (OSError, SafetensorError) as error:
                    raise unreadable(place.path, why_of(error)) from error
            whole = torch.cat([each.flatten() for each in tensors]) if parts[1:] else tensors[0]
            yield name, whole.view(shapes[name])


def model_weights(
    folder: Path, model: ModelConfig, base: Path | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters of a model, or of a model with the adapter of a folder merged into it.

    Args:
        folder: As for `read_weights`, or the folder of an adapter.
        model: The expected model.
        base: The model that the adapter changes. None: the one that its settings name.

    Yields:
        As `read_weights`.

    Raises:
        DataError: As `read_weights`, and if the adapter is unusable.
    """
    base = base_of(folder, base)
    if base is None:
        yield from read_weights(folder, model)
        return
    adapter = read_adapter(folder, model)
    targets = {f"{target}.weight" for target in adapter.of(model)}
    with _opened(folder / ADAPTER_FILE) as matrices:
        for name, weight in read_weights(base, model):
            inside = name.removeprefix(model.family.block_prefix).partition(".")[2]
            if inside not in targets:
                yield name, weight
                continue
            prefix = PEFT_PREFIX + name.removesuffix("weight")
            wide = torch.promote_types(weight.dtype, torch.float32)
            first, second = (matrices.get_tensor(prefix + end).to(wide) for end in (LORA_A, LORA_B))
            change = second @ first * adapter.scaling
            whole = weight.to(wide) + (change.T if model.family.transposed else change)
            if not whole.isfinite().all():
                refuse_weights(folder, [f"{name} would not be finite"])
            yield name, whole.to(weight.dtype)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise unreadable(path, why_of(error)) from error


def write_merged(adapter: Path, base: Path, out: Path) -> None:
    """Write a model with an adapter merged into it, in the model's own dtype, one weight at a time.

    Args:
        adapter: Folder of the adapter.
        base: Folder of the model that it changes.
        out: Created if missing.

    Raises:
        DataError: A folder can't be read or written.
    """
    model = read_config(base, trains=False)
    with closing(ModelWriter(out, model)) as writer:
        for name, weight in model_weights(adapter, model, base):
            array: Any = weight.to(TORCH_DTYPES[model.dtype]).contiguous().view(-1)
            writer.write(name, memoryview(array.view(torch.uint8).numpy()))
        writer.finish()


def fill_weights(folder: Path, model: ModelConfig, targets: Mapping[str, Tensor]) -> None:
    """Copy parameters to their places, piece by piece. Checks and errors as in `read_weights`.

    Args:
        folder: As for `read_weights`.
        model: The expected model.
        targets: Places by the names in `model_shapes`, each flat, on any device, of any dtype.
    """
    for name, parts in _wanted_places(folder, model, targets):
        target_N = targets[name]
        start = 0
        for place in parts:
            try:
                for piece in stored_bytes(place):
                    values_N = torch.frombuffer(bytearray(piece), dtype=_DTYPES[place.dtype])
                    target_N[start : start + len(values_N)].copy_(values_N)
                    start += len(values_N)
            except OSError as error:
                raise unreadable(place.path, why_of(error)) from error


def _wanted_places(
    folder: Path, model: ModelConfig, wanted: Iterable[str] | None
) -> list[tuple[str, tuple[Stored, ...]]]:
    found = find_weights(folder, model)
    names = sorted(found.places if wanted is None else wanted)
    if model.family.embedding in names:
        check_tied(folder, found, model)
    return [(name, found.places[name]) for name in names]
