"""A stage's state as one described blob of bytes, which donors send to newcomers.

The blob holds the parameters by their checkpoint names. With the optimizer, it also holds the
moments that the members have in common, such as `optimizer.exp_avg.<name>`. bfloat16 models add
`optimizer.master.<name>`. Every tensor has a sha256, and so has each of its chunks. See
`state_loading` for the other direction.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from decod.errors import CheckpointError
from decod.files import PieceFile
from decod.train.checkpoint.description import aligned, cut, describe_blob, hash_tensor
from decod.train.checkpoint.entries import MASTER_PREFIX, TensorEntry
from decod.train.layout import Layout, byte_view
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
