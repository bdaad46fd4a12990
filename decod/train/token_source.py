"""The tokens that a data node reads, and what their marks say.

Both are checked before they index an embedding.

Legend: B sequences, T positions.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decod.data.block import Block
from decod.data.index import BEGINS
from decod.errors import DataError, ShapeError, TrainingError
from decod.ids import MicrobatchId
from decod.run.model_config import ModelConfig
from decod.run.training_config import BatchConfig


def begun_places(marks_BT: Tensor) -> Tensor:
    """Return the place of each position in its document, (B, T) int64. A row begins one.

    Args:
        marks_BT: uint8, of which `BEGINS` counts.
    """
    begins_BT = marks_BT & BEGINS == BEGINS
    here_T = torch.arange(begins_BT.shape[1], device=begins_BT.device)
    return here_T - (here_T * begins_BT).cummax(dim=1).values


NO_TARGET = -100
"""In the place of a target at positions whose next token is not learnt."""


class TokenSource(Protocol):
    """The source of a data node's tokens."""

    def microbatch(
        self, mb: MicrobatchId, batch: BatchConfig, seed: int
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        """Return (B, T + 1) token ids, as a pure function of the arguments."""
        ...

    def marks(
        self, mb: MicrobatchId, batch: BatchConfig, seed: int
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        """Return the marks of the tokens, (B, T + 1), alike. See `decod.data.index`."""
        ...

    def give(self, block: Block, content: bytes) -> None:
        """Take in a block that could not be read. It is verified like any other."""
        ...


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """The tokens of a microbatch, or of some of its sequences."""

    tokens: Tensor
    """(B, T + 1) int64."""
    targets: Tensor
    """(B, T) int64: the token that follows each position, or `NO_TARGET`."""
    num_targets: int
    places: Tensor | None
    """(B, T) int64: the place of each position in its document, if documents are read apart."""


def read_tokens(
    source: TokenSource | None,
    mb: MicrobatchId,
    batch: BatchConfig,
    model: ModelConfig,
    *,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return a microbatch's tokens, (B, T + 1) int64, and their marks, uint8: on CPU.

    Raises:
        DataError: A token is not in the model's vocabulary.
        ShapeError: The source gave another shape.
        TrainingError: There is no source.
    """
    if source is None:
        raise TrainingError(
            "this node has no data",
            why="a data node reads its microbatches from shards",
            fix="give its data folder in the node file",
        )
    array = source.microbatch(mb, batch, seed)
    tokens = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
    if tokens.shape != (batch.microbatch_size, batch.sequence_length + 1):
        raise ShapeError(
            f"tokens of microbatch {mb} are {tuple(tokens.shape)}",
            why="they do not fill a microbatch",
            fix="prepare the data again",
        )
    low, high = (int(bound) for bound in tokens.aminmax())
    if low < 0 or high >= model.vocab_size:
        raise DataError(
            f"microbatch {mb} holds tokens from {low} to {high}",
            why=f"the model's vocabulary has {model.vocab_size}",
            fix="raise model.vocab_size or prepare the data with the run's tokenizer",
            code="E-DAT-018",
        )
    marks = torch.from_numpy(source.marks(mb, batch, seed))
    if marks.shape != tokens.shape:
        raise ShapeError(
            f"marks of microbatch {mb} are {tuple(marks.shape)}",
            why="each token has one",
            fix="prepare the data again",
        )
    return tokens, marks
