"""One stage's weights and moments: the committed ones, and those of a proposed step.

A proposed step is written beside the committed state. To undo it is to forget it.

Legend: P parameters of the stage.
"""

from dataclasses import dataclass

from decod.errors import TrainingError
from decod.train.adamw import AdamWState
from decod.train.layout import Layout
from decod.train.reduction import require_finite


@dataclass(frozen=True, slots=True)
class Proposal:
    """The state after a step that is not final."""

    iteration: int
    state: AdamWState
    averaged: bool
    """Whether the step came from an average."""


class CommittedState:
    """The committed state, and at most one proposed step.

    Args:
        layout: Positions of the parameters.
        committed: The first state.
        iteration: The iteration that it was committed in; 0 before the first.
    """

    def __init__(self, layout: Layout, committed: AdamWState, iteration: int) -> None:
        self.layout = layout
        self.committed = committed
        self.iteration = iteration
        self._proposed: Proposal | None = None
        self._spare: AdamWState | None = None
        """Buffers for the next proposed step."""

    def hash(self) -> str:
        """Return the hash of the committed weights. See `Layout.hash`."""
        return self.layout.hash(self.committed.weights)

    def require_settled(self) -> None:
        """Raise a TrainingError while a step is proposed."""
        if self._proposed is not None:
            raise TrainingError(
                f"iteration {self._proposed.iteration} is proposed and not committed",
                why="a microbatch now would be computed with weights that may be undone",
                fix="commit or reset first",
                code="E-TRN-004",
            )

    def replace(self, committed: AdamWState, iteration: int) -> None:
        """Make another state the committed one, and forget a proposed step."""
        assert committed.weights.shape == (self.layout.num_elements,), committed.weights.shape
        self.retract()
        self.committed, self.iteration = committed, iteration

    def buffers_for(self, iteration: int) -> AdamWState:
        """Return the buffers that a proposed step may overwrite. An earlier one is forgotten.

        Raises:
            TrainingError: The iteration is already committed.
        """
        if iteration <= self.iteration:
            raise TrainingError(
                f"iteration {iteration} is proposed after {self.iteration} was committed",
                why="a step is taken once",
                fix="repeat with the current iteration",
            )
        self.retract()
        if self._spare is None:
            self._spare = self.committed.empty_like()
        return self._spare

    def propose(self, proposal: Proposal) -> str:
        """Take in a computed step, and return the hash of its weights.

        Raises:
            NonFiniteError: A weight is not finite. Nothing is proposed.
        """
        assert proposal.iteration > self.iteration, "a step is taken once"
        assert proposal.state is not self.committed, "a step is written beside the committed state"
        weights_P = proposal.state.weights
        require_finite(weights_P, f"stage after iteration {proposal.iteration}")
        digest = self.layout.hash(weights_P)
        self._proposed, self._spare = proposal, None
        return digest

    def retract(self) -> None:
        """Forget a proposed step."""
        if self._proposed is not None:
            self._spare, self._proposed = self._proposed.state, None

    def commit(self, iteration: int) -> Proposal:
        """Make the proposed step final, and return it.

        Raises:
            TrainingError: This iteration is not the proposed one.
        """
        proposal = self._proposed
        if proposal is None or proposal.iteration != iteration:
            proposed = "none" if proposal is None else str(proposal.iteration)
            raise TrainingError(
                f"commit of iteration {iteration}, but proposed is {proposed}",
                why="only a step that all members agreed on becomes final",
                fix="propose it first",
                code="E-TRN-007",
            )
        self._spare, self.committed = self.committed, proposal.state
        self._proposed, self.iteration = None, iteration
        return proposal
