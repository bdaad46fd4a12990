"""A model folder's `config.json` and safetensors: headers, places of parameters, checks of values.

Imports no torch, because a leader checks all of that before it invites any node. A duplicate key is
refused everywhere, because another reader of the file may take the other value.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from decod.errors import DataError
from decod.files import (
    BEGINNING_BYTES,
    find_damage,
    is_cut_json,
    open_ordinary,
    read_beginning,
    read_pieces,
)
from decod.model.hf import config_from_hf
from decod.model.shape import stored_tensors
from decod.run.model_config import ModelConfig, ModelDtype, Shapes
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
        """The dtype as torch calls it: a key of `DTYPE_NAMES`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int:
        """The distance from the header's end, in bytes."""

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
    folder: Path, *, dtype: ModelDtype | None = None, trains: bool = True, built: bool = False
) -> ModelConfig:
    """Return the configuration of a model folder.

    Args:
        folder: The folder.
        dtype: As for `config_from_hf`.
        trains: As for `config_from_hf`.
        built: As for `config_from_hf`.

    Raises:
        DataError: There is no readable `config.json`, or decod cannot compute its model exactly.
    """
    path = folder / "config.json"
    fields = read_json(path)
    if "model_type" not in fields and find_damage(read_beginning(path, BEGINNING_BYTES)):
        raise unreadable(path, "it describes no model")
    return config_from_hf(fields, dtype=dtype, trains=trains, built=built)


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


HEAD = "lm_head.weight"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_METADATA = "__metadata__"
"""The one key of a header that names no tensor."""

_IGNORED_SUFFIXES = (
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
    ".rotary_emb.inv_freq",
)
"""Constants that older checkpoints store among the weights."""

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")

_OTHERS = (
    (
        ("adapter_model.safetensors", "adapter_config.json", "adapter_model.bin"),
        "an adapter",
        "an adapter such as LoRA's is a change of another model and no model by itself",
        "merge it into its model first, with `merge_and_unload` of peft, and save that",
    ),
    (
        (".safetensors",),
        f"other safetensors, no {INDEX_FILE}",
        "without the index nobody knows which files make up the model",
        f"fetch {INDEX_FILE} into the same folder; if the model is of one file, call it "
        f"{WEIGHTS_FILE}",
    ),
    (
        _PICKLED,
        "pickled weights",
        "a pickled file can run code when it is opened, so decod never opens one",
        "convert the model to safetensors first, or choose a copy of it in that format",
    ),
    (
        (".gguf", ".h5", ".msgpack", ".onnx", ".npz"),
        "weights in another format",
        "decod reads safetensors only",
        "convert the model to safetensors first, or choose a copy of it in that format",
    ),
)
"""What a folder may hold instead of weights that decod reads: ends of names, what these are, why
they don't do, and the remedy. The first that is there is told."""

_UNFINISHED = (".incomplete", ".part", ".aria2", ".crdownload", ".tmp")
"""Ends of the names of files whose download goes on, or was given up."""

