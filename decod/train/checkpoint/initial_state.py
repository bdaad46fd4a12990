"""A stage's first state, read in place: from a checkpoint, or from the folder of a model.

The leader gives it to all others, so it may be larger than the leader's memory. Only one chunk is
read at a time. Imports no torch, because the node process gives states.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decod.errors import CheckpointError
from decod.model.weights import DTYPE_NAMES, Stored, find_weights, is_finite
from decod.run.model_config import ModelConfig
from decod.texts import why_of
from decod.train.checkpoint.description import (
    Description,
    cut,
    description_text,
    entry_json,
    hash_tensor,
    parse_description,
    placed,
)
from decod.train.checkpoint.entries import DTYPE_BYTES, TensorEntry
from decod.train.checkpoint.places import File, Folder, opened
from decod.train.checkpoint.store import Checkpoint, find_tensors

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of tensors by their names."""

ChunkHashes = Mapping[str, Sequence[str]]
"""Hashes of the chunks of tensors by the tensors' names."""

_FLOATS: dict[str, "np.dtype[Any]"] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_BFLOAT16 = "BF16"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a tensor is read."""

    path: File
    dtype: str
    """The name in safetensors."""
    start: int
    """Offset in the file, in bytes."""
    sha256: str = ""
    """Hash that its bytes must have; empty if it is not known."""
    first: int = 0
    """Its first element's place in the tensor, which may be read in several parts."""
    num_elements: int = 1 << 62
    """Of the part."""


class InitialState:
    """A stage's first state as a donor gives it.

    Args:
        tensors: All tensors of the state, in the order of its blob.
        sources: Where each of them is read.
        known: The hashes of the chunks of some tensors, by name, which have been read before and
            had the hashes of their sources.

    Raises:
        CheckpointError: A file can't be read, or a value is not finite.
    """

    def __init__(
        self,
        tensors: Tensors,
        sources: Mapping[str, tuple[TensorSource, ...]],
        known: ChunkHashes | None = None,
    ) -> None:
        sized = (_entry(name, dtype, shape) for name, (dtype, shape) in tensors.items())
        entries = placed(sized)
        self._sources = {
            offset: (entry, sources[entry.name], offset - entry.offset, size)
            for entry in entries
            for offset, size in cut(entry)
        }
        described = list[object]()
        digests = list[str]()
        known = known or {}
        for entry in entries:
            if entry.name in known:
                described.append(entry_json(entry) | {"sha256": sources[entry.name][0].sha256})
                digests += known[entry.name]
                continue
            whole, chunks = hash_tensor(self._read(offset) for offset, _ in cut(entry))
            if (source := sources[entry.name][0]).sha256 not in ("", whole):
                raise _unreadable(source.path, f"{entry.name[:100]} was altered")
            described.append(entry_json(entry) | {"sha256": whole})
            digests += chunks
        text = description_text(described, "".join(digests))
        self.description: Description = parse_description(text)
        self._hashes = {chunk.offset: chunk.sha256 for chunk in self.description.chunks}

    def read(self, offset: int) -> bytes:
        """Return the bytes of the chunk at this offset of the blob.

        Raises:
            CheckpointError: The file can't be read, or its content has changed.
        """
        piece = self._read(offset)
        if hashlib.sha256(piece).hexdigest() != self._hashes[offset]:
            raise _unreadable(self._sources[offset][1][0].path, "it was altered")
        return piece

    def _read(self, offset: int) -> bytes:
        entry, sources, inside, size_bytes = self._sources[offset]
        here_bytes = DTYPE_BYTES[entry.dtype]
        begin, end = inside // here_bytes, (inside + size_bytes) // here_bytes
        return b"".join(
            self._read_part(entry, each, max(begin, each.first) - each.first, last - each.first)
            for each in sources
            if each.first < (last := min(end, each.first + each.num_elements)) and last > begin
        )

    def _read_part(self, entry: TensorEntry, source: TensorSource, begin: int, end: int) -> bytes:
        """Return some elements of a part, as the entry has them."""
        there_bytes = _element_bytes(source.dtype)
        start = source.start + begin * there_bytes
        wanted_bytes = (end - begin) * there_bytes
        with _refusals_told(source.path), opened(source.path, follow_links=True) as file:
            piece = file.read(start, wanted_bytes)
        if len(piece) != wanted_bytes:
            raise _unreadable(source.path, "it is shorter than it was")
        if not is_finite(piece, source.dtype):
            raise _unreadable(source.path, f"{entry.name[:100]} is not finite")
        wanted = DTYPE_NAMES[entry.dtype]
        result = converted(piece, source.dtype, wanted)
        if source.dtype != wanted and not is_finite(result, wanted):
            raise _unreadable(source.path, f"{entry.name[:100]} is too large for {entry.dtype}")
        return result


