"""The tensors of a stage's state, on the wire, in shared memory and on disk, and their bytes.

Imports no torch, because the node process writes checkpoints and `decod checkpoint` reads them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from decod.errors import CheckpointError
from decod.files import PieceFile
from decod.model.shape import trained_shapes
from decod.run.model_config import ModelDtype
from decod.run.run_config import RunConfig
from decod.run.training_config import OptimizerName


class StateBytes(Protocol):
    """The blob of a state. Slices without a step give and take its bytes.

    A file is read or written at each slice. That may raise OSError.
    """

    def __len__(self) -> int:
        """Return the size in bytes."""
        ...

    def __getitem__(self, place: slice, /) -> memoryview | bytes:
        """Return the bytes of a place."""

    def __setitem__(self, place: slice, piece: memoryview | bytes | bytearray, /) -> None:
        """Change the bytes of a place to others of the same number."""


class BytesInFile:
    """The bytes of a state in a file, from its beginning on. See `StateBytes`.

    Args:
        file: The file.
        size_bytes: Size of the state.
    """

    def __init__(self, file: PieceFile, size_bytes: int) -> None:
        self._file = file
        self._size_bytes = size_bytes

    def __len__(self) -> int:
        return self._size_bytes

    def __getitem__(self, place: slice, /) -> bytes:
        return self._file.read_at(place.start, place.stop - place.start)

    def __setitem__(self, place: slice, piece: memoryview | bytes | bytearray, /) -> None:
        self._file.write_at(place.start, piece)


MASTER_PREFIX = "optimizer.master."
MOMENTUM_PREFIX = "optimizer.outer_momentum."
PENDING_PREFIX = "optimizer.pending."
"""Prefixes of the optimizer's tensors. The parameter's name follows."""

_SIZES = {
    1: ("bool", "uint8", "int8"),
    2: ("bfloat16", "float16", "int16"),
    4: ("float32", "int32"),
    8: ("float64", "int64"),
}

DTYPE_BYTES = {name: size for size, names in _SIZES.items() for name in names}
"""Every dtype that a state can hold, and the bytes of one element. Stages hold only floats."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a blob."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    sha256: str


def parse_entries(values: object) -> list[TensorEntry]:
    """Return the entries of a description from outside.

    Raises:
        CheckpointError: A field is missing or has a wrong type or range, or a name comes twice.
    """
    if not isinstance(values, list):
        raise refused_state(["the description is no list"])
    entries = [entry for value in values if (entry := _parse_entry(value)) is not None]
    if len(entries) != len(values):
        raise refused_state([f"{len(values) - len(entries)} descriptions are malformed"])
    if len({entry.name for entry in entries}) != len(entries):
        raise refused_state(["a name comes twice"])
    return entries


def _parse_entry(value: object) -> TensorEntry | None:
    if not isinstance(value, dict) or set(value) != set(TensorEntry.__slots__):
        return None
    texts = [value["name"], value["dtype"], value["sha256"]]
    shape = value["shape"]
    if not isinstance(shape, list) or not all(isinstance(text, str) for text in texts):
        return None
    numbers = [*shape, value["offset"], value["num_bytes"]]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        return None
    if not re.fullmatch("[0-9a-f]{64}", value["sha256"]):
        return None
    return TensorEntry(**{**value, "shape": tuple(shape)})


def refused_state(problems: Sequence[str]) -> CheckpointError:
    """Return the error for a wrong state. It names at most three problems."""
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return CheckpointError(
        f"state refused: {', '.join(problems[:3])}{more}",
        why="a stage must hold exactly the bits that its peers hold",
        fix="fetch the state again, from another member if it fails twice",
        code="E-CKP-002",
    )


def moment_prefixes(optimizer: OptimizerName) -> tuple[str, ...]:
    """Return the prefixes of an optimizer's moments."""
    return tuple(f"optimizer.{moment}." for moment in optimizer.moments)


def moments_of(run: RunConfig) -> tuple[str, ...]:
    """Return the prefixes of the moments that the members of a stage have in common."""
    if run.sync.steps_locally:
        return (MOMENTUM_PREFIX,)
    pending = (PENDING_PREFIX,) if run.delay else ()
    return moment_prefixes(run.optimizer.name) + pending


def state_tensors(run: RunConfig, stage_index: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of every tensor of a stage's state with its optimizer, by name."""
    wide = "float64" if run.model.dtype is ModelDtype.FLOAT64 else "float32"
    sections = dict.fromkeys(moments_of(run), wide)
    if run.model.dtype.value != wide:
        sections[MASTER_PREFIX] = wide
    return weight_tensors(run, stage_index) | {
        prefix + name: (dtype, shape)
        for prefix, dtype in sections.items()
        for name, shape in trained_shapes(run, stage_index).items()
    }


def weight_tensors(run: RunConfig, stage_index: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of every tensor of a stage's state without its optimizer."""
    shapes = trained_shapes(run, stage_index)
    return {name: (run.model.dtype.value, shape) for name, shape in shapes.items()}


def size_bytes_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Return the size of tensors of these dtypes and shapes, in bytes."""
    return sum(math.prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in tensors.values())


def state_size_bytes(run: RunConfig) -> int:
    """Return the size of the states of all stages with their optimizers, in bytes."""
    indices = range(run.stages.num_relay_stages + 1)
    return sum(size_bytes_of(state_tensors(run, index)) for index in indices)


def check_tensors(
    entries: Sequence[TensorEntry], expected: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Compare a description with the expected tensors of a stage's state.

    Raises:
        CheckpointError: A tensor is missing or unknown, comes twice, or has another dtype or shape.
    """
    found = {entry.name: (entry.dtype, entry.shape) for entry in entries}
    problems = ["a name comes twice"] if len(found) < len(entries) else []
    problems += [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name[:100]} is unknown" for name in found if name not in expected]
    problems += [
        f"{name} is {found[name]}, not {kind}"
        for name, kind in expected.items()
        if name in found and found[name] != kind
    ]
    if problems:
        raise refused_state(problems)