_EXPONENTS: dict[str, "np.unsignedinteger[Any]"] = {
    "BF16": np.uint16(0x7F80),
    "F16": np.uint16(0x7C00),
    "F32": np.uint32(0x7F80_0000),
    "F64": np.uint64(0x7FF0_0000_0000_0000),
}
"""The exponent bits of each format. A value with all of them set is infinite or NaN."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a tensor."""

    path: Path
    key: str
    """The tensor's name in the file."""
    dtype: str
    """The name of the dtype in safetensors, such as `BF16`."""
    shape: tuple[int, ...]
    start: int
    """Offset in the file, in bytes."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredModel:
    """All parameters of a model in a folder."""

    places: dict[str, tuple[Stored, ...]]
    """Places by the parameters' names in `model_shapes`. Of some, the parts have their own: their
    elements follow each other."""
    head: Stored | None
    """A head that is stored although it is tied to the embedding."""


def find_weights(folder: Path, model: ModelConfig) -> StoredModel:
    """Return the places of a model's parameters in a folder's files.

    Raises:
        DataError: A file is missing, damaged or pickled, or holds another model's weights.
    """
    stored: dict[str, list[Stored]] = {}
    files, index = _weight_files(folder)
    for path in files:
        for tensor in _tensors_in(path):
            stored.setdefault(tensor.key, []).append(tensor)
    if index is not None:
        _check_index(folder, index, stored)
    twice = [f"{key} is in {len(places)} files" for key, places in stored.items() if places[1:]]
    refuse_weights(folder, sorted(twice))
    tensors = stored_tensors(model)
    shapes = {key: shape for parts in tensors.values() for key, shape in parts}
    keys = _match_names(folder, model, shapes, set(stored))
    head = keys.pop(HEAD, None) if model.tie_word_embeddings else None
    found = {name: stored[key][0] for name, key in keys.items()}
    problems = [
        f"{name} is {place.shape}, not {shapes[name]}"
        for name, place in found.items()
        if place.shape != shapes[name]
    ]
    problems += [f"{n} is of type {p.dtype}" for n, p in found.items() if p.dtype not in _EXPONENTS]
    refuse_weights(folder, problems)
    places = {name: tuple(found[key] for key, _ in parts) for name, parts in tensors.items()}
    return StoredModel(places, None if head is None else stored[head][0])


def check_weights(folder: Path, model: ModelConfig) -> str:
    """Read all files of a model folder. Return the hash that identifies the folder.

    Raises:
        DataError: As `find_weights`, and if a parameter is not finite.
    """
    found = find_weights(folder, model)
    by_file: dict[Path, list[tuple[str, Stored]]] = {}
    for name, places in found.places.items():
        for place in places:
            by_file.setdefault(place.path, []).append((name, place))
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        try:
            digest.update(_checked_hash(path, by_file.get(path, [])))
        except OSError as error:
            raise unreadable(path, why_of(error)) from error
    check_tied(folder, found, model)
    return digest.hexdigest()


def _checked_hash(path: Path, tensors: list[tuple[str, Stored]]) -> bytes:
    """Return the digest of a file after checking that all of its parameters are finite."""
    digest = hashlib.sha256()
    position = 0
    with open_ordinary(path) as descriptor:
        for name, place in sorted(tensors, key=lambda item: item[1].start):
            for piece in read_pieces(descriptor, position, place.start):
                digest.update(piece)
            position = place.start + place.num_bytes
            for piece in read_pieces(descriptor, place.start, position):
                digest.update(piece)
                if not is_finite(piece, place.dtype):
                    refuse_weights(path.parent, [f"{name} is not finite"])
        for piece in read_pieces(descriptor, position, None):
            digest.update(piece)
    return digest.digest()


def is_finite(piece: bytes | memoryview, dtype: str) -> bool:
    """Return whether no element is infinite or NaN. `dtype` is the name in safetensors."""
    exponent = _EXPONENTS[dtype]
    bits = np.frombuffer(piece, exponent.dtype)
    return not bool(((bits & exponent) == exponent).any())


def check_tied(folder: Path, found: StoredModel, model: ModelConfig) -> None:
    """Compare the embedding with a head stored beside it, because transformers would tie them.

    Raises:
        DataError: They differ.
    """
    (table,) = found.places[model.family.embedding]
    head = found.head
    if head is None:
        return
    same = (table.dtype, table.shape) == (head.dtype, head.shape)
    if not same or any(
        a != b for a, b in zip(stored_bytes(table), stored_bytes(head), strict=True)
    ):
        raise DataError(
            f"weights of {folder} hold an {HEAD} that differs from the embedding",
            why="config.json says by tie_word_embeddings that the two are one",
            fix="set tie_word_embeddings to false there, or remove the tensor from the file",
            code="E-DAT-013",
        )


def stored_bytes(place: Stored) -> Iterator[bytes]:
    """Yield the bytes of a tensor, in pieces of a few MiB that hold whole numbers.

    Raises:
        OSError: The file can't be read, or has fewer bytes.
    """
    with open_ordinary(place.path) as descriptor:
        yield from read_pieces(descriptor, place.start, place.start + place.num_bytes)


_WHOLE = "every parameter must be there, once, finite, with the shape that config.json implies"


def refuse_weights(folder: Path, problems: list[str], why: str = _WHOLE) -> None:
    """Raise DataError if there are problems."""
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise DataError(
            f"weights of {folder} do not fit the model: {', '.join(problems[:3])}{more}",
            why=why,
            fix="use the folder's own config.json, or fetch the model again",
            code="E-DAT-013",
        )


def _tensors_in(path: Path) -> Iterator[Stored]:
    header = read_header(path)
    try:
        # The library checks the tensors' places against each other and against the file's size.
        with safe_open(path, framework="numpy") as file:
            keys = list(file.keys())
            dtypes = {key: file.get_slice(key).get_dtype() for key in keys}
    except (OSError, SafetensorError) as error:
        raise unreadable(path, _half(path, header) or why_of(error)) from error
    entries = {key: header[key] for key in keys}
    ends = [entry["data_offsets"][1] for entry in entries.values()]
    base = path.stat().st_size - max(ends, default=0)
    for key, entry in entries.items():
        start, end = entry["data_offsets"]
        yield Stored(path, key, dtypes[key], tuple(entry["shape"]), base + start, end - start)


def _half(path: Path, header: dict[str, Any]) -> str:
    """Return a text if a file ends before the tensors that its header names, else an empty one."""
    try:
        size_bytes = path.stat().st_size
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != _METADATA]
        needed_bytes = data_start(path) + int(max(ends, default=0))
    except (OSError, LookupError, TypeError, ValueError):
        return ""
    if needed_bytes <= size_bytes:
        return ""
    return f"it has {size_bytes} of {needed_bytes} bytes: its download was cut off"


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the files with a folder's weights, and the index that names them, if there is one.

    Raises:
        DataError: There are none, or only pickled ones, or one of several is missing.
    """
    index_path = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE], None
    if index_path.is_file():
        names = read_json(index_path).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise unreadable(index_path, "it has no weight_map")
        for name in names.values():
            # A name with a folder in it could point outside the model's own folder.
            if not isinstance(name, str) or Path(name).name != name:
                raise unreadable(index_path, f"{name!r} is no plain file name")
        files = [folder / name for name in sorted(set(names.values()))]
        _require_files(index_path, files)
        return files, names
    raise _no_weights(folder)


