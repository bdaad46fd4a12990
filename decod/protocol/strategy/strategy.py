"""What a member does between two openings.

`NodeMachine` decides nothing about microbatches: it opens and closes iterations, and hands the
strategy everything in between. A run names a pipeline or servers.
"""

from collections.abc import Callable
from random import Random
from typing import Protocol

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.durations import SpentTime
from decod.protocol.core.era import Source
from decod.protocol.core.events import DeadlinePassed, Received, SendFailed, TensorSent
from decod.protocol.core.messages import BeginAggregation, Open, Ready
from decod.protocol.core.view import Opening, Role
from decod.protocol.flows.routing import KnownFlow
from decod.protocol.state.stage_copy import StageCopy
from decod.protocol.strategy.data_share import Positions


class OwnStep(Protocol):
    """A member's step of the iteration, or what a client gives for it."""

    begun: BeginAggregation | None

    @property
    def proposal(self) -> str: ...

    @property
    def result(self) -> Ready | None: ...

    @property
    def aggregating(self) -> bool: ...

    @property
    def awaited(self) -> set[NodeId]: ...

    @property
    def made(self) -> bool:
        """Whether a decision of the leader can make it final."""
        ...


class StrategyFacts:
    """What the leader and others ask about a member's work. Its strategy keeps it current.

    Where no microbatches flow, there are no flows to tell of, and no averages that travel.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._era = -1
        """Of the last opening; -1 before the first."""
        self.step: OwnStep | None = None
        """Of the iteration."""
        self.paused = False
        """The run waits: the iteration that is open takes no microbatches."""
        self.num_committed = 0
        """Microbatches of committed iterations that this node has worked on."""
        self.spent = SpentTime()
        self.positions = Positions(batch=context.run.batch.microbatches_per_iteration)
        """How much of the data the run has seen."""

    def opened(self, opening: Opening) -> bool:
        """An iteration begins. Returns whether the run has gone back for it."""
        origin = opening.origin
        era = opening.iteration.era
        returns = origin is not None and era != self._era and origin.source is not Source.NEIGHBOURS
        self._era = era
        self.paused = opening.paused
        if returns:
            self.positions.go_back(opening.committed.number)
        if opening.committed.number == self._context.facts.start_iteration:
            self.positions.begin()
        return returns

    @property
    def begun(self) -> BeginAggregation | None:
        """Which microbatches count in the iteration, once that is known."""
        return self.step.begun if self.step is not None else None

    @property
    def vote(self) -> Ready | None:
        """The vote of this node's subtree, once it is cast."""
        return self.step.result if self.step is not None else None

    @property
    def proposal(self) -> str:
        """The hash of this node's parameters after the proposed step; empty if there is none."""
        return self.step.proposal if self.step is not None else ""

    @property
    def aggregating(self) -> bool:
        """Whether this node has added up its gradients."""
        return self.step is not None and self.step.aggregating

    def voted_for(self, iteration: Iteration) -> bool:
        """Whether this node holds a proposed step of an iteration, or has contributed to it."""
        made = self.step is not None and self.step.made
        return made and iteration == self._context.iteration

    @property
    def awaited(self) -> set[NodeId]:
        """Those without whom this node's part in the iteration can't go on now."""
        return self.step.awaited if self.step is not None else set()

    @property
    def num_flows(self) -> int:
        """Flows that this node carries, or microbatches that it has in hand."""
        raise NotImplementedError

    @property
    def known_flows(self) -> tuple[KnownFlow, ...]:
        """What this node knows of the flows in use."""
        return ()

    @property
    def agreed_epoch(self) -> int:
        """The routes that all members can take up at the next opening. 0: none."""
        return 0

    @property
    def average_travels(self) -> bool:
        """Whether an average is on its way that a later iteration uses."""
        return False


StrategyEvent = Received | SendFailed | TensorSent | DeadlinePassed


class Strategy(Protocol):
    """One member's work in one run. `copy` says whether the stage's state is there."""

    copy: StageCopy

    @property
    def facts(self) -> StrategyFacts: ...

    @property
    def deadline_s(self) -> float | None: ...

    def open(self, now_s: float, opening: Opening, *, renewed: bool) -> None:
        """Begin the context's iteration. `renewed`: its view is a new one."""
        ...

    def step(self, now_s: float, event: StrategyEvent) -> None:
        """Take in what happens between `open` and `close`: a message of the context's iteration or
        view, what became of one of its own, or a deadline that has passed.
        """
        ...

    def mend(self, now_s: float) -> None:
        """Go on with the iteration in the context's new view, which has lost members."""
        ...

    def close(self, decision: Open) -> bool:
        """End the context's iteration as a decision says, or the run.

        Returns whether this node's step is final.
        """
        ...


StrategyFactory = Callable[[Context, Role, Random], Strategy]
"""Makes the strategy of a member, from its context, its role and a source of randomness."""
