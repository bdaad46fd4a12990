"""Tokens of a microbatch, checked before they index an embedding."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decod.data.block import Block
from decod.errors import DataError, ShapeError, TrainingError
from decod.ids import MicrobatchId
from decod.run.model_config import ModelConfig
from decod.run.training_config import BatchConfig


class TokenSource(Protocol):
    """The source of a data node's tokens."""

    def microbatch(
        self, mb: MicrobatchId, batch: BatchConfig, seed: int
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        """Return (B, T + 1) token ids, as a pure function of the arguments."""
        ...

    def give(self, block: Block, content: bytes) -> None:
        """Take in a block that could not be read. It is verified like any other."""
        ...


def read_tokens(
    source: TokenSource | None,
    mb: MicrobatchId,
    batch: BatchConfig,
    model: ModelConfig,
    *,
    seed: int,
) -> Tensor:
    """Return a microbatch's tokens, (B, T + 1) int64 on CPU.

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
    return tokens
