"""A model folder's own description: `config.json`, and the headers of its safetensors.

Imports no torch, because a leader reads both before it invites any node. A duplicate key is refused
everywhere, because another reader of the file may take the other value.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from decod.errors import DataError
from decod.files import BEGINNING_BYTES, find_damage, is_cut_json, open_ordinary, read_beginning
from decod.model.hf import config_from_hf
from decod.run.model_config import ModelConfig, ModelDtype
from decod.texts import unique, why_of

_JSON_SIZE_MAX_BYTES = 64 << 20
"""The sharded index of a very large model has a few megabytes. More is not a JSON file of ours."""

_HEADER_SIZE_MAX_BYTES = 100_000_000
"""The limit of the safetensors library."""

_LENGTH_BYTES = 8

_ALIGNMENT_BYTES = 8
"""The library pads a header to a multiple of this."""

DTYPE_NAMES = {"bfloat16": "BF16", "float32": "F32", "float64": "F64"}
"""The names of a model's dtypes in safetensors."""


class DescribedTensor(Protocol):
    """A tensor as a header describes it."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """As torch calls it: a key of `DTYPE_NAMES`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int:
        """From the header's end, in bytes."""

    @property
    def num_bytes(self) -> int: ...


def header_bytes(tensors: Iterable[DescribedTensor]) -> bytes:
    """Return the beginning of a safetensors file: the header after its length.

    These are the bytes that the library writes, so a file can be begun before its tensors are here.

    Args:
        tensors: The file's tensors, in the order of their offsets, without gaps.
    """
    values: dict[str, Any] = {
        tensor.name: {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.offset, tensor.offset + tensor.num_bytes],
        }
        for tensor in tensors
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **values}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_config(
    folder: Path, *, dtype: ModelDtype | None = None, trains: bool = True
) -> ModelConfig:
    """Return the configuration of a model folder.

    Args:
        folder: The folder.
        dtype: As for `config_from_hf`.
        trains: As for `config_from_hf`.

    Raises:
        DataError: There is no readable `config.json`, or decod cannot compute its model exactly.
    """
    path = folder / "config.json"
    fields = read_json(path)
    if "model_type" not in fields and find_damage(read_beginning(path, BEGINNING_BYTES)):
        raise unreadable(path, "it describes no model")
    return config_from_hf(fields, dtype=dtype, trains=trains)


def training_dtype(folder: Path) -> ModelDtype:
    """Return the dtype in which the model of a folder is best trained.

    Half of a float32's size stays half of it. bfloat16 keeps float32 masters, so it loses nothing
    of a float16.
    """
    fields = read_json(folder / "config.json")
    stored = str(fields.get("dtype") or fields.get("torch_dtype") or "")
    return ModelDtype.BFLOAT16 if stored.endswith(("16", "half")) else ModelDtype.FLOAT32


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        DataError: The file can't be read, is too large, or holds anything but one JSON object.
    """
    try:
        text = read_beginning(path, _JSON_SIZE_MAX_BYTES + 1)
    except OSError as error:
        raise unreadable(path, why_of(error)) from error
    if len(text) > _JSON_SIZE_MAX_BYTES:
        raise unreadable(path, "it is too large to be a JSON description")
    return _parse(path, text)


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, by the tensors' names.

    This checks only what the library itself ignores, not the places of the tensors.

    Raises:
        DataError: The file can't be read or is truncated, or contains a name twice.
    """
    try:
        with open_ordinary(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            size_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size_bytes > _HEADER_SIZE_MAX_BYTES:
                raise unreadable(path, f"its header would have {size_bytes} bytes")
            text = file.read(size_bytes)
    except OSError as error:
        raise unreadable(path, why_of(error)) from error
    if len(text) < size_bytes:
        raise unreadable(path, "it ends within its header: its download was cut off")
    return _parse(path, text)


def data_start(path: Path) -> int:
    """Return the offset at which the tensors of a safetensors file begin, in bytes."""
    return _LENGTH_BYTES + int.from_bytes(read_beginning(path, _LENGTH_BYTES), "little")


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        why = "it ends within its JSON: its download was cut off" if is_cut_json(text) else error
        raise unreadable(path, str(why)) from error
    if not isinstance(value, dict):
        raise unreadable(path, "it is no JSON object")
    return value


def unreadable(path: Path, why: str) -> DataError:
    """Return the error for an unusable file of a model folder.

    If the file's beginning shows what it is instead, the error says that.
    """
    damage = None
    with suppress(OSError):
        damage = find_damage(read_beginning(path, BEGINNING_BYTES))
    return DataError(
        f"cannot read {path}",
        why=why if damage is None else damage.why,
        fix="fetch the file again; it may be truncated" if damage is None else damage.fix,
        code="E-DAT-012",
    )
