"""A stage's state from elsewhere: the seed, a model folder, a checkpoint, or other members.

Tensors are read in pieces, straight into the memory where they stay. Beside the state, one piece at
a time is in memory. Every tensor is hashed while it is read. Nobody gets the state before all of it
has been verified.

The weights of a lost stage are mixed from those of its neighbours. Source: CheckFree
(arXiv:2506.15461), section 4. Deviation: both neighbours have the same weight. The paper weighs
them by the norms of their last gradients. The first and the last relay stage have one neighbour
among the relays, and get its weights.

Legend: P parameters of the stage, N elements of a tensor.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decod.errors import CheckpointError
from decod.model.hf import require_same
from decod.model.hf_folder import fill_weights
from decod.model.shape import frozen_shapes
from decod.model.stage import TORCH_DTYPES, initial_pieces
from decod.model.weights import read_config
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.texts import why_of
from decod.train.checkpoint.base import BaseSource, parts_of
from decod.train.checkpoint.description import cut
from decod.train.checkpoint.entries import MASTER_PREFIX, StateBytes, TensorEntry, refused_state
from decod.train.checkpoint.places import Folder
from decod.train.checkpoint.store import find_tensors, read_checkpoint
from decod.train.layout import Layout, SharedState
from decod.train.reduction import is_finite, require_finite

_BLOCK = re.compile(r"\.(\d+)\.")
"""The number of a block in the names of its parameters."""


def mixed_weights(layout: Layout, donors: Sequence[tuple[Layout, Tensor]]) -> Tensor:
    """Return the mean of other stages' weights, block by block, (P,) in the donors' dtype.

    Args:
        layout: Layout of the new stage, which contains only blocks. If a donor has another number
            of blocks, each block comes from the donor's block at the nearest place.
        donors: Layouts and weights, (their P,), float32 or float64 on CPU. Not changed. At least 1.
    """
    mixed_P = torch.zeros(layout.num_elements, dtype=donors[0][1].dtype)
    own = _blocks(layout)
    for donor, weights_P in donors:
        theirs = _blocks(donor)
        views = dict(donor.views(weights_P))
        for name, target in layout.views(mixed_P):
            place = own.index(_block_of(name))
            nearest = theirs[(2 * place + 1) * len(theirs) // (2 * len(own))]
            target.add_(views[_BLOCK.sub(f".{nearest}.", name, count=1)])
    return mixed_P / len(donors)


def _blocks(layout: Layout) -> list[int]:
    return sorted({_block_of(name) for name in layout.shapes})


def _block_of(name: str) -> int:
    found = _BLOCK.search(name)
    assert found is not None, name
    return int(found[1])


Pieces = Callable[[TensorEntry], Iterable[memoryview | bytes]]
"""Reads a tensor: its bytes in order, a few MiB of whole numbers at a time. Fewer bytes than the
entry names mean that the tensor ends there."""


@dataclass(frozen=True, slots=True)
class StateForm:
    """The form of a state in memory.

    Attributes:
        layout: The stage's parameters.
        dtype: The model's dtype.
        prefixes: Of the moments.
        device: Where the state is to be.
    """

    layout: Layout
    dtype: torch.dtype
    prefixes: Sequence[str]
    device: str = "cpu"

    @property
    def wide(self) -> torch.dtype:
        """The dtype of weights and moments."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def pieces_of(blobs: Sequence[tuple[StateBytes, Sequence[TensorEntry]]]) -> Pieces:
    """Return what reads the tensors of several blobs with these contents."""
    reading = {entry.name: blob_pieces(data) for data, entries in blobs for entry in entries}
    return lambda entry: reading[entry.name](entry)


def blob_pieces(data: StateBytes) -> Pieces:
    """Return what reads the tensors of a blob."""

    def pieces(entry: TensorEntry) -> Iterator[memoryview | bytes]:
        for offset, size in cut(entry):
            try:
                yield data[offset : offset + size]
            except OSError as error:
                raise CheckpointError(
                    f"{entry.name} can't be read from this host's disk",
                    why=why_of(error),
                    fix="mend the disk, or give --state-dir another one",
                ) from error

    return pieces


def loaded_state(entries: Sequence[TensorEntry], pieces: Pieces, form: StateForm) -> SharedState:
    """Return the state of some tensors, in new memory.

    Without optimizer entries, the moments are zero and the master weights equal the parameters.

    Args:
        entries: Expected content, in any order.
        pieces: Reads one of them.
        form: What is to come of them.

    Raises:
        CheckpointError: A tensor is missing, foreign, altered or not finite, or can't be read.
    """
    loading = _Loading(entries, form)
    problems = loading.read(pieces)
    if not problems and loading.infinite:
        problems = [f"{prefix or 'weights'} not finite" for prefix in loading.infinite]
    if not problems and not loading.rounded:
        problems = ["parameters are not the rounded master weights"]
    if problems:
        raise refused_state(problems)
    return loading.state


