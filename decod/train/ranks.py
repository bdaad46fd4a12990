"""Several devices of one host that work on one stage: what the first needs of the others.

The first, rank 0, has the stage's state and its optimizer, makes the averages and takes the steps.
The others hold the module's weights and a sum of gradients (`decod.train.state_mirror`).

Legend: P parameters of the stage.
"""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from decod.errors import TrainingError
from decod.model.stage import Stage
from decod.train.executor_config import ExecutorConfig
from decod.train.layout import Layout

if TYPE_CHECKING:
    from decod.train.weight_shards import Shards


class OtherRanks(Protocol):
    """The other devices, as rank 0 sees them."""

    def build(self, stage_index: int) -> None:
        """Have the others build a stage. They get its weights by `take_weights`."""

    def add_sums(self, sum_P: Tensor, shards: "Shards | None" = None) -> str:
        """Add what the others have summed up to a sum, and make their own sums zero.

        Args:
            sum_P: (P,) where rank 0 has it. Changed.
            shards: Rank 0's part of a stage that is spread. Its own sums are added, too.

        Returns:
            Why the sums are unusable. Empty: they are added.
        """

    def take_weights(self, weights_P: Tensor, shards: "Shards | None" = None) -> None:
        """Give the others the weights that microbatches are computed with, (P,).

        With `shards`, rank 0 gets its own part of them, too.
        """

    def reset(self) -> None:
        """Have the others forget held microbatches and gradients."""


class NoRanks:
    """No other device."""

    def build(self, stage_index: int) -> None:
        """Build nothing."""

    def add_sums(self, sum_P: Tensor, shards: "Shards | None" = None) -> str:  # noqa: ARG002
        """Add nothing."""
        return ""

    def take_weights(self, weights_P: Tensor, shards: "Shards | None" = None) -> None:
        """Give nobody the weights."""

    def reset(self) -> None:
        """Forget nothing."""


NO_RANKS = NoRanks()


def no_stage_built() -> TrainingError:
    """Return the error of a device that is to compute before it has a stage."""
    return TrainingError(
        "no stage is built", why="there is nothing to compute with", fix="build one first"
    )


def make_shards(config: ExecutorConfig, stage: Stage, layout: Layout) -> "Shards | None":
    """Return this device's part of a module, if the stage is spread over several devices."""
    if not config.sharded:
        return None
    # Imported here, since it loads FSDP2, which few processes need.
    from decod.train.weight_shards import Shards

    return Shards(config, stage, layout)
