"""Several devices of one host that work on one stage.

The first, rank 0, has the stage's state and its optimizer, makes the averages and takes the steps.
The others are mirrors: each holds the module's weights and a sum of gradients. Rank 0 decides what
may be computed when, so a mirror does as it is told.

Legend: P parameters of the stage.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from decod.clocks import Stopwatch
from decod.errors import ConfigError, NonFiniteError, TrainingError
from decod.model.adapter import hold, stage_of
from decod.model.shape import trained_shapes
from decod.model.stage import Stage
from decod.train.executor_config import ExecutorConfig
from decod.train.gradient_sum import GradientSum
from decod.train.layout import Layout
from decod.train.passes import Passes
from decod.train.start import frozen_weights
from decod.train.token_source import TokenSource

if TYPE_CHECKING:
    from decod.train.weight_shards import Shards


class OtherRanks(Protocol):
    """The other devices, as rank 0 sees them."""

    def build(self, stage_index: int, *, trial: bool = False, blocks: Sequence[int] = ()) -> None:
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

    def build(self, stage_index: int, *, trial: bool = False, blocks: Sequence[int] = ()) -> None:
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
    if not config.run.trains_all:
        raise ConfigError(
            "a stage with an adapter can't be spread over several devices",
            why="its matrices are not trained, and lie whole on each device",
            fix='choose adapter.base = "nf4", more stages, or one device',
        )
    # Imported here, since it loads FSDP2, which few processes need.
    from decod.train.weight_shards import Shards

    return Shards(config, stage, layout)


if TYPE_CHECKING:
    from decod.train.weight_shards import Shards


@dataclass(frozen=True, slots=True)
class _Built:
    """The parts of a built stage."""

    weights: Tensor
    gradient: GradientSum
    passes: Passes
    shards: "Shards | None"


class Mirror:
    """Runs its rows of a stage's microbatches.

    Args:
        config: The run, the device and its rows.
        tokens: Source of tokens, needed only on stage 0.
        watch: Measures copies of tensors to the device.
    """

    def __init__(
        self, config: ExecutorConfig, *, tokens: TokenSource | None, watch: Stopwatch
    ) -> None:
        self.config = config
        self._stages = config.run.stages
        self.tokens = tokens
        self._watch = watch
        self._parts: _Built | None = None

    def build(self, stage_index: int, *, trial: bool = False, blocks: Sequence[int] = ()) -> None:
        """Build a stage whose weights are undefined. Any earlier stage is forgotten.

        Args:
            stage_index: The stage.
            trial: It is only to be measured.
            blocks: As of `StageExecutor.build`.
        """
        config = self.config = self.config.with_blocks(self._stages, blocks)
        self._parts = None
        stage = stage_of(config.run, stage_index)
        layout = Layout(trained_shapes(config.run, stage_index))
        shards = make_shards(config, stage, layout)
        base = None if trial else config.base
        hold(stage, config.run, frozen_weights(config.run, stage_index, base), config.device)
        if shards is not None:
            weights_P = torch.empty(0)
            sum_P = shards.sum_Q
        else:
            weights_P = torch.empty(layout.num_elements, dtype=config.dtype, device=config.device)
            stage.place(dict(layout.views(weights_P)))
            sum_P = torch.zeros_like(weights_P, dtype=config.wide)
        gradient = GradientSum(stage, layout, sum_P, shards=shards)
        passes = Passes(config, stage, self, gradient, tokens=self.tokens, watch=self._watch)
        self._parts = _Built(weights_P, gradient, passes, shards)

    @property
    def _built(self) -> _Built:
        if self._parts is None:
            raise no_stage_built()
        return self._parts

    @property
    def passes(self) -> Passes:
        """The passes of the built stage."""
        return self._built.passes

    @property
    def weights(self) -> Tensor:
        """What microbatches are computed with, (P,). To be overwritten in place."""
        return self._built.weights

    @property
    def gradients(self) -> Tensor:
        """The sum of gradients, (P,), as far as it is finished."""
        return self._built.gradient.sum_P

    @property
    def shards(self) -> "Shards | None":
        """This device's part of the stage, if the stage is spread. It has weights and sums."""
        return self._built.shards

    def require_settled(self) -> None:
        """Do nothing: rank 0 knows when weights are final."""

    def measuring(self) -> AbstractContextManager[Stage]:
        """Lend the module for trial runs, whose gradients are thrown away."""
        return self._built.gradient.lend()

    def reset(self) -> None:
        """Forget held microbatches and gradients."""
        self._built.passes.clear()
        self._built.gradient.clear()

    def settle(self) -> str:
        """Finish the sum of gradients. Return why it is unusable; empty if it is not."""
        try:
            self._built.gradient.whole()
        except NonFiniteError as error:
            return error.what
        return ""
