"""The sequences of each microbatch that one of several devices of a host computes.

All formats of activations keep sequences apart: no block of a format belongs to two of them. So a
device finds its sequences in a tensor on its way, and writes its own part of a result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decod.compression.coding import SCALE_BYTES, BlockCoding, Coding
from decod.planner.partition import part_sizes
from decod.run.training_config import BatchConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """Some sequences of a microbatch, one after another."""

    first: int
    num: int
    num_all: int
    """Sequences of the microbatch."""

    @property
    def share(self) -> float:
        """Part of the microbatch, and so of its mean loss."""
        return self.num / self.num_all

    def of(self, whole: Tensor) -> Tensor:
        """Return a view of these rows of a tensor, (num_all, ...)."""
        return whole[self.first : self.first + self.num]

    def pieces(self, whole: Tensor, coding: Coding | None) -> list[Tensor]:
        """Return views of what a tensor on its way holds of these sequences.

        Args:
            whole: With `ExecutorConfig.activation_wire`'s dtype and shape, for all sequences.
            coding: Its format.

        Returns:
            Put one after another, flat, they are these sequences in the same format.
        """
        if coding is None:
            return [self.of(whole)]
        runs = [whole]
        if isinstance(coding, BlockCoding):
            num_blocks = len(whole) // (SCALE_BYTES + coding.code_bytes)
            runs = list(
                torch.split(whole, [num_blocks * SCALE_BYTES, num_blocks * coding.code_bytes])
            )
        return [self.of(run_C.view(self.num_all, -1)).view(-1) for run_C in runs]


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Return some pieces as one tensor on its way; a single one itself."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def rows_of_devices(batch: BatchConfig, num_devices: int) -> list[Rows]:
    """Return which sequences each of several devices computes.

    Raises:
        ConfigError: There are more devices than sequences.
    """
    batch.require_devices(num_devices)
    num_rows = batch.microbatch_size
    found, first = list[Rows](), 0
    for num in part_sizes(num_rows, num_devices):
        found.append(Rows(first, num, num_rows))
        first += num
    return found
