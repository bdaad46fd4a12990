"""A stage's state as one blob of bytes with a description: what donors send to newcomers.

The blob holds the parameters by their checkpoint names and, with the optimizer, its moments as
`optimizer.exp_avg.<name>` and `optimizer.exp_avg_sq.<name>`; bfloat16 models add
`optimizer.master.<name>`. Every tensor carries its sha256. Loading verifies everything before it
changes anything.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from decod.errors import CheckpointError
from decod.train.adamw import StageState
from decod.train.layout import Layout, byte_view
from decod.train.reduction import is_finite

_ALIGNMENT_BYTES = 64
"""Every tensor starts at a multiple, so that it can be read in place in any dtype."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a blob."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Description of a blob and the tensors to fill it with."""

    entries: tuple[TensorEntry, ...]
    tensors: tuple[Tensor, ...]
    num_bytes: int

    def describe(self) -> list[dict[str, Any]]:
        """Return the entries as JSON objects."""
        return [asdict(entry) | {"shape": list(entry.shape)} for entry in self.entries]

    def write(self, blob: Tensor) -> None:
        """Copy all tensors into a blob, (num_bytes,) uint8 on CPU. Gaps are left as they are."""
        for entry, tensor in zip(self.entries, self.tensors, strict=True):
            target = blob[entry.offset : entry.offset + entry.num_bytes]
            target.copy_(tensor.detach().reshape(-1).view(torch.uint8))


def _sections(
    state: StageState, dtype: torch.dtype, *, with_optimizer: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield name prefix and flat buffer of each section, in the order of the blob."""
    yield "", state.weights.to(dtype)
    if with_optimizer:
        yield "optimizer.exp_avg.", state.mean
        yield "optimizer.exp_avg_sq.", state.square
        if dtype != state.weights.dtype:
            yield "optimizer.master.", state.weights


def take_snapshot(
    state: StageState, layout: Layout, dtype: torch.dtype, *, with_optimizer: bool
) -> Snapshot:
    """Return a snapshot whose tensors are views of the state: write it before the next commit.

    Args:
        state: What to describe. Not changed.
        layout: Positions of its parameters.
        dtype: The model's.
        with_optimizer: Whether the moments, and master weights if any, belong to it.
    """
    entries, tensors, offset = [], [], 0
    for prefix, flat_P in _sections(state, dtype, with_optimizer=with_optimizer):
        for name, tensor in layout.views(flat_P):
            num_bytes = tensor.numel() * tensor.element_size()
            digest = hashlib.sha256(byte_view(tensor.cpu())).hexdigest()
            kind = str(tensor.dtype).removeprefix("torch.")
            shape = layout.shapes[name]
            entries.append(TensorEntry(prefix + name, kind, shape, offset, num_bytes, digest))
            tensors.append(tensor)
            offset += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return Snapshot(tuple(entries), tuple(tensors), offset)


def parse_entries(values: object) -> list[TensorEntry]:
    """Return the entries of a description that came from outside.

    Raises:
        CheckpointError: A field is missing or of a wrong type or range, or a name comes twice.
    """
    if not isinstance(values, list):
        raise _refuse(["the description is no list"])
    entries = [entry for value in values if (entry := _parse_entry(value)) is not None]
    if len(entries) != len(values):
        raise _refuse([f"{len(values) - len(entries)} descriptions are malformed"])
    if len({entry.name for entry in entries}) != len(entries):
        raise _refuse(["a name comes twice"])
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


def _refuse(problems: Sequence[str]) -> CheckpointError:
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return CheckpointError(
        f"state refused: {', '.join(problems[:3])}{more}",
        why="a stage must hold exactly the bits that its peers hold",
        fix="fetch the state again, from another member if it fails twice",
        code="E-CKP-002",
    )


def read_state(
    blob: Tensor, entries: Sequence[TensorEntry], layout: Layout, dtype: torch.dtype
) -> StageState:
    """Return the state that a blob holds, in new memory on CPU.

    Without optimizer entries the moments are zero and master weights equal the parameters.

    Args:
        blob: uint8 on CPU. Not changed.
        entries: What it should hold, in any order.
        layout: This stage's parameters.
        dtype: The model's.

    Raises:
        CheckpointError: A tensor is missing, foreign, altered, not finite, or lies outside.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    zeros_P = torch.zeros(layout.num_elements, dtype=wide)
    expected = StageState(zeros_P, zeros_P.clone(), zeros_P.clone())
    with_optimizer = any(entry.name.startswith("optimizer.") for entry in entries)
    # New buffers of the right sizes; filled below, section by section.
    flats = {
        prefix: torch.empty_like(flat_P)
        for prefix, flat_P in _sections(expected, dtype, with_optimizer=with_optimizer)
    }
    targets = {
        prefix + name: tensor
        for prefix, flat_P in flats.items()
        for name, tensor in layout.views(flat_P)
    }
    by_name = {entry.name: entry for entry in entries}
    problems = [f"{name} is missing" for name in targets if name not in by_name]
    problems += [f"{name} is unknown" for name in by_name if name not in targets]
    for name, target in targets.items():
        if name in by_name and (problem := _fill(target, by_name[name], blob)):
            problems.append(problem)
    if not problems:
        bad = [prefix for prefix, flat_P in flats.items() if not is_finite(flat_P)]
        problems = [f"{prefix or 'weights'} not finite" for prefix in bad]
    weights_P = flats.get("optimizer.master.", flats[""])
    if not problems and not torch.equal(weights_P.to(dtype), flats[""]):
        problems.append("parameters are not the rounded master weights")
    if problems:
        raise _refuse(problems)
    return StageState(
        weights_P.to(wide),
        flats.get("optimizer.exp_avg.", expected.mean),
        flats.get("optimizer.exp_avg_sq.", expected.square),
    )


def _fill(target: Tensor, entry: TensorEntry, blob: Tensor) -> str | None:
    """Copy one tensor out of the blob; return what is wrong with it, if anything."""
    kind = str(target.dtype).removeprefix("torch.")
    if (entry.dtype, entry.shape) != (kind, tuple(target.shape)):
        return f"{entry.name} is {entry.dtype} {entry.shape}, not {kind} {tuple(target.shape)}"
    num_bytes = target.numel() * target.element_size()
    if entry.num_bytes != num_bytes or entry.offset + num_bytes > blob.numel():
        return f"{entry.name} lies outside of the {blob.numel()} bytes received"
    source = blob[entry.offset : entry.offset + num_bytes]
    if hashlib.sha256(byte_view(source)).hexdigest() != entry.sha256:
        return f"{entry.name} was altered"
    target.view(-1).view(torch.uint8).copy_(source)
    return None
