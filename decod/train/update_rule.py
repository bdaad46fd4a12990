"""What a device does with its gradient sum and with an average: the arithmetic of a step policy.

`decod.protocol.strategy.step_policy` is the other half: it says when members average.

Legend: P parameters of a stage, flat.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from decod.errors import TrainingError
from decod.train.adamw import AdamWState, Segment, adamw_step
from decod.train.params import OptimizerConfig


class UpdateRule(Protocol):
    """The rule of one stage on one device.

    The first three methods only compute. What they propose may be undone, so the rule changes its
    own state in `committed` alone.
    """

    def contribution(self, gradient_P: Tensor) -> Tensor:
        """Return what this member puts into an average, (P,).

        Args:
            gradient_P: Sum of gradients over the iteration's microbatches here, (P,).
        """
        ...

    def average(
        self,
        old: AdamWState,
        new: AdamWState,
        mean_P: Tensor,
        *,
        segments: Sequence[Segment],
        iteration: int,
    ) -> None:
        """Write the state after a step from an average into `new`.

        Args:
            old: The committed state. Not changed.
            new: Overwritten.
            mean_P: The average of the members' contributions, (P,).
            segments: Cover all P elements.
            iteration: The iteration that the step ends, from 1.
        """
        ...

    def local(
        self, old: AdamWState, new: AdamWState, gradient_P: Tensor, *, iteration: int
    ) -> None:
        """Write the state after an iteration without an average into `new`. See `average`."""
        ...

    def committed(self, gradient_P: Tensor, *, averaged: bool) -> None:
        """The proposed step is final.

        Args:
            gradient_P: The iteration's sum, which is about to be cleared.
            averaged: Whether the step came from an average.
        """
        ...


class AdamWEveryIteration:
    """One step of AdamW from the average of each iteration's gradients. It keeps nothing.

    Args:
        optimizer: The rates.
    """

    def __init__(self, optimizer: OptimizerConfig) -> None:
        self._optimizer = optimizer

    def contribution(self, gradient_P: Tensor) -> Tensor:
        """Return the iteration's gradients."""
        return gradient_P

    def average(
        self,
        old: AdamWState,
        new: AdamWState,
        mean_P: Tensor,
        *,
        segments: Sequence[Segment],
        iteration: int,
    ) -> None:
        """Take one step of AdamW."""
        adamw_step(
            old, new, mean_P, segments=segments, optimizer=self._optimizer, iteration=iteration
        )

    def local(
        self,
        old: AdamWState,  # noqa: ARG002
        new: AdamWState,  # noqa: ARG002
        gradient_P: Tensor,  # noqa: ARG002
        *,
        iteration: int,
    ) -> None:
        """Refuse: this rule needs an average in every iteration.

        Raises:
            TrainingError: Always.
        """
        raise TrainingError(
            f"iteration {iteration} was to end without an average",
            why="this run's optimizer steps from the average of each iteration",
            fix="give all nodes the same run file and release",
        )

    def committed(self, gradient_P: Tensor, *, averaged: bool) -> None:
        """Nothing is left of the iteration."""