def from_checkpoint(
    checkpoint: Checkpoint, tensors: Tensors, known: ChunkHashes | None = None
) -> InitialState:
    """Return the state of some tensors of a checkpoint, from whichever stages' files they are in.

    Args:
        checkpoint: The checkpoint.
        tensors: The tensors.
        known: As for `InitialState`: these are not read before they are given.

    Raises:
        CheckpointError: As `InitialState`, and if a tensor is missing.
    """
    sources = {}
    for name, tensor in find_tensors(checkpoint).items():
        entry = tensor.entry
        if tensors.get(name) == (entry.dtype, entry.shape):
            kind = DTYPE_NAMES[entry.dtype]
            sources[name] = (TensorSource(tensor.path, kind, tensor.start, entry.sha256),)
    if missing := [name for name in tensors if name not in sources]:
        raise _unreadable(checkpoint.folder, f"{missing[0]} is missing")
    return InitialState(tensors, sources, known)


def from_folder(folder: Path, model: ModelConfig, tensors: Tensors) -> InitialState:
    """Return the state of some parameters of a model folder, in the dtypes of `tensors`.

    Raises:
        CheckpointError: As `InitialState`.
        DataError: A file is missing, damaged or pickled, or holds another model's weights.
    """
    places = find_weights(folder, model).places
    return InitialState(tensors, {name: _sources_of(places[name]) for name in tensors})


def _sources_of(places: Sequence[Stored]) -> tuple[TensorSource, ...]:
    found = list[TensorSource]()
    first = 0
    for place in places:
        num = math.prod(place.shape)
        found.append(TensorSource(place.path, place.dtype, place.start, "", first, num))
        first += num
    return tuple(found)


def converted(piece: bytes, stored: str, wanted: str) -> bytes:
    """Return finite numbers in another format, rounded to the nearest, ties to even.

    Args:
        piece: The numbers.
        stored: Their format, as safetensors names it.
        wanted: `BF16`, `F32` or `F64`.
    """
    if stored == wanted:
        return piece
    if stored == _BFLOAT16:
        # The upper half of a float32.
        bits = np.frombuffer(piece, "<u2").astype("<u4") << np.uint32(16)
        numbers: NDArray[Any] = bits.view("<f4")
    else:
        numbers = np.frombuffer(piece, _FLOATS[stored])
    # The caller sees what became infinite.
    with np.errstate(over="ignore"):
        narrow = numbers.astype("<f4" if wanted == _BFLOAT16 else _FLOATS[wanted])
    if wanted != _BFLOAT16:
        return narrow.tobytes()
    # As training does it: first to float32, then the half that is cut off is rounded.
    bits = narrow.view("<u4")
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype("<u2").tobytes()


def _entry(name: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name, dtype, shape, 0, math.prod(shape) * DTYPE_BYTES[dtype], "")


def _element_bytes(stored: str) -> int:
    return 2 if stored == _BFLOAT16 else _FLOATS[stored].itemsize


@contextmanager
def _refusals_told(path: File) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unreadable(path, why_of(error)) from error


def _unreadable(path: File | Folder, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the run's first state can't be read from {path}",
        why=reason,
        fix="put it back, or start the run again from another one",
        code="E-CKP-010",
    )
