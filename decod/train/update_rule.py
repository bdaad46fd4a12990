"""What a device does with its gradient sum and with an average: the arithmetic of a step policy.

`decod.protocol.strategy.step` is the other half: it says what members' sums stand for. A
stage takes a step every iteration, or one iteration late; a client of servers has the parameters
alone. `decod.train.diloco` has two optimizers.

Legend: P parameters of a stage, flat.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from decod.errors import TrainingError
from decod.run.training_config import OptimizerConfig
from decod.train.checkpoint.description import joined_hash
from decod.train.checkpoint.entries import PENDING_PREFIX, moment_prefixes
from decod.train.layout import Layout, SharedState
from decod.train.optimizers import OptimizerState, Segment, optimizer_step


class State(Protocol):
    """All that a rule's steps change."""

    weights: Tensor
    """What microbatches are computed with, (P,) float32 or float64."""

    def empty_like(self) -> Self:
        """Return buffers of the same size with undefined content."""
        ...


StateT = TypeVar("StateT", bound=State)


@dataclass(frozen=True, slots=True)
class Averaged:
    """An average of some parameters.

    Attributes:
        here: The elements that it is of.
        fragment: Their number among the fragments, from 1. 0: they are all elements.
        mean: (V,). None: there is none, or it will travel.
    """

    here: slice
    fragment: int = 0
    mean: Tensor | None = None


NO_AVERAGE = Averaged(slice(None))


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a step starts from.

    Attributes:
        gradient: Sum of gradients over the iteration's microbatches here, (P,). Not to be changed.
        num_microbatches: In the sum.
        iteration: The iteration that the step ends, from 1.
        segments: Cover all P elements.
        own: The iteration's own average.
        delayed: The average that has travelled since the last local phase ended.
        ends_phase: Where members step by themselves: whether the local phase ends.
    """

    gradient: Tensor
    num_microbatches: int
    iteration: int
    segments: Sequence[Segment]
    own: Averaged = NO_AVERAGE
    delayed: Averaged = NO_AVERAGE
    ends_phase: bool = True


class UpdateRule(Protocol[StateT]):
    """The rule of one stage on one device. What it computes may be undone, so it keeps nothing."""

    @property
    def prefixes(self) -> Sequence[str]:
        """The prefixes of the names, in a checkpoint, of the moments that all members have in
        common."""
        ...

    def begin(self, shared: SharedState, iteration: int, layout: Layout) -> StateT:
        """Return the state of a member that holds what its stage has in common.

        Args:
            shared: Not copied: steps write into other buffers.
            iteration: The last that was committed.
            layout: Positions of the parameters.
        """
        ...

    def shared(self, state: StateT) -> SharedState:
        """Return what the stage has in common. Views of the state."""
        ...

    def hash(self, layout: Layout, state: StateT) -> str:
        """Return the hash of what the stage has in common."""
        ...

    def guide(self, state: StateT) -> Tensor:
        """Return what all members have in common that resembles the next average, (P,)."""
        ...

    def contribution(self, old: StateT, new: StateT, step: StepInput) -> Tensor:
        """Return what this member puts into an average, (V,): a sum over its microbatches.

        Args:
            old: The committed state. Not changed.
            new: May be overwritten. `average` gets it as it is.
            step: The iteration's sum, and what its average is of.
        """
        ...

    def average(self, old: StateT, new: StateT, step: StepInput) -> None:
        """Write the state after a step from averages into `new`.

        Args:
            old: The committed state. Not changed.
            new: Overwritten.
            step: The iteration's sum, and the averages.
        """
        ...

    def sending(self, state: StateT) -> Tensor:
        """Return what this member puts into the average that travels, (V,). See `contribution`.

        Raises:
            TrainingError: There is none.
        """
        ...

    def local(self, old: StateT, new: StateT, step: StepInput) -> None:
        """Write the state after an iteration without an average into `new`. See `average`."""
        ...


class StepEveryIteration:
    """One step of the optimizer from the average of each iteration's gradients.

    Args:
        optimizer: Its name and rates.
    """

    def __init__(self, optimizer: OptimizerConfig) -> None:
        self._optimizer = optimizer
        self.prefixes = moment_prefixes(optimizer.name)

    def begin(self, shared: SharedState, iteration: int, layout: Layout) -> OptimizerState:  # noqa: ARG002
        """Return the state: there is nothing that a member has for itself."""
        moments = tuple(shared.moments[prefix] for prefix in self.prefixes)
        return OptimizerState(shared.weights, moments, iteration)

    def shared(self, state: OptimizerState) -> SharedState:
        """Return the whole state."""
        moments = dict(zip(self.prefixes, state.moments, strict=True))
        return SharedState(state.weights, moments)

    def hash(self, layout: Layout, state: OptimizerState) -> str:
        """Return the hash of the weights."""
        return layout.hash(state.weights)

    def guide(self, state: OptimizerState) -> Tensor:
        """Return the mean of gradients."""
        return state.moments[0]

    def contribution(self, old: OptimizerState, new: OptimizerState, step: StepInput) -> Tensor:  # noqa: ARG002
        """Return the iteration's gradients."""
        return step.gradient

    def average(self, old: OptimizerState, new: OptimizerState, step: StepInput) -> None:
        """Take one step of the optimizer."""
        assert step.own.mean is not None, "gradients are averaged before the step"
        optimizer_step(
            old,
            new,
            step.own.mean,
            segments=step.segments,
            optimizer=self._optimizer,
            iteration=step.iteration,
        )

    def sending(self, state: OptimizerState) -> Tensor:  # noqa: ARG002
        """Refuse: gradients are averaged at once.

        Raises:
            TrainingError: Always.
        """
        raise nothing_to_send()

    def local(self, old: OptimizerState, new: OptimizerState, step: StepInput) -> None:  # noqa: ARG002
        """Refuse: this rule needs an average in every iteration.

        Raises:
            TrainingError: Always.
        """
        raise TrainingError(
            f"iteration {step.iteration} was to end without an average",
            why="this run's optimizer steps from the average of each iteration",
            fix="give all nodes the same run file and release",
        )


