"""Two optimizers: each member takes inner steps by itself, and outer steps follow from averages.

Source: DiLoCo (arXiv:2311.08105), algorithm 1. The inner optimizer is the run's, the outer one SGD
with Nesterov momentum. Deviations: members weigh as much as the microbatches that they have trained
on. A member clips the gradient of its own stage by itself: nobody knows the norm over all stages of
a replica, because a microbatch may pass through any member of each stage.

The parameters may be averaged in fragments, in turn (Streaming DiLoCo, arXiv:2501.18512). Only the
fragment that ends its local phase goes back to the anchor.

With overlap, nobody goes back. A member trains on from its own weights while an average travels.
When the average is used, the member's weights of the end of the phase are replaced by the anchor,
and what it has learnt since then stays:

    weights += anchor - start          (start: the weights with which its local phase began)

Source: Eager updates for overlapped communication and computation in DiLoCo (arXiv:2502.12996).
Deviations: an average is used when it has come, and not always one phase late. What replaces the
member's weights is the anchor after the outer step. The paper has the outer optimizer step from the
others' last averages and the member's own newest pseudo-gradient, and so guess what will come.

Legend: P parameters of a stage, flat. V those that are averaged: all, or a fragment.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from decod.run.training_config import OptimizerConfig, SyncConfig
from decod.train.checkpoint.description import joined_hash
from decod.train.checkpoint.entries import MOMENTUM_PREFIX
from decod.train.layout import Layout, SharedState
from decod.train.optimizers import OptimizerState, clip_factor, optimizer_step, zero_moments
from decod.train.reduction import divisor, require_finite, square_sum
from decod.train.update_rule import Averaged, StepInput, nothing_to_send


@dataclass(slots=True)
class DiLoCoState:
    """A member's own state, and what its stage has in common."""

    inner: OptimizerState
    """This member's own weights and moments. Each inner step writes them into other buffers."""
    anchor: Tensor
    """Weights after the last outer step, common to the stage, (P,). Never changed in place."""
    momentum: Tensor
    """The outer optimizer's momentum, common to the stage, (P,). Never changed in place."""
    start: Tensor
    """Weights with which this member's local phase began, (P,). The anchor, unless an average
    travels. Never changed in place."""
    num_learnt: tuple[int, ...] = (0,)
    """Microbatches that this member has trained on since each fragment's last average."""
    sending: Tensor | None = None
    """With overlap: this member's contribution to the average that travels, (V,). Never changed in
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
        self._optimizer = optimizer
        self._sync = sync

    def begin(self, shared: SharedState, iteration: int, layout: Layout) -> DiLoCoState:  # noqa: ARG002
        """Return the state of a member that starts from the anchor."""
        anchor_P = shared.weights
        moments = zero_moments(self._optimizer.name, anchor_P, layout.segments())
        inner = OptimizerState(anchor_P.clone(), moments)
        nothing = (0,) * self._sync.fragments
        return DiLoCoState(inner, anchor_P, shared.moments[MOMENTUM_PREFIX], anchor_P, nothing)

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

        A pseudo-gradient is the weights before a local phase minus those after it: the outer
        optimizer subtracts its average.
        """
        self.local(old, new, step)
        return _weighed(_pseudo_gradient(new, step.own), new, step.own)

    def sending(self, state: DiLoCoState) -> Tensor:
        """Return the pseudo-gradient of the last outer step, times its microbatches."""
        if state.sending is None:
            raise nothing_to_send()
        return state.sending

    def average(self, old: DiLoCoState, new: DiLoCoState, step: StepInput) -> None:
        """Take the inner step of the iteration, and then the outer step.

        With overlap, the outer step uses the average that has travelled. The last step of a run
        uses that, and then its own average.
        """
        self.local(old, new, step)
        own = step.own
        new.sending = None
        if step.ends_phase and own.mean is None:
            new.sending = _weighed(_pseudo_gradient(new, own), new, own)
        if step.delayed.mean is not None:
            self._outer_step(new, step.delayed.mean, step.delayed.here)
            self._move(new, step.delayed.here)
        if not step.ends_phase:
            return
        if own.mean is not None:
            self._outer_step(new, own.mean, own.here)
            new.inner.weights[own.here] = new.anchor[own.here]
            new.start = new.anchor
        else:
            new.start = _replaced(new.start, own.here, new.inner.weights[own.here].clone())
        new.num_learnt = tuple(
            0 if own.fragment in (0, fragment) else num
            for fragment, num in enumerate(new.num_learnt, 1)
        )

    def _outer_step(self, state: DiLoCoState, average_V: Tensor, here: slice) -> None:
        rate = self._sync.outer_lr
        decay = self._sync.outer_momentum
        momentum_V = (state.momentum[here] * decay).add_(average_V)
        update_V = (momentum_V * decay).add_(average_V).mul_(rate)
        state.momentum = _replaced(state.momentum, here, momentum_V)
        state.anchor = _replaced(state.anchor, here, state.anchor[here] - update_V)
        require_finite(state.anchor, "anchor after the outer step")

    @staticmethod
    def _move(state: DiLoCoState, here: slice) -> None:
        """Go on from a new anchor, and keep what has been learnt since the local phase began."""
        state.inner.weights[here] += state.anchor[here] - state.start[here]
        state.start = _replaced(state.start, here, state.anchor[here])

    def local(self, old: DiLoCoState, new: DiLoCoState, step: StepInput) -> None:
        """Take the inner step of the iteration. Without microbatches, nothing changes."""
        new.anchor = old.anchor
        new.momentum = old.momentum
        new.sending = old.sending
        new.start = old.start
        new.num_learnt = tuple(num + step.num_microbatches for num in old.num_learnt)
        if not step.num_microbatches:
            new.inner.copy_(old.inner)
            return
        mean_P = step.gradient / divisor(step.num_microbatches, step.gradient)
        if self._optimizer.clip_norm:
            mean_P.mul_(clip_factor(self._optimizer, square_sum(mean_P) ** 0.5))
        optimizer_step(
            old.inner,
            new.inner,
            mean_P,
            segments=step.segments,
            optimizer=self._optimizer,
            iteration=step.iteration,
        )


def _pseudo_gradient(state: DiLoCoState, averaged: Averaged) -> Tensor:
    """Return how far a member has come in its local phase, (V,)."""
    return state.start[averaged.here] - state.inner.weights[averaged.here]


def _weighed(pseudo_V: Tensor, state: DiLoCoState, averaged: Averaged) -> Tensor:
    """Return a pseudo-gradient times the microbatches that it has come from, (V,)."""
    counts = state.num_learnt
    fragment = averaged.fragment
    # All parameters together count from the average that is longest ago, as in the core.
    num_learnt = counts[fragment - 1] if fragment else max(counts)
    return pseudo_V * divisor(max(num_learnt, 1), pseudo_V)


def _replaced(whole_P: Tensor, here: slice, part_V: Tensor) -> Tensor:
    """Return a copy in which some elements are others."""
    if part_V.numel() == whole_P.numel():
        return part_V
    new_P = whole_P.clone()
    new_P[here] = part_V
    return new_P
