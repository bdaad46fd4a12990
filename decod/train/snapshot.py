"""A stage's state as one described blob of bytes, which donors send to newcomers.

The blob holds the parameters by their checkpoint names. With the optimizer, it also holds the
moments that the members have in common, such as `optimizer.exp_avg.<name>`. bfloat16 models add
`optimizer.master.<name>`. Every tensor has a sha256, and so has each of its chunks. Loading
verifies everything before it changes anything.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from decod.errors import CheckpointError
from decod.files import PieceFile
from decod.train.checkpoint.description import aligned, cut, describe_blob, hash_tensor
from decod.train.checkpoint.entries import MASTER_PREFIX, TensorEntry, refused_state
from decod.train.layout import Layout, byte_view
from decod.train.reduction import is_finite
from decod.train.shared_state import SharedState


@dataclass(frozen=True, slots=True)
class SnapshotLayout:
    """The tensors of a blob, and their places in it."""

    places: tuple[TensorEntry, ...]
    """Entries without hashes."""
    tensors: tuple[Tensor, ...]
    """On any device. One may be of a wider dtype than its place, to which it is rounded."""
    num_bytes: int

    def write(self, blob: Tensor) -> tuple[list[TensorEntry], list[str]]:
        """Copy all tensors into a blob. Return their entries and the hashes of all chunks.

        Args:
            blob: (num_bytes,) uint8 on CPU. Gaps are not written.
        """
        self.copy(blob)
        return describe_blob(self.places, byte_view(blob))

    def write_file(self, path: Path) -> tuple[list[TensorEntry], list[str]]:
        """Write all tensors into a file, as `write` does into a blob, a few MiB at a time.

        Args:
            path: The file, which exists. Gaps are not written.

        Raises:
            CheckpointError: The disk refuses.
        """
        described, digests = [], []
        try:
            with (
                ThreadPoolExecutor(1) as writer,
                closing(PieceFile(os.open(path, os.O_RDWR | os.O_NOFOLLOW))) as file,
            ):
                for place, tensor in zip(self.places, self.tensors, strict=True):
                    whole, chunks = hash_tensor(_written(writer, file, place, tensor))
                    described.append(replace(place, sha256=whole))
                    digests += chunks
        except OSError as error:
            raise CheckpointError(
                f"a copy of the state can't be written to {path} ({error.strerror or error})",
                why="checkpoints, exports and newcomers get the state from there",
                fix="free space on that disk, or give --state-dir a larger one",
            ) from error
        return described, digests

    def copy(self, blob: Tensor) -> None:
        """Copy all tensors into a blob, as `write` does."""
        assert blob.shape == (self.num_bytes,), (blob.shape, self.num_bytes)
        for place, tensor in zip(self.places, self.tensors, strict=True):
            target = blob[place.offset : place.offset + place.num_bytes]
            flat_N = tensor.detach().reshape(-1).to(getattr(torch, place.dtype))
            target.copy_(flat_N.view(torch.uint8))


def _written(
    writer: ThreadPoolExecutor, file: PieceFile, place: TensorEntry, tensor: Tensor
) -> Iterator[memoryview]:
    """Yield a tensor's bytes chunk by chunk. Each is written while the caller hashes it."""
    flat_N, dtype = tensor.detach().reshape(-1), getattr(torch, place.dtype)
    for offset, size in cut(place):
        first = (offset - place.offset) // dtype.itemsize
        piece = byte_view(flat_N[first : first + size // dtype.itemsize].to(dtype).cpu())
        writing = writer.submit(file.write_at, offset, piece)
        yield piece
        writing.result()


def _sections(
    state: SharedState, dtype: torch.dtype, *, with_optimizer: bool
) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Yield name prefix, flat buffer and dtype of each section, in the order of the blob."""
    yield "", state.weights, dtype
    if with_optimizer:
        for prefix, moment_P in state.moments.items():
            yield prefix, moment_P, moment_P.dtype
        if dtype != state.weights.dtype:
            yield MASTER_PREFIX, state.weights, state.weights.dtype


def take_snapshot(
    state: SharedState, layout: Layout, dtype: torch.dtype, *, with_optimizer: bool
) -> SnapshotLayout:
    """Return a snapshot. Its tensors are views of the state: write it before the next commit.

    Args:
        state: The state. Not changed.
        layout: Positions of its parameters.
        dtype: The model's dtype.
        with_optimizer: Whether to include the moments, and the master weights if there are any.
    """
    places, tensors, offset = [], [], 0
    for prefix, flat_P, kind in _sections(state, dtype, with_optimizer=with_optimizer):
        for name, tensor in layout.views(flat_P):
            num_bytes = tensor.numel() * kind.itemsize
            named, shape = str(kind).removeprefix("torch."), layout.shapes[name]
            places.append(TensorEntry(prefix + name, named, shape, offset, num_bytes, ""))
            tensors.append(tensor)
            offset += aligned(num_bytes)
    return SnapshotLayout(tuple(places), tuple(tensors), offset)


def read_state(
    blob: Tensor,
    entries: Sequence[TensorEntry],
    layout: Layout,
    dtype: torch.dtype,
    prefixes: Sequence[str],
) -> SharedState:
    """Return the state in a blob, in new memory on CPU.

    Args:
        blob: uint8 on CPU. Not changed.
        entries: Expected content, in any order.
        layout: This stage's parameters.
        dtype: The model's dtype.
        prefixes: Of the moments.

    Raises:
        CheckpointError: As `filled_state`, or a tensor lies outside the blob.
    """
    return filled_state(
        entries, lambda target, entry: fill(target, entry, blob), layout, dtype, prefixes
    )


Fill = Callable[[Tensor, TensorEntry], str | None]
"""Puts a tensor into its place. Returns the problem, if there is one."""


def filled_state(
    entries: Sequence[TensorEntry],
    fill_one: Fill,
    layout: Layout,
    dtype: torch.dtype,
    prefixes: Sequence[str],
) -> SharedState:
    """Return the state of some tensors, in new memory on CPU.

    Without optimizer entries, the moments are zero and the master weights equal the parameters.
    Beside the state, only the parameters in the model's dtype are in memory.

    Args:
        entries: Expected content, in any order.
        fill_one: Puts one of them into its place, which is contiguous and on the CPU.
        layout: This stage's parameters.
        dtype: The model's dtype.
        prefixes: Of the moments.

    Raises:
        CheckpointError: A tensor is missing, foreign, altered or not finite.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sections = {"": dtype}
    if any(entry.name.startswith("optimizer.") for entry in entries):
        sections |= dict.fromkeys(prefixes, wide)
        sections |= {MASTER_PREFIX: wide} if dtype != wide else {}
    # New buffers of the right sizes, to be filled tensor by tensor.
    flats = {
        prefix: torch.empty(layout.num_elements, dtype=kind) for prefix, kind in sections.items()
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
        if name in by_name:
            problem = _misfit(target, by_name[name]) or fill_one(target, by_name[name])
            problems += [problem] if problem else []
    if not problems:
        bad = [prefix for prefix, flat_P in flats.items() if not is_finite(flat_P)]
        problems = [f"{prefix or 'weights'} not finite" for prefix in bad]
    weights_P = flats.get(MASTER_PREFIX, flats[""])
    if not problems and not _are_rounded(layout, flats[""], weights_P):
        problems.append("parameters are not the rounded master weights")
    if problems:
        raise refused_state(problems)
    weights_P = weights_P.to(wide)
    moments = {
        prefix: flats[prefix] if prefix in flats else torch.zeros_like(weights_P)
        for prefix in prefixes
    }
    return SharedState(weights_P, moments)


def _are_rounded(layout: Layout, parameters_P: Tensor, weights_P: Tensor) -> bool:
    pairs = zip(layout.views(parameters_P), layout.views(weights_P), strict=True)
    return all(torch.equal(wide.to(rounded.dtype), rounded) for (_, rounded), (_, wide) in pairs)


def _misfit(target: Tensor, entry: TensorEntry) -> str | None:
    kind = str(target.dtype).removeprefix("torch.")
    if (entry.dtype, entry.shape) != (kind, tuple(target.shape)):
        return f"{entry.name} is {entry.dtype} {entry.shape}, not {kind} {tuple(target.shape)}"
    num_bytes = target.numel() * target.element_size()
    return None if entry.num_bytes == num_bytes else f"{entry.name} has {entry.num_bytes} bytes"


def fill(target: Tensor, entry: TensorEntry, blob: Tensor) -> str | None:
    """Copy one tensor out of a blob, once its hash has been found right.

    Args:
        target: Contiguous, on the CPU.
        entry: Of the tensor.
        blob: uint8 on CPU.

    Returns:
        The problem, if there is one. Nothing is copied then.
    """
    if problem := _misfit(target, entry):
        return problem
    num_bytes = entry.num_bytes
    if entry.offset + num_bytes > blob.numel():
        return f"{entry.name} lies outside of the {blob.numel()} bytes received"
    source = blob[entry.offset : entry.offset + num_bytes]
    if hashlib.sha256(byte_view(source)).hexdigest() != entry.sha256:
        return f"{entry.name} was altered"
    target.view(-1).view(torch.uint8).copy_(source)
    return None