class _Loading:
    """A state that is being read. See `loaded_state`."""

    def __init__(self, entries: Sequence[TensorEntry], form: StateForm) -> None:
        self._form = form
        self._entries = {entry.name: entry for entry in entries}
        with_optimizer = any(entry.name.startswith("optimizer.") for entry in entries)
        size = form.layout.num_elements
        wide = form.wide
        device = form.device
        weights_P = torch.empty(size, dtype=wide, device=device)
        make = torch.empty if with_optimizer else torch.zeros
        moments = {prefix: make(size, dtype=wide, device=device) for prefix in form.prefixes}
        self.state = SharedState(weights_P, moments)
        has_masters = with_optimizer and form.dtype != wide
        # Masters come first: the parameters are compared with them, and kept nowhere.
        self._flats = {MASTER_PREFIX: weights_P} if has_masters else {"": weights_P}
        self._flats |= moments if with_optimizer else {}
        self._compared = [""] if has_masters else []
        self.infinite: list[str] = []
        """Prefixes of tensors that are not finite."""
        self.rounded = True
        """Whether the parameters are the rounded master weights."""

    def read(self, pieces: Pieces) -> list[str]:
        """Read all tensors; return what is wrong with them."""
        named = [
            (prefix, name, here)
            for prefix in (*self._flats, *self._compared)
            for name, here in self._form.layout.slices.items()
        ]
        known = {prefix + name for prefix, name, _ in named}
        problems = [f"{name} is missing" for name in sorted(known - self._entries.keys())]
        problems += [f"{name} is unknown" for name in self._entries if name not in known]
        for prefix, name, here in named:
            entry = self._entries.get(prefix + name)
            if entry is not None and (problem := self._read_one(entry, prefix, here, pieces)):
                problems.append(problem)
        if not problems:
            bad = [prefix for prefix, flat_P in self._flats.items() if not is_finite(flat_P)]
            self.infinite = list(dict.fromkeys(self.infinite + bad))
        return problems

    def _read_one(self, entry: TensorEntry, prefix: str, here: slice, pieces: Pieces) -> str | None:
        """Read a tensor; return the problem with it."""
        shape = self._form.layout.shapes[entry.name.removeprefix(prefix)]
        dtype = self._form.wide if prefix else self._form.dtype
        if problem := misfit(entry, dtype, shape):
            return problem
        if prefix not in self._compared:
            return filled(self._flats[prefix][here], entry, pieces(entry))
        return taken(entry, pieces(entry), self._compare(here))

    def _compare(self, here: slice) -> Callable[[Tensor], None]:
        """Return what compares the next elements of the parameters with the master weights."""
        start = here.start
        weights_P = self._flats[MASTER_PREFIX]

        def compare(values_N: Tensor) -> None:
            nonlocal start
            there_N = weights_P[start : start + len(values_N)]
            start += len(values_N)
            values_N = values_N.to(there_N.device)
            if not is_finite(values_N):
                self.infinite.append("")
            self.rounded &= torch.equal(there_N.to(values_N.dtype), values_N)

        return compare


def filled(
    target_N: Tensor, entry: TensorEntry, pieces: Iterable[memoryview | bytes]
) -> str | None:
    """Copy a tensor to its place, piece by piece; return the problem if it is not as described.

    Args:
        target_N: (N,) on any device, maybe of a wider dtype. Its content is undefined if there is a
            problem.
        entry: Of the tensor.
        pieces: Its bytes. See `Pieces`.
    """
    start = 0

    def fill(values_N: Tensor) -> None:
        nonlocal start
        target_N[start : start + len(values_N)].copy_(values_N)
        start += len(values_N)

    return taken(entry, pieces, fill)


def taken(
    entry: TensorEntry, pieces: Iterable[memoryview | bytes], take: Callable[[Tensor], None]
) -> str | None:
    """Hash a tensor and hand it over piece by piece; return the problem if it is not as described.

    Args:
        entry: Of the tensor.
        pieces: Its bytes. See `Pieces`.
        take: Gets the next elements, on the CPU.
    """
    dtype = getattr(torch, entry.dtype)
    digest = hashlib.sha256()
    left = entry.num_bytes
    for piece in pieces:
        digest.update(piece)
        left -= len(piece)
        if left < 0 or len(piece) % dtype.itemsize:
            break
        if piece:
            take(torch.frombuffer(bytearray(piece), dtype=dtype))
    if left:
        return f"{entry.name} has not the {entry.num_bytes} bytes that it should have"
    return None if digest.hexdigest() == entry.sha256 else f"{entry.name} was altered"


