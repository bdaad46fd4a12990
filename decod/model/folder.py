"""Model folders: `config.json` and `model.safetensors`, as transformers writes and reads them.

Reading never runs code from a file: only safetensors are opened, pickled weights are refused.
Writing is atomic per file: whoever looks sees the old file or the whole new one.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decod.errors import DataError
from decod.model.config import ModelConfig
from decod.model.header import read_header, read_json, unreadable
from decod.model.hf import config_to_hf
from decod.model.shape import EMBEDDINGS, Shapes, model_shapes

_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_METADATA = "__metadata__"
"""The one key of a header that names no tensor."""

_HEAD = "lm_head.weight"

_IGNORED_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Constants that older checkpoints store among the weights."""


def read_weights(
    folder: Path, model: ModelConfig, wanted: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the wanted parameters one by one, in sorted order of names.

    All names and shapes of the whole model are checked before the first is yielded, so a folder
    that belongs to another model is refused even if this stage's part would fit.

    Args:
        folder: Holds `model.safetensors`, or several files and their index.
        model: What the folder must hold.
        wanted: Names to read, from `model_shapes`; None is all of them.

    Yields:
        Name and tensor, on CPU, in the file's own floating-point dtype.

    Raises:
        DataError: A file is missing, damaged, pickled, or holds another model's weights.
    """
    with ExitStack() as stack:
        files, stored = {}, dict[str, list[Path]]()
        for path in _weight_files(folder):
            for key in read_header(path).keys() - {_METADATA}:
                stored.setdefault(key, []).append(path)
            try:
                files[path] = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise unreadable(path, str(error)) from error
        twice = [f"{key} is in {len(paths)} files" for key, paths in stored.items() if paths[1:]]
        _refuse_weights(folder, sorted(twice))
        shapes = model_shapes(model)
        places = _match_names(folder, model, shapes, set(stored))
        problems = []
        for name, key in places.items():
            found = tuple(files[stored[key][0]].get_slice(key).get_shape())
            if found != shapes[name]:
                problems.append(f"{name} is {found}, not {shapes[name]}")
        _refuse_weights(folder, problems)
        for name in sorted(shapes if wanted is None else wanted):
            path = stored[places[name]][0]
            try:
                tensor = files[path].get_tensor(places[name])
            except (OSError, SafetensorError) as error:
                raise unreadable(path, str(error)) from error
            if not tensor.is_floating_point():
                _refuse_weights(folder, [f"{name} is of type {tensor.dtype}"])
            is_tied = model.tie_word_embeddings and name == EMBEDDINGS[model.model_type]
            if is_tied and _HEAD in stored:
                _check_tied(folder, tensor, files[stored[_HEAD][0]].get_tensor(_HEAD))
            yield name, tensor


def write_folder(folder: Path, model: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Args:
        folder: Created if missing. Existing files of these names are replaced.
        model: Its dtype is the one that weights are stored in.
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
    _refuse_weights(folder, problems)
    dtype: torch.dtype = getattr(torch, model.dtype.value)
    tensors = {name: weights[name].detach().to("cpu", dtype).contiguous() for name in shapes}
    text = json.dumps(config_to_hf(model), indent=2, sort_keys=True) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as scratch:
            weights_path, config_path = Path(scratch) / "weights", Path(scratch) / "config"
            save_file(tensors, weights_path, metadata={"format": "pt"})
            config_path.write_text(text, encoding="utf-8")
            # safetensors makes its file private, whatever the user's umask says.
            weights_path.chmod(config_path.stat().st_mode)
            for path, name in ((weights_path, _WEIGHTS_FILE), (config_path, "config.json")):
                _sync(path)
                path.replace(folder / name)
        # An index left from a sharded model would win over the file just written.
        (folder / _INDEX_FILE).unlink(missing_ok=True)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot write the model to {folder}",
            why=str(error),
            fix="check free space and permissions, or give another folder",
            code="E-DAT-014",
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_weights(folder: Path, problems: list[str]) -> None:
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise DataError(
            f"weights of {folder} do not fit the model: {', '.join(problems[:3])}{more}",
            why="every parameter must be there, once, with the shape that config.json implies",
            fix="use the folder's own config.json, or fetch the model again",
            code="E-DAT-013",
        )


def _check_tied(folder: Path, table_VD: Tensor, head_VD: Tensor) -> None:
    """Refuse a head that differs from the embedding: transformers would not tie the two."""
    if table_VD.shape != head_VD.shape or not bool((table_VD == head_VD).all()):
        raise DataError(
            f"weights of {folder} hold an {_HEAD} that differs from the embedding",
            why="config.json says by tie_word_embeddings that the two are one",
            fix="set tie_word_embeddings to false there, or remove the tensor from the file",
            code="E-DAT-013",
        )


def _weight_files(folder: Path) -> list[Path]:
    index_path = folder / _INDEX_FILE
    if (folder / _WEIGHTS_FILE).is_file():
        return [folder / _WEIGHTS_FILE]
    if index_path.is_file():
        names = read_json(index_path).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise unreadable(index_path, "it has no weight_map")
        for name in names.values():
            # A name with a folder in it could point outside the model's own folder.
            if not isinstance(name, str) or Path(name).name != name:
                raise unreadable(index_path, f"{name!r} is no plain file name")
        return [folder / name for name in sorted(set(names.values()))]
    pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(
        path.name for path in folder.glob("*.pt*")
    )
    if pickled:
        raise DataError(
            f"{folder} holds pickled weights ({pickled[0]}) and no {_WEIGHTS_FILE}",
            why="a pickled file can run code when it is opened, so decod never opens one",
            fix="convert the model to safetensors first",
            code="E-DAT-015",
        )
    raise DataError(
        f"no {_WEIGHTS_FILE} in {folder}",
        why="the weights are read from there",
        fix="give the folder of a model that was saved as safetensors",
        code="E-DAT-012",
    )


def _match_names(
    folder: Path, model: ModelConfig, shapes: Shapes, stored: set[str]
) -> dict[str, str]:
    """Return the stored key of every parameter of `shapes`."""
    places = {}
    for name in shapes:
        # GPT-2's own checkpoint was saved from the module without a head, hence without a prefix.
        short = name.removeprefix("transformer.")
        if name in stored or short in stored:
            places[name] = name if name in stored else short
    foreign = stored - set(places.values())
    if model.tie_word_embeddings:
        foreign.discard(_HEAD)
    problems = [f"{name} is missing" for name in shapes if name not in places]
    problems += [
        f"{name} is unknown" for name in sorted(foreign) if not name.endswith(_IGNORED_SUFFIXES)
    ]
    _refuse_weights(folder, problems)
    return places
