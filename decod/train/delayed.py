"""AdamW whose steps come one iteration late: delayed parameter updates.

The average of an iteration is used when the next one ends. So the parameters after an iteration are
known when it begins: `ahead` computes them while microbatches run with those from before. With x(0)
the initial weights and g(t) the average of iteration t:

    weights after iteration t:   x(t-1), where x(k) = AdamW(x(k-1), g(k)) is step k
    g(t) is computed with:       x(t-2), or x(0) in the first two iterations

The last iteration's average is never used.

Source: ZeRO-Offload (arXiv:2101.06840), section 5.2; reliable and unreliable parameter servers,
section 3.2.1, "Aggregation Process".

Legend: P parameters of a stage, flat.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decod.run.training_config import OptimizerConfig
from decod.train.adamw import AdamWState, Segment, adamw_step
from decod.train.checkpoint.description import joined_hash
from decod.train.checkpoint.entries import MEAN_PREFIX, PENDING_PREFIX, SQUARE_PREFIX
from decod.train.layout import Layout
from decod.train.shared_state import SharedState
from decod.train.update_rule import AdamWEveryIteration, StepInput


@dataclass(slots=True)
class DelayedState:
    """All that a step changes."""

    adamw: AdamWState
    pending: Tensor
    """The average of the last iteration, (P,)."""
    ahead_of: int = -1
    """The iteration after which `adamw` is the state, if that was computed beforehand."""

    @property
    def weights(self) -> Tensor:
        """What microbatches are computed with, (P,)."""
        return self.adamw.weights

    def empty_like(self) -> "DelayedState":
        """Return buffers of the same size with undefined content."""
        return DelayedState(self.adamw.empty_like(), torch.empty_like(self.pending))


class DelayedAdamW:
    """One step of AdamW in each iteration, from the average of the one before.

    Args:
        optimizer: The rates.
    """

    prefixes: Sequence[str] = (MEAN_PREFIX, SQUARE_PREFIX, PENDING_PREFIX)

    def __init__(self, optimizer: OptimizerConfig) -> None:
        self._optimizer, self._at_once = optimizer, AdamWEveryIteration(optimizer)

    def begin(self, shared: SharedState, iteration: int) -> DelayedState:
        """Return the state: there is nothing that a member has for itself."""
        adamw = self._at_once.begin(shared, max(0, iteration - 1))
        return DelayedState(adamw, shared.moments[PENDING_PREFIX])

    def shared(self, state: DelayedState) -> SharedState:
        """Return the whole state."""
        shared = self._at_once.shared(state.adamw)
        return replace(shared, moments={**shared.moments, PENDING_PREFIX: state.pending})

    def hash(self, layout: Layout, state: DelayedState) -> str:
        """Return the hash of the weights and of what the next step comes from."""
        return joined_hash([layout.hash(state.weights), layout.hash(state.pending)])

    def guide(self, state: DelayedState) -> Tensor:
        """Return the mean of gradients."""
        return state.adamw.mean

    def contribution(self, old: DelayedState, new: DelayedState, step: StepInput) -> Tensor:  # noqa: ARG002
        """Return the iteration's gradients."""
        return step.gradient

    def ahead(
        self, old: DelayedState, new: DelayedState, iteration: int, segments: Sequence[Segment]
    ) -> None:
        """Write the state after an iteration into `new`, but for the average that is pending then.

        Args:
            old: The committed state. Not changed.
            new: Overwritten.
            iteration: That ends with the step, from 1.
            segments: Cover all P elements.
        """
        if new.ahead_of == iteration:
            return
        if iteration == 1:
            new.adamw.copy_(old.adamw)
        else:
            adamw_step(
                old.adamw,
                new.adamw,
                old.pending,
                segments=segments,
                optimizer=self._optimizer,
                iteration=iteration - 1,
            )
        new.ahead_of = iteration

    def average(self, old: DelayedState, new: DelayedState, step: StepInput) -> None:
        """Step from the average of the iteration before, and keep this one's."""
        assert step.own.mean is not None, "gradients are averaged in every iteration"
        self.ahead(old, new, step.iteration, step.segments)
        new.pending.copy_(step.own.mean)

    def sending(self, state: DelayedState) -> Tensor:
        """Refuse: gradients are averaged at once.

        Raises:
            TrainingError: Always.
        """
        return self._at_once.sending(state.adamw)

    def local(self, old: DelayedState, new: DelayedState, step: StepInput) -> None:
        """Refuse: this rule needs an average in every iteration.

        Raises:
            TrainingError: Always.
        """
        self._at_once.local(old.adamw, new.adamw, step)
