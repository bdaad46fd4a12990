"""Several devices of one host that work on one stage: what the first needs of the others.

The first, rank 0, has the stage's state and its optimizer, makes the averages and takes the steps.
The others hold the module's weights and a sum of gradients (`decod.train.mirror`).

Legend: P parameters of the stage.
"""

from typing import Protocol

from torch import Tensor


class OtherRanks(Protocol):
    """The other devices, as rank 0 sees them."""

    def build(self, stage_index: int) -> None:
        """Have the others build a stage. They get its weights by `take_weights`."""

    def add_sums(self, sum_P: Tensor) -> str:
        """Add what the others have summed up to a sum, and make their own sums zero.

        Args:
            sum_P: (P,) on rank 0's device. Changed.

        Returns:
            Why the sums are unusable. Empty: they are added.
        """

    def take_weights(self, weights_P: Tensor) -> None:
        """Give the others the weights that microbatches are computed with, (P,)."""

    def reset(self) -> None:
        """Have the others forget held microbatches and gradients."""


class NoRanks:
    """No other device."""

    def build(self, stage_index: int) -> None:
        """Build nothing."""

    def add_sums(self, sum_P: Tensor) -> str:  # noqa: ARG002
        """Add nothing."""
        return ""

    def take_weights(self, weights_P: Tensor) -> None:
        """Give nobody the weights."""

    def reset(self) -> None:
        """Forget nothing."""


NO_RANKS = NoRanks()