def misfit(entry: TensorEntry, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
    """Return how a described tensor differs from one of this dtype and shape."""
    kind = str(dtype).removeprefix("torch.")
    if (entry.dtype, entry.shape) != (kind, tuple(shape)):
        return f"{entry.name} is {entry.dtype} {entry.shape}, not {kind} {tuple(shape)}"
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return None if entry.num_bytes == num_bytes else f"{entry.name} has {entry.num_bytes} bytes"


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint that a run resumes from."""

    folder: Folder
    sha256: str
    """Hash of its manifest, on which the run's members agree."""


def initial_weights(
    model: ModelConfig, form: StateForm, *, seed: int, folder: Path | None
) -> Tensor:
    """Return a stage's first weights, flat in the order of its layout, (P,) wide.

    Args:
        model: The whole model.
        form: What is to come of them.
        seed: Seed of the weights. Not used with a folder.
        folder: A model folder that holds at least this stage. None: build weights from the seed.

    Raises:
        DataError: The folder cannot be read or holds another model.
        NonFiniteError: Its weights are not finite.
    """
    layout = form.layout
    weights_P = torch.empty(layout.num_elements, dtype=form.wide, device=form.device)
    targets = {name: weights_P[here] for name, here in layout.slices.items()}
    if folder is None:
        for name, target_N in targets.items():
            start = 0
            pieces = initial_pieces(model, seed=seed, name=name, shape=layout.shapes[name])
            for values_N in pieces:
                target_N[start : start + len(values_N)].copy_(values_N)
                start += len(values_N)
        return weights_P
    given = read_config(folder, dtype=model.dtype, built=model.is_built)
    require_same(model, given, folder / "config.json")
    fill_weights(folder, model, targets)
    require_finite(weights_P, f"the model in {folder}")
    return weights_P


def frozen_weights(
    run: RunConfig, stage_index: int, base: BaseSource | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that a stage holds and does not train, on the CPU.

    Args:
        run: The run.
        stage_index: The stage.
        base: Where they are on this host. None: they are zeros.

    Raises:
        CheckpointError: They can't be read, or are not here.
        DataError: This host has others.
    """
    shapes = frozen_shapes(run, stage_index)
    dtype = TORCH_DTYPES[run.model.dtype]
    if base is None:
        yield from ((name, torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items())
        return
    for part in parts_of(run, stage_index) if shapes else ():
        found = base.find(run.model, part)
        if found is None:
            raise CheckpointError(
                f"part {part} of the weights that the run adapts is not on this host",
                why="a stage can't be built without them",
                fix="start the node again: it fetches them anew",
                code="E-CKP-022",
            )
        for entry in found.description.entries:
            weights = torch.empty(entry.shape, dtype=dtype)
            pieces = (found.read(offset) for offset, _ in cut(entry))
            if problem := filled(weights.view(-1), entry, pieces):
                raise refused_state([problem])
            yield entry.name, weights


def checkpoint_state(source: CheckpointSource, form: StateForm) -> tuple[SharedState, int]:
    """Return a stage's state from a checkpoint, and its iteration.

    The tensors may come from several stages' files, because the run that wrote them may have cut
    the model differently.

    Args:
        source: The checkpoint.
        form: What is to come of it.

    Raises:
        CheckpointError: It is not the agreed checkpoint, was altered, or lacks a tensor.
    """
    checkpoint = read_checkpoint(source.folder)
    manifest = checkpoint.manifest
    if manifest is None or manifest.sha256 != source.sha256:
        raise CheckpointError(
            f"{source.folder} is not the checkpoint that this run started from",
            why=checkpoint.problem or "its manifest has another hash",
            fix="put it back, or start the run again with --resume",
            code="E-CKP-010",
        )
    moments = tuple(form.prefixes)
    prefixes = ("", *moments, MASTER_PREFIX)
    names = {prefix + name for prefix in prefixes for name in form.layout.shapes}
    stored = {name: at for name, at in find_tensors(checkpoint).items() if name in names}
    entries = [tensor.entry for tensor in stored.values()]
    if entries and not any(entry.name.startswith(moments) for entry in entries):
        raise CheckpointError(
            f"{source.folder} holds no moments of the optimizer for this stage",
            why="with others in their place training would take another way",
            fix="use another checkpoint, or export the model and start from it with --init",
            code="E-CKP-010",
        )
    state = loaded_state(entries, lambda entry: stored[entry.name].pieces(), form)
    return state, manifest.iteration