def nothing_to_send() -> TrainingError:
    """Return the error for an average to which this member has nothing to contribute."""
    return TrainingError(
        "a contribution to the last average was asked for, and there is none",
        why="this member has not taken an outer step, or has loaded its state anew",
        fix="nothing: the others average without it",
    )


@dataclass(slots=True)
class DelayedState:
    """All that a step changes."""

    inner: OptimizerState
    pending: Tensor
    """The average of the last iteration, (P,)."""
    ahead_of: int = -1
    """The iteration after which `inner` is the state, if that was computed beforehand."""

    @property
    def weights(self) -> Tensor:
        """What microbatches are computed with, (P,)."""
        return self.inner.weights

    def empty_like(self) -> "DelayedState":
        """Return buffers of the same size with undefined content."""
        return DelayedState(self.inner.empty_like(), torch.empty_like(self.pending))


class DelayedStep:
    """One step of the optimizer in each iteration, from the average of the one before.

    Args:
        optimizer: Its name and rates.
    """

    def __init__(self, optimizer: OptimizerConfig) -> None:
        self._optimizer = optimizer
        self._at_once = StepEveryIteration(optimizer)
        self.prefixes = (*self._at_once.prefixes, PENDING_PREFIX)

    def begin(self, shared: SharedState, iteration: int, layout: Layout) -> DelayedState:
        """Return the state: there is nothing that a member has for itself."""
        inner = self._at_once.begin(shared, max(0, iteration - 1), layout)
        return DelayedState(inner, shared.moments[PENDING_PREFIX])

    def shared(self, state: DelayedState) -> SharedState:
        """Return the whole state."""
        shared = self._at_once.shared(state.inner)
        return replace(shared, moments={**shared.moments, PENDING_PREFIX: state.pending})

    def hash(self, layout: Layout, state: DelayedState) -> str:
        """Return the hash of the weights and of what the next step comes from."""
        return joined_hash([layout.hash(state.weights), layout.hash(state.pending)])

    def guide(self, state: DelayedState) -> Tensor:
        """Return the mean of gradients."""
        return state.inner.moments[0]

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
            new.inner.copy_(old.inner)
        else:
            optimizer_step(
                old.inner,
                new.inner,
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
        return self._at_once.sending(state.inner)

    def local(self, old: DelayedState, new: DelayedState, step: StepInput) -> None:
        """Refuse: this rule needs an average in every iteration.

        Raises:
            TrainingError: Always.
        """
        self._at_once.local(old.inner, new.inner, step)


@dataclass(frozen=True, slots=True)
class Weights:
    """A client's state."""

    weights: Tensor
    """(P,) float32 or float64."""

    def empty_like(self) -> "Weights":
        """Return no buffers: a client takes no step that would need any."""
        return Weights(torch.empty(0, dtype=self.weights.dtype))


class ParametersOnly:
    """The update rule of a client: it contributes gradients, and never steps.

    Args:
        delay: Iterations by which the servers' steps are late.
    """

    prefixes: Sequence[str] = ()

    def __init__(self, delay: int = 0) -> None:
        self._delay = delay

    def begin(self, shared: SharedState, iteration: int, layout: Layout) -> Weights:  # noqa: ARG002
        """Return the state: the parameters."""
        return Weights(shared.weights)

    def shared(self, state: Weights) -> SharedState:
        """Return the parameters."""
        return SharedState(state.weights, {})

    def hash(self, layout: Layout, state: Weights) -> str:
        """Return what servers with the same parameters would vote on if no step were pending.

        So it is in the run's first state, by which all see whether they have built the same.
        """
        digest = layout.hash(state.weights)
        if not self._delay:
            return digest
        return joined_hash([digest, layout.hash(torch.zeros_like(state.weights))])

    def guide(self, state: Weights) -> Tensor:
        """Return the parameters: what clients contribute is never coded, and needs no guide."""
        return state.weights

    def contribution(self, old: Weights, new: Weights, step: StepInput) -> Tensor:  # noqa: ARG002
        """Return the iteration's gradients."""
        return step.gradient

    def average(self, old: Weights, new: Weights, step: StepInput) -> None:  # noqa: ARG002
        """Refuse: servers step.

        Raises:
            TrainingError: Always.
        """
        raise _no_step(step)

    def sending(self, state: Weights) -> Tensor:  # noqa: ARG002
        """Refuse: gradients are averaged at once.

        Raises:
            TrainingError: Always.
        """
        raise nothing_to_send()

    def local(self, old: Weights, new: Weights, step: StepInput) -> None:  # noqa: ARG002
        """Refuse: servers step.

        Raises:
            TrainingError: Always.
        """
        raise _no_step(step)


def _no_step(step: StepInput) -> TrainingError:
    return TrainingError(
        f"a client was to step at iteration {step.iteration}",
        why="only servers have the optimizer's state",
        fix="give all nodes the same run file and release",
    )
