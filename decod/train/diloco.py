"""Two optimizers: each member takes inner steps by itself, and outer steps follow from averages.

Source: DiLoCo (arXiv:2311.08105), algorithm 1. The inner optimizer is AdamW, the outer one SGD with
Nesterov momentum. Deviations: members weigh as much as the microbatches that they have trained on.
A member clips the gradient of its own stage by itself: nobody knows the norm over all stages of a
replica, because a microbatch may pass through any member of each stage.

Legend: P parameters of a stage, flat.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decod.train.adamw import AdamWState, adamw_step, clip_factor, learning_rate
from decod.train.checkpoint.description import joined_hash
from decod.train.checkpoint.entries import MOMENTUM_PREFIX
from decod.train.layout import Layout
from decod.train.params import InnerOptimizer, OptimizerConfig, SyncConfig
from decod.train.reduction import divisor, require_finite, square_sum
from decod.train.shared_state import SharedState
from decod.train.update_rule import StepInput, nothing_to_send


@dataclass(slots=True)
class DiLoCoState:
    """A member's own state, and what its stage has in common."""

    inner: AdamWState
    """This member's own weights and moments. Each inner step writes them into other buffers."""
    anchor: Tensor
    """Weights after the last outer step, common to the stage, (P,). Never changed in place."""
    momentum: Tensor
    """Of the outer optimizer, common to the stage, (P,). Never changed in place."""
    num_learnt: int = 0
    """Microbatches that this member has trained on since the last outer step."""
    sending: Tensor | None = None
    """With overlap: this member's contribution to the average that travels, (P,). Never changed in
    place."""

    @property
    def weights(self) -> Tensor:
        """What microbatches are computed with, (P,)."""
        return self.inner.weights

    def empty_like(self) -> "DiLoCoState":
        """Return buffers of the same size with undefined content."""
        return replace(self, inner=self.inner.empty_like())


class DiLoCo:
    """The rule of a run whose members step by themselves.

    Args:
        optimizer: The inner optimizer.
        sync: The outer optimizer.
    """

    prefixes = (MOMENTUM_PREFIX,)

    def __init__(self, optimizer: OptimizerConfig, sync: SyncConfig) -> None:
        self._optimizer, self._sync = optimizer, sync

    def begin(self, shared: SharedState, iteration: int) -> DiLoCoState:  # noqa: ARG002
        """Return the state of a member that starts from the anchor."""
        anchor_P, zeros_P = shared.weights, torch.zeros_like(shared.weights)
        inner = AdamWState(anchor_P.clone(), zeros_P, zeros_P.clone())
        return DiLoCoState(inner, anchor_P, shared.moments[MOMENTUM_PREFIX])

    def shared(self, state: DiLoCoState) -> SharedState:
        """Return anchor and outer momentum."""
        return SharedState(state.anchor, {MOMENTUM_PREFIX: state.momentum})

    def hash(self, layout: Layout, state: DiLoCoState) -> str:
        """Return the hash of anchor and outer momentum."""
        return joined_hash([layout.hash(state.anchor), layout.hash(state.momentum)])

    def guide(self, state: DiLoCoState) -> Tensor:
        """Return the outer momentum."""
        return state.momentum

    def contribution(self, old: DiLoCoState, new: DiLoCoState, step: StepInput) -> Tensor:
        """Return the pseudo-gradient, times the microbatches that it has come from.

        A pseudo-gradient is anchor minus own weights: the outer optimizer subtracts its average.
        """
        self.local(old, new, step)
        return self._pseudo_gradient(new)

    def _pseudo_gradient(self, state: DiLoCoState) -> Tensor:
        pseudo_P = state.anchor - state.inner.weights
        return pseudo_P.mul_(divisor(max(state.num_learnt, 1), pseudo_P))

    def sending(self, state: DiLoCoState) -> Tensor:
        """Return the pseudo-gradient of the last outer step, times its microbatches."""
        if state.sending is None:
            raise nothing_to_send()
        return state.sending

    def average(
        self, old: DiLoCoState, new: DiLoCoState, mean_P: Tensor | None, step: StepInput
    ) -> None:
        """Take the inner step of the iteration, and then the outer step.

        With overlap, the outer step uses the average of one outer step before. The last step of a
        run uses that, and then its own average.
        """
        self.local(old, new, step)
        new.sending = self._pseudo_gradient(new) if self._sync.overlap else None
        for average_P in (step.delayed, mean_P):
            if average_P is not None:
                self._outer_step(new, average_P)
        new.inner.weights.copy_(new.anchor)
        new.num_learnt = 0

    def _outer_step(self, state: DiLoCoState, average_P: Tensor) -> None:
        rate, decay = self._sync.outer_lr, self._sync.outer_momentum
        state.momentum = (state.momentum * decay).add_(average_P)
        update_P = (state.momentum * decay).add_(average_P)
        state.anchor = state.anchor - update_P.mul_(rate)
        require_finite(state.anchor, "anchor after the outer step")

    def local(self, old: DiLoCoState, new: DiLoCoState, step: StepInput) -> None:
        """Take the inner step of the iteration. Without microbatches, nothing changes."""
        new.anchor, new.momentum, new.sending = old.anchor, old.momentum, old.sending
        new.num_learnt = old.num_learnt + step.num_microbatches
        if not step.num_microbatches:
            new.inner.copy_(old.inner)
            return
        mean_P = step.gradient / divisor(step.num_microbatches, step.gradient)
        if self._optimizer.clip_norm:
            mean_P.mul_(clip_factor(self._optimizer, square_sum(mean_P) ** 0.5))
        if self._sync.inner is InnerOptimizer.SGD:
            self._sgd_step(old.inner, new.inner, mean_P, step.iteration)
            return
        adamw_step(
            old.inner,
            new.inner,
            mean_P,
            segments=step.segments,
            optimizer=self._optimizer,
            iteration=step.iteration,
        )

    def _sgd_step(self, old: AdamWState, new: AdamWState, mean_P: Tensor, iteration: int) -> None:
        new.copy_(old)
        new.weights.sub_(mean_P * learning_rate(self._optimizer, iteration))
