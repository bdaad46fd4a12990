"""A stage's state from tensors that are read in pieces, straight into the memory where it stays.

Beside the state, one piece at a time is in memory. Every tensor is hashed while it is read. Nobody
gets the state before all of it has been verified.

Legend: P parameters of the stage, N elements of a tensor.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decod.errors import CheckpointError
from decod.texts import why_of
from decod.train.checkpoint.description import cut
from decod.train.checkpoint.entries import MASTER_PREFIX, TensorEntry, refused_state
from decod.train.checkpoint.state_bytes import StateBytes
from decod.train.layout import Layout
from decod.train.reduction import is_finite
from decod.train.shared_state import SharedState

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
        size, wide, device = form.layout.num_elements, form.wide, form.device
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
    dtype, digest, left = getattr(torch, entry.dtype), hashlib.sha256(), entry.num_bytes
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
