"""One stage's state: the committed one, and that of a proposed step.

A proposed step is written beside the committed state. To undo it is to forget it.

Legend: P parameters of the stage.
"""

from dataclasses import dataclass
from typing import Generic

from decod.errors import TrainingError
from decod.train.layout import Layout
from decod.train.reduction import require_finite
from decod.train.shared_state import SharedState
from decod.train.update_rule import StateT, UpdateRule


@dataclass(frozen=True, slots=True)
class Proposal(Generic[StateT]):
    """The state after a step that is not final."""

    iteration: int
    state: StateT
    averaged: bool
    """Whether the step came from an average."""


class CommittedState(Generic[StateT]):
    """The committed state, and at most one proposed step.

    Args:
        layout: Positions of the parameters.
        rule: What a step does.
        shared: The first state.
        iteration: The iteration that it was committed in; 0 before the first.
    """

    def __init__(
        self, layout: Layout, rule: UpdateRule[StateT], shared: SharedState, iteration: int
    ) -> None:
        assert shared.weights.shape == (layout.num_elements,), shared.weights.shape
        self.layout = layout
        self._rule = rule
        self.committed = rule.begin(shared, iteration)
        self.iteration = self.anchor = iteration
        """The last committed iteration, and the last that ended with an average."""
        self.hash = rule.hash(layout, self.committed)
        """Of what the members of the stage have in common."""
        self._proposed: Proposal[StateT] | None = None
        self._proposed_hash = ""
        self._spare: StateT | None = None
        """Buffers for the next proposed step."""
        self.ahead: StateT | None = None
        """What is known of the next step beforehand, in these buffers or the proposed step's."""

    def replace(self, shared: SharedState, iteration: int) -> None:
        """Begin anew from what the stage has in common, and forget a proposed step."""
        assert shared.weights.shape == (self.layout.num_elements,), shared.weights.shape
        self.retract()
        self.committed = self._rule.begin(shared, iteration)
        self._spare = self.ahead = None
        self.iteration = self.anchor = iteration
        self.hash = self._rule.hash(self.layout, self.committed)

    @property
    def shared(self) -> SharedState:
        """What the members of the stage have in common. Views of the committed state."""
        return self._rule.shared(self.committed)

    def free_spare(self) -> None:
        """Free the buffers of the next step unless there is something in them."""
        if self.ahead is None:
            self._spare = None

    def require_settled(self) -> None:
        """Raise a TrainingError while a step is proposed."""
        if self._proposed is not None:
            raise TrainingError(
                f"iteration {self._proposed.iteration} is proposed and not committed",
                why="a microbatch now would be computed with weights that may be undone",
                fix="commit or reset first",
                code="E-TRN-004",
            )

    def buffers_for(self, iteration: int) -> StateT:
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

    def propose(self, proposal: Proposal[StateT]) -> str:
        """Take in a computed step. Return the hash of what the stage will have in common.

        Raises:
            NonFiniteError: A weight is not finite. Nothing is proposed.
        """
        assert proposal.iteration > self.iteration, "a step is taken once"
        assert proposal.state is not self.committed, "a step is written beside the committed state"
        weights_P = proposal.state.weights
        require_finite(weights_P, f"stage after iteration {proposal.iteration}")
        # An iteration without an average changes nothing that is common.
        digest = self._rule.hash(self.layout, proposal.state) if proposal.averaged else self.hash
        self._proposed, self._proposed_hash, self._spare = proposal, digest, None
        return digest

    def retract(self) -> None:
        """Forget a proposed step."""
        if self._proposed is not None:
            self._spare, self._proposed = self._proposed.state, None

    def commit(self, iteration: int) -> None:
        """Make the proposed step final.

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
        self.ahead = None
        self._proposed, self.iteration = None, iteration
        if proposal.averaged:
            self.anchor, self.hash = iteration, self._proposed_hash
