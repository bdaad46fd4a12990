"""The weights that a run with an adapter does not train, in parts that hosts take from each other.

A part is one block, or all that is outside the blocks, which is part 0. Its blob holds the part's
parameters in sorted order of names, in the model's dtype. So hosts that have the same weights have
the same bits, whatever files these came from. The run's manifest holds the hash of every part.

A host that has no folder of the model fetches the parts of its stage into a cache, which later runs
use as well:

    CACHE/base/0c31f0a2.../blob         a part, named by its hash
                           state.json   its description

A blob appears before its description, so a part without a description is not complete. What is
there of it is not fetched again. Imports no torch, because the node process gives and fetches
parts.
"""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from decod.errors import CheckpointError, DataError
from decod.files import PieceFile, read_beginning, replace_durably
from decod.model.shape import part_shapes
from decod.model.weights import DTYPE_NAMES, check_tied, find_weights
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.texts import why_of
from decod.train.checkpoint.description import (
    Chunk,
    Description,
    QuietSink,
    described_hash,
    parse_description,
)
from decod.train.checkpoint.entries import check_tensors
from decod.train.checkpoint.initial_state import (
    InitialState,
    Tensors,
    TensorSource,
    from_folder,
)
from decod.train.checkpoint.iteration_folders import StateInFile
from decod.train.checkpoint.places import DiskRoom

_HASH_SIZE = 64
_BLOB = "blob"
_DESCRIPTION = "state.json"
_DESCRIPTION_MAX_BYTES = 4 << 20


UNKNOWN_HASH = "0" * _HASH_SIZE


def parts_of(run: RunConfig, stage_index: int, blocks: Sequence[int] = ()) -> list[int]:
    """Return the parts that a stage holds, in a cut as of `RunConfig.with_blocks`."""
    outer = [0] if stage_index == 0 else []
    return outer + [block + 1 for block in run.stage_blocks(blocks)[stage_index]]


def split_hashes(joined: str) -> tuple[str, ...]:
    """Return the hashes of all parts, as a manifest has them one after another."""
    return tuple(joined[at : at + _HASH_SIZE] for at in range(0, len(joined), _HASH_SIZE))


def _tensors(model: ModelConfig, part: int) -> Tensors:
    shapes = part_shapes(model, part)
    return {name: (model.dtype.value, shape) for name, shape in sorted(shapes.items())}


def base_part_bytes(model: ModelConfig, part: int) -> int:
    """Return the size of a part's numbers."""
    return sum(map(math.prod, part_shapes(model, part).values())) * model.dtype.num_bytes


def base_hashes(folder: Path, model: ModelConfig) -> tuple[str, ...]:
    """Return the hashes of all parts of a model folder. Reads all of its weights.

    Raises:
        CheckpointError: A file can't be read, or a value is not finite.
        DataError: A file is missing, damaged or pickled, or holds another model's weights.
    """
    check_tied(folder, find_weights(folder, model), model)
    parts = range(model.num_hidden_layers + 1)
    return tuple(_hash_of(from_folder(folder, model, _tensors(model, part))) for part in parts)


def _hash_of(part: InitialState) -> str:
    return described_hash(part.description.entries)


