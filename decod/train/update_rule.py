"""What a device does with its gradient sum and with an average: the arithmetic of a step policy.

`decod.protocol.strategy.step` is the other half: it says what members' sums stand for.

Legend: P parameters of a stage, flat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from torch import Tensor

from decod.errors import TrainingError
from decod.run.training_config import OptimizerConfig
from decod.train.adamw import AdamWState, Segment, adamw_step
from decod.train.checkpoint.entries import MEAN_PREFIX, SQUARE_PREFIX
from decod.train.layout import Layout
from decod.train.shared_state import SharedState


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
        delayed: The average that has travelled since the last step from an average.
    """

    gradient: Tensor
    num_microbatches: int
    iteration: int
    segments: Sequence[Segment]
    own: Averaged = NO_AVERAGE
    delayed: Averaged = NO_AVERAGE


class UpdateRule(Protocol[StateT]):
    """The rule of one stage on one device. What it computes may be undone, so it keeps nothing."""

    @property
    def prefixes(self) -> Sequence[str]:
        """Of the names, in a checkpoint, of the moments that all members have in common."""
        ...

    def begin(self, shared: SharedState, iteration: int) -> StateT:
        """Return the state of a member that holds what its stage has in common.

        Args:
            shared: Not copied: steps write into other buffers.
            iteration: The last that was committed.
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


class AdamWEveryIteration:
    """One step of AdamW from the average of each iteration's gradients.

    Args:
        optimizer: The rates.
    """

    prefixes = (MEAN_PREFIX, SQUARE_PREFIX)

    def __init__(self, optimizer: OptimizerConfig) -> None:
        self._optimizer = optimizer

    def begin(self, shared: SharedState, iteration: int) -> AdamWState:
        """Return the state: there is nothing that a member has for itself."""
        mean_P, square_P = (shared.moments[prefix] for prefix in self.prefixes)
        return AdamWState(shared.weights, mean_P, square_P, iteration)

    def shared(self, state: AdamWState) -> SharedState:
        """Return the whole state."""
        moments = zip(self.prefixes, (state.mean, state.square), strict=True)
        return SharedState(state.weights, dict(moments))

    def hash(self, layout: Layout, state: AdamWState) -> str:
        """Return the hash of the weights."""
        return layout.hash(state.weights)

    def guide(self, state: AdamWState) -> Tensor:
        """Return the mean of gradients."""
        return state.mean

    def contribution(self, old: AdamWState, new: AdamWState, step: StepInput) -> Tensor:  # noqa: ARG002
        """Return the iteration's gradients."""
        return step.gradient

    def average(self, old: AdamWState, new: AdamWState, step: StepInput) -> None:
        """Take one step of AdamW."""
        assert step.own.mean is not None, "gradients are averaged before the step"
        adamw_step(
            old,
            new,
            step.own.mean,
            segments=step.segments,
            optimizer=self._optimizer,
            iteration=step.iteration,
        )

    def sending(self, state: AdamWState) -> Tensor:  # noqa: ARG002
        """Refuse: gradients are averaged at once.

        Raises:
            TrainingError: Always.
        """
        raise nothing_to_send()

    def local(self, old: AdamWState, new: AdamWState, step: StepInput) -> None:  # noqa: ARG002
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
