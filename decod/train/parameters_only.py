"""What a client's device holds of its stage: the parameters, and nothing of the optimizer's.

Servers step for it (`decod.protocol.strategy.servers`). It adds gradients up, contributes their
sum, and loads the parameters after the step.

Legend: P parameters of a stage, flat.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decod.errors import TrainingError
from decod.train.checkpoint.description import joined_hash
from decod.train.layout import Layout
from decod.train.shared_state import SharedState
from decod.train.update_rule import StepInput, nothing_to_send


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

    def begin(self, shared: SharedState, iteration: int) -> Weights:  # noqa: ARG002
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