def _no_weights(folder: Path) -> DataError:
    """Return the error for a folder without weights that decod reads. It says what is there."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    unfinished = _unfinished(folder)
    if unfinished:
        return DataError(
            f"the download of {folder} is not complete",
            why=f"{unfinished} is there, and no {WEIGHTS_FILE}",
            fix="run the same download again: it goes on where it was",
            code="E-DAT-012",
        )
    if (link := folder / WEIGHTS_FILE).is_symlink():
        return unreadable(link, f"it leads to {link.readlink()}, which is not there")
    for suffixes, what, why, fix in _OTHERS:
        if found := [name for name in names if name.endswith(suffixes)]:
            more = f" and {len(found) - 1} more" if found[1:] else ""
            return DataError(
                f"{folder} holds {what} ({shown_name(found[0])}{more}) and no {WEIGHTS_FILE}",
                why=why,
                fix=fix,
                code="E-DAT-015" if suffixes is _PICKLED else "E-DAT-012",
            )
    return DataError(
        f"no {WEIGHTS_FILE} in {folder}",
        why="the weights are read from there",
        fix="give the folder of a model that was saved as safetensors",
        code="E-DAT-012",
    )


def require_no_adapter(folder: Path) -> None:
    """Raise DataError if a folder holds an adapter, or a download that has not ended.

    They are the usual reasons for a folder without `config.json`.
    """
    if _unfinished(folder) or any((folder / name).exists() for name in _OTHERS[0][0]):
        raise _no_weights(folder)


def _unfinished(folder: Path) -> str:
    """Return the name of a file that a download has begun in a folder, if there is one."""
    places = (folder, folder / ".cache" / "huggingface" / "download")
    names = (path.name for place in places if place.is_dir() for path in place.iterdir())
    return shown_name(min((name for name in names if name.endswith(_UNFINISHED)), default=""))


def _require_files(index_path: Path, files: list[Path]) -> None:
    missing = [path.name for path in files if not path.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        unfinished = _unfinished(index_path.parent)
        also = f", and {unfinished} is an unfinished download" if unfinished else ""
        raise DataError(
            f"{missing[0]}{more} of the {len(files)} files that {index_path} names is missing",
            why=f"each of them holds a part of the weights{also}",
            fix="fetch the missing files into the same folder",
            code="E-DAT-012",
        )


def _check_index(folder: Path, index: dict[str, str], stored: dict[str, list[Stored]]) -> None:
    """Compare an index with the files that it names: some may be of another model.

    Raises:
        DataError: The index lacks a tensor of these files, or has one that is elsewhere.
    """
    places = {key: {tensor.path.name for tensor in found} for key, found in stored.items()}
    problems = [
        f"{key} is not in {name}, where {INDEX_FILE} has it"
        for key, name in sorted(index.items())
        if name not in places.get(key, ())
    ]
    problems += [
        f"{key} is in {min(names)}, but not in {INDEX_FILE}"
        for key, names in sorted(places.items())
        if key not in index and key != HEAD and not key.endswith(_IGNORED_SUFFIXES)
    ]
    refuse_weights(folder, problems)


def _match_names(
    folder: Path, model: ModelConfig, shapes: Shapes, stored: set[str]
) -> dict[str, str]:
    """Return the stored key of every parameter of `shapes`, and of a head beside a tied embedding.

    As for transformers, a name may lack the prefix of the module without a head, or have it twice.
    """
    table = model.family.embedding
    prefix = table.partition(".")[0] + "."
    places = dict[str, str]()
    problems = list[str]()
    for name in {**shapes, HEAD: ()}:
        spellings = dict.fromkeys((name, name.removeprefix(prefix), prefix + name))
        found = [key for key in spellings if key in stored]
        if found[1:]:
            problems.append(f"{found[0]} and {found[1]} are the same parameter")
        if found:
            places[name] = found[0]
    if model.tie_word_embeddings and table not in places and HEAD in places:
        # A program that writes tied weights once may choose the head's name.
        places[table] = places.pop(HEAD)
    problems += [f"{name} is missing" for name in shapes if name not in places]
    foreign = stored - set(places.values())
    problems += [
        f"{shown_name(name)} is unknown"
        for name in sorted(foreign)
        if not name.endswith(_IGNORED_SUFFIXES)
    ]
    if problems:
        refuse_weights(folder, problems, why=_names_told(stored, shapes))
    return places


def _names_told(stored: Iterable[str], shapes: Shapes) -> str:
    """Return a text with the first names that were found, and those that were expected."""
    found = _first_names(stored)
    expected = _first_names(shapes)
    return f"found were {found}; config.json implies {expected}"


def _first_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if ordered[3:] else ""
    return (", ".join(map(shown_name, ordered[:3])) or "no tensors") + more


def shown_name(name: str) -> str:
    """Return a tensor's name as it may be printed. Names come from strangers."""
    return ascii(name)[1:-1][:100]
