"""One stage's state: the committed one, and that of a proposed step.

A proposed step is written beside the committed state. To undo it is to forget it.

For newcomers, the state is one described blob of bytes. It holds the parameters by their checkpoint
names. With the optimizer, it also holds the moments that the members have in common, such as
`optimizer.exp_avg.<name>`. bfloat16 models add `optimizer.master.<name>`. Every tensor has a
sha256, and so has each of its chunks. `decod.train.start` is the other direction.

Legend: P parameters of the stage.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor

from decod.errors import CheckpointError, TrainingError
from decod.files import PieceFile
from decod.train.checkpoint.description import aligned, cut, describe_blob, hash_tensor
from decod.train.checkpoint.entries import MASTER_PREFIX, TensorEntry
from decod.train.layout import Layout, SharedState, byte_view
from decod.train.reduction import require_finite
from decod.train.update_rule import StateT, UpdateRule


@dataclass(frozen=True, slots=True)
class SnapshotLayout:
    """The tensors of a blob, and their places in it."""

    places: tuple[TensorEntry, ...]
    """Entries without hashes."""
    tensors: tuple[Tensor, ...]
    """Tensors on any device. One may be of a wider dtype than its place, to which it is rounded."""
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
        described = []
        digests = []
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
    flat_N = tensor.detach().reshape(-1)
    dtype = getattr(torch, place.dtype)
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
    places = []
    tensors = []
    offset = 0
    for prefix, flat_P, kind in _sections(state, dtype, with_optimizer=with_optimizer):
        for name, tensor in layout.views(flat_P):
            num_bytes = tensor.numel() * kind.itemsize
            named = str(kind).removeprefix("torch.")
            shape = layout.shapes[name]
            places.append(TensorEntry(prefix + name, named, shape, offset, num_bytes, ""))
            tensors.append(tensor)
            offset += aligned(num_bytes)
    return SnapshotLayout(tuple(places), tuple(tensors), offset)


@dataclass(frozen=True, slots=True)
class Proposal(Generic[StateT]):
    """The state after a step that is not final."""

    iteration: int
    state: StateT
    averaged: bool
    """Whether the step came from an average."""


class CommittedState(Generic[StateT]):
    """The committed state, and at most one proposed step.

    Args:
        layout: Positions of the parameters.
        rule: What a step does.
        shared: The first state.
        iteration: The iteration that it was committed in; 0 before the first.
    """

    def __init__(
        self, layout: Layout, rule: UpdateRule[StateT], shared: SharedState, iteration: int
    ) -> None:
        assert shared.weights.shape == (layout.num_elements,), shared.weights.shape
        self.layout = layout
        self._rule = rule
        self.committed = rule.begin(shared, iteration, layout)
        self.iteration = self.anchor = iteration
        """The last committed iteration, and the last that ended a phase or with an average."""
        self.hash = rule.hash(layout, self.committed)
        """The hash of what the members of the stage have in common."""
        self._proposed: Proposal[StateT] | None = None
        self._proposed_hash = ""
        self._spare: StateT | None = None
        """Buffers for the next proposed step."""
        self.ahead: StateT | None = None
        """What is known of the next step beforehand, in these buffers or the proposed step's."""

    def replace(self, shared: SharedState, iteration: int) -> None:
        """Begin anew from what the stage has in common, and forget a proposed step."""
        assert shared.weights.shape == (self.layout.num_elements,), shared.weights.shape
        self.retract()
        self.committed = self._rule.begin(shared, iteration, self.layout)
        self._spare = self.ahead = None
        self.iteration = self.anchor = iteration
        self.hash = self._rule.hash(self.layout, self.committed)

    @property
    def shared(self) -> SharedState:
        """What the members of the stage have in common. Views of the committed state."""
        return self._rule.shared(self.committed)

    def free_spare(self) -> None:
        """Free the buffers of the next step unless there is something in them."""
        if self.ahead is None:
            self._spare = None

    def require_settled(self) -> None:
        """Raise a TrainingError while a step is proposed."""
        if self._proposed is not None:
            raise TrainingError(
                f"iteration {self._proposed.iteration} is proposed and not committed",
                why="a microbatch now would be computed with weights that may be undone",
                fix="commit or reset first",
                code="E-TRN-004",
            )

    def buffers_for(self, iteration: int) -> StateT:
        """Return the buffers that a proposed step may overwrite. An earlier one is forgotten.

        Raises:
            TrainingError: The iteration is already committed.
        """
        if iteration <= self.iteration:
            raise TrainingError(
                f"iteration {iteration} is proposed after {self.iteration} was committed",
                why="a step is taken once",
                fix="repeat with the current iteration",
            )
        self.retract()
        if self._spare is None:
            self._spare = self.committed.empty_like()
        return self._spare

    def propose(self, proposal: Proposal[StateT]) -> str:
        """Take in a computed step. Return the hash of what the stage will have in common.

        Raises:
            NonFiniteError: A weight is not finite. Nothing is proposed.
        """
        assert proposal.iteration > self.iteration, "a step is taken once"
        assert proposal.state is not self.committed, "a step is written beside the committed state"
        weights_P = proposal.state.weights
        require_finite(weights_P, f"stage after iteration {proposal.iteration}")
        # An iteration without an average changes nothing that is common.
        digest = self._rule.hash(self.layout, proposal.state) if proposal.averaged else self.hash
        self._proposed = proposal
        self._proposed_hash = digest
        self._spare = None
        return digest

    def retract(self) -> None:
        """Forget a proposed step."""
        if self._proposed is not None:
            self._spare = self._proposed.state
            self._proposed = None

    def commit(self, iteration: int) -> None:
        """Make the proposed step final.

        Raises:
            TrainingError: This iteration is not the proposed one.
        """
        proposal = self._proposed
        if proposal is None or proposal.iteration != iteration:
            proposed = "none" if proposal is None else str(proposal.iteration)
            raise TrainingError(
                f"commit of iteration {iteration}, but proposed is {proposed}",
                why="only a step that all members agreed on becomes final",
                fix="propose it first",
                code="E-TRN-007",
            )
        self._spare = self.committed
        self.committed = proposal.state
        self.ahead = None
        self._proposed = None
        self.iteration = iteration
        if proposal.averaged:
            self.anchor = iteration
            self.hash = self._proposed_hash
