"""What a member does between two openings.

`NodeMachine` decides nothing about microbatches: it opens and closes iterations, and hands the
strategy everything in between. `Pipeline` and `Servers` are the two that a run can name.
"""

from collections.abc import Callable
from random import Random
from typing import Protocol

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import Received, SendFailed, TensorSent
from decod.protocol.core.messages import BeginAggregation, Message, Open, Ready
from decod.protocol.core.view import Opening, Role
from decod.protocol.flows.routing import KnownFlow
from decod.protocol.state.stage_copy import StageCopy
from decod.protocol.strategy.data_share import Positions


class Strategy(Protocol):
    """One member's work in one run.

    Messages and results of jobs come only between `open` and `close`, and only those of the current
    iteration or view. `copy` says whether the stage's state is there.
    """

    copy: StageCopy
    paused: bool
    """The run waits: the iteration that is open takes no microbatches."""
    num_committed: int
    """Microbatches of committed iterations that this node has worked on."""
    positions: Positions
    """How much of the data the run has seen."""

    @property
    def deadline_s(self) -> float | None: ...

    def overdue(self, now_s: float) -> list[Effect]:
        """Act on a deadline that has passed."""
        ...

    def sent(self, event: TensorSent) -> bool:
        """A tensor has arrived at another node. Returns whether the iteration waited for it."""
        ...

    # --- openings -----------------------------------------------------------------------------

    def open(self, now_s: float, opening: Opening, *, renewed: bool) -> list[Effect]:
        """Begin the context's iteration. `renewed`: its view is a new one."""
        ...

    def close(self, opening: Opening) -> tuple[bool, list[Effect]]:
        """End the context's iteration as the opening of the next says.

        Returns whether this node's step is final, and effects.
        """
        ...

    def mend(self, now_s: float) -> list[Effect]:
        """Go on with the iteration in the context's new view, which has lost members."""
        ...

    def begin_era(
        self, decision: Open, stage_before: int | None, *, pristine: bool
    ) -> list[Effect]:
        """The run goes back, or goes on with a stage that was lost. See `StageCopy.begin_era`."""
        ...

    def end(self) -> list[Effect]:
        """The run is over: let go of all that is held."""
        ...

    def note_commit(self, decision: Open) -> list[Effect]:
        """Return the note that an iteration is committed, with what this node's vote rests on."""
        ...

    # --- messages -----------------------------------------------------------------------------

    def of_view(self, now_s: float, sender: NodeId, message: Message) -> list[Effect]:
        """Take in a message of the context's view."""
        ...

    def of_iteration(self, now_s: float, received: Received) -> list[Effect]:
        """Take in a message of the context's iteration."""
        ...

    def undelivered(self, event: SendFailed) -> list[Effect]:
        """A message or tensor of this strategy did not arrive."""
        ...

    # --- what the leader and others ask -------------------------------------------------------

    @property
    def begun(self) -> BeginAggregation | None:
        """Which microbatches count in the iteration, once that is known."""
        ...

    @property
    def vote(self) -> Ready | None:
        """The vote of this node's subtree, once it is cast."""
        ...

    @property
    def proposal(self) -> str:
        """The hash of this node's parameters after the proposed step; empty if there is none."""
        ...

    @property
    def aggregating(self) -> bool:
        """Whether this node has added up its gradients."""
        ...

    @property
    def average_travels(self) -> bool:
        """Whether an average is on its way that a later iteration uses."""
        ...

    @property
    def agreed_epoch(self) -> int:
        """The routes that all members can take up at the next opening. 0: none."""
        ...

    @property
    def awaited(self) -> set[NodeId]:
        """Those without whom this node's part in the iteration can't go on now."""
        ...

    @property
    def num_flows(self) -> int: ...

    @property
    def known_flows(self) -> tuple[KnownFlow, ...]:
        """What this node knows of the flows in use."""
        ...

    def voted_for(self, iteration: Iteration) -> bool:
        """Whether this node holds a proposed step of an iteration."""
        ...


StrategyFactory = Callable[[Context, Role, Random], Strategy]
"""Makes the strategy of a member, from its context, its role and a source of randomness."""
