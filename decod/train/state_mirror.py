"""What every device of several but the first holds of a stage: the module and a sum of gradients.

The first, rank 0, has all the rest (`decod.train.ranks`). It also decides what may be computed
when, so a mirror does as it is told.

Legend: P parameters of the stage.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decod.clocks import Stopwatch
from decod.errors import NonFiniteError
from decod.model.shape import stage_shapes
from decod.model.stage import Stage, empty_stage
from decod.train.executor_config import ExecutorConfig
from decod.train.gradient_sum import GradientSum
from decod.train.layout import Layout
from decod.train.passes import Passes
from decod.train.ranks import make_shards, no_stage_built
from decod.train.token_source import TokenSource

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
        self.config, self.tokens, self._watch = config, tokens, watch
        self._parts: _Built | None = None

    def build(self, stage_index: int) -> None:
        """Build a stage whose weights are undefined. Any earlier stage is forgotten."""
        config = self.config
        self._parts = None
        stage = empty_stage(config.run.model, config.run.stages, stage_index)
        layout = Layout(stage_shapes(config.run.model, config.run.stages, stage_index))
        shards = make_shards(config, stage, layout)
        if shards is not None:
            weights_P, sum_P = torch.empty(0), shards.sum_Q
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

    def finish_backward(self) -> bool:
        """Compute what the last backward pass has put off. Return whether there was anything."""
        return self._parts is not None and self._parts.gradient.finish()

    def settle(self) -> str:
        """Finish the sum of gradients. Return why it is unusable; empty if it is not."""
        try:
            self._built.gradient.whole()
        except NonFiniteError as error:
            return error.what
        return ""