@dataclass(frozen=True, slots=True)
class BaseSource:
    """The places on this host where parts may be."""

    hashes: tuple[str, ...]
    """Of all parts, as the run's manifest has them. Empty: the run trains all parameters."""
    cache: Path
    folder: Path | None = None
    """Folder of the whole model, if there is one on this host."""
    room: DiskRoom | None = None
    """The cap on what this host keeps."""

    def find(self, model: ModelConfig, part: int) -> InitialState | None:
        """Return a part. None: it is not on this host.

        Raises:
            CheckpointError: It can't be read.
            DataError: The folder holds other weights than the run's.
        """
        if self.folder is not None:
            found = from_folder(self.folder, model, _tensors(model, part))
            if _hash_of(found) != self.hashes[part]:
                raise DataError(
                    f"the weights in {self.folder} are not those that the run adapts",
                    why="an adapter fits only the weights beside which it was trained",
                    fix="give the folder that the run's organiser uses, or leave out --base: then "
                    "the weights are fetched from members",
                    code="E-DAT-054",
                )
            return found
        place = self._place(part)
        try:
            text = read_beginning(place / _DESCRIPTION, _DESCRIPTION_MAX_BYTES).decode()
            description = parse_description(text)
            check_tensors(description.entries, _tensors(model, part))
            if described_hash(description.entries) != self.hashes[part]:
                return None
            return _in_blob(place / _BLOB, description)
        except (OSError, UnicodeDecodeError, CheckpointError):
            # What is damaged is fetched again; what is whole of it, is kept.
            return None

    def arriving(self, model: ModelConfig, part: int) -> "ArrivingPart":
        """Return the destination of a part that is fetched. Close it in any case."""
        return ArrivingPart(self._place(part), _tensors(model, part), self.room)

    def _place(self, part: int) -> Path:
        return self.cache / "base" / self.hashes[part]


def _in_blob(path: Path, description: Description) -> InitialState:
    """Return a part that lies in a blob with this description. All of it is read and compared."""
    sources = {
        entry.name: (TensorSource(path, DTYPE_NAMES[entry.dtype], entry.offset, entry.sha256),)
        for entry in description.entries
    }
    tensors = {entry.name: (entry.dtype, entry.shape) for entry in description.entries}
    return InitialState(tensors, sources)


class ArrivingPart(QuietSink):
    """A part on its way to the cache. What has come before an interruption is used again.

    Args:
        folder: The part's.
        tensors: What it is to hold.
        room: The cap on what this host keeps.
    """

    def __init__(self, folder: Path, tensors: Tensors, room: DiskRoom | None) -> None:
        self._folder = folder
        self._tensors = tensors
        self._room = room
        self._description: Description | None = None
        self._file: PieceFile | None = None

    @override
    def expect(self, description: Description) -> None:
        """Take in what comes. Its hash, which has been compared, leaves out an optimizer's tensors.

        Raises:
            CheckpointError: It holds other tensors.
        """
        check_tensors(description.entries, self._tensors)
        self._description = description

    def allocate(self, size_bytes: int) -> StateInFile:
        """Return the blob's place in the file.

        Raises:
            CheckpointError: The disk has no room for it, or can't be written.
        """
        assert self._description is not None, "it is described first"
        self.close()
        try:
            if self._room is not None:
                self._room.require(size_bytes)
            self._folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._file = PieceFile(os.open(self._folder / _BLOB, flags, 0o644))
            self._file.resize(size_bytes)
        except OSError as error:
            raise _unkept(self._folder, why_of(error)) from error
        entries = self._description.entries
        return StateInFile(self._file, entries, [entry.offset for entry in entries])

    def take_in(self, part: InitialState) -> None:
        """Copy a part that is on this host already. Raises as `allocate`."""
        self.expect(part.description)
        blob = self.allocate(part.description.num_bytes)
        for chunk in part.description.chunks:
            blob[chunk.offset : chunk.offset + chunk.num_bytes] = part.read(chunk.offset)

    @override
    def local(self, chunk: Chunk) -> bytes | None:
        """Return what is in the place of a chunk already. The caller compares it with its hash."""
        if self._file is None:
            return None
        with suppress(OSError):
            return self._file.read_at(chunk.offset, chunk.num_bytes)
        return None

    def keep(self) -> None:
        """Take note that all of it has arrived.

        Raises:
            CheckpointError: The disk can't be written.
        """
        assert self._description is not None, "it has arrived"
        try:
            replace_durably(self._folder / _DESCRIPTION, self._description.text.encode())
        except OSError as error:
            raise _unkept(self._folder, why_of(error)) from error

    def close(self) -> None:
        """Close the file, once nobody writes into it."""
        if self._file is not None:
            self._file.close()


def _unkept(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"weights that the run does not train can't be kept in {folder}",
        why=reason,
        fix="free space on that disk, or give --base the folder of the model",
        code="E-CKP-023",
    )
