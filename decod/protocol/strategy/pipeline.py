"""What a member does in the iterations: its flows, its microbatches, its stage's reduction.

`Pipeline` belongs to one node for as long as that is in the run. An iteration is opened in it by
`NodeMachine`, which alone knows what was decided; between two openings everything that concerns
microbatches and gradients happens here.
"""

from collections import deque
from random import Random
from typing import TypeVar

from decod.ids import Iteration, NodeId
from decod.protocol.core import jobs, messages
from decod.protocol.core.context import Context
from decod.protocol.core.deadline import earliest
from decod.protocol.core.effects import Effect, Note
from decod.protocol.core.era import Origin, Source
from decod.protocol.core.events import Received, StateFetched, StateFetchFailed
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.negotiation import RoutingMessage
from decod.protocol.core.view import Opening, Role
from decod.protocol.flows.building import DataFlows, RelayFlows
from decod.protocol.flows.registry import make_routing
from decod.protocol.flows.routing import KnownFlow
from decod.protocol.state.arrival import Arrival
from decod.protocol.state.mirrors import Mirrors
from decod.protocol.state.replay_sources import ReplaySource
from decod.protocol.state.rollback import Rollback
from decod.protocol.state.stage_state import StageState
from decod.protocol.strategy.data_microbatches import DataMicrobatches
from decod.protocol.strategy.data_positions import Positions
from decod.protocol.strategy.idleness import Idleness
from decod.protocol.strategy.readiness import Readiness
from decod.protocol.strategy.relay_microbatches import RelayMicrobatches
from decod.protocol.strategy.step import Step, StepState

_BUILDING = messages.FlowCost | messages.RequestFlow | messages.FlowAnswer | messages.Withdraw

_Flows = TypeVar("_Flows", RelayFlows, DataFlows)

_EARLY_MAX = 4096
"""Messages that are kept; beyond that the oldest are dropped, as if lost on the way."""


class Pipeline:
    """Flows, microbatches and reduction of one member.

    Args:
        context: The node's.
        role: Decides which half of each machine is used.
        num_microbatches: Of each data node, per iteration.
        rng: Source of randomness for the search for better flows.
    """

    def __init__(self, context: Context, role: Role, *, num_microbatches: int, rng: Random) -> None:
        self._context = context
        self._role = role
        self.stage = StageState(context, self._state_came)
        self.rollback = Rollback(context, self.stage, self._state_came)
        self.mirrors = Mirrors(context)
        self.replay_source = ReplaySource(context, self.stage)
        self.arrival = Arrival(context, self.stage, self._state_came)
        self.flows: RelayFlows | DataFlows | None = None
        self.routing = make_routing(context, rng)
        self.step: Step | None = None
        self.microbatches: RelayMicrobatches | DataMicrobatches
        if role is Role.DATA:
            self.microbatches = DataMicrobatches(
                context,
                lambda: _of(DataFlows, self.flows),
                self._contribute,
                num_microbatches=num_microbatches,
            )
        else:
            self.microbatches = RelayMicrobatches(
                context, lambda: _of(RelayFlows, self.flows), lambda: self.stage.loaded
            )
        self.num_committed = 0
        """Microbatches of committed iterations that this node has worked on."""
        self.positions = Positions(batch=num_microbatches * context.num_shares)
        self.paused = False
        self._mended = False
        """Whether some members were lost since the flows in use were found."""
        self._early: deque[tuple[NodeId, Message]] = deque(maxlen=_EARLY_MAX)
        """What peers said of the next iteration's flows before this node had opened it."""
        self.readiness = Readiness(context)
        self._idleness, self._worked = Idleness(context), True

    @property
    def deadline_s(self) -> float | None:
        flows, searches = self.flows, self.stage.loaded and not self.paused
        return earliest(
            self.microbatches.deadline_s,
            flows.deadline_s if flows is not None else None,
            self.routing.deadline_s if searches else None,
            self.arrival.deadline_s,
        )

    @property
    def num_flows(self) -> int:
        return self.flows.num_complete if self.flows is not None else 0

    @property
    def known_flows(self) -> tuple[KnownFlow, ...]:
        """What this node knows of the flows in use."""
        return self.routing.known_flows(self.flows) if self.flows is not None else ()

    @property
    def aggregating(self) -> bool:
        return self.step is not None and self.step.state is not StepState.WAITING

    @property
    def vote(self) -> messages.Ready | None:
        """The vote of this node's subtree, once it is cast."""
        return self.step.vote.result if self.step is not None else None

    def voted_for(self, iteration: Iteration) -> bool:
        """Whether this node holds a proposed step of `iteration`."""
        voted = self.step is not None and self.step.state is StepState.READY
        return voted and iteration == self._context.iteration

    def overdue(self, now_s: float) -> list[Effect]:
        effects = self.microbatches.overdue(now_s)
        if self.flows is not None:
            effects += self.flows.overdue(now_s)
        if self.stage.loaded and not self.paused:
            effects += self.routing.overdue(now_s, self.flows)
        return effects + self.arrival.overdue(now_s)

    # --- iterations -------------------------------------------------------------------------------

    def note_commit(self, decision: messages.Open) -> list[Effect]:
        """Return the note that an iteration is committed, with what this node's vote rests on.

        Who has missed the word hears of it in what opens the next iteration, by another leader.
        """
        voted = self.voted_for(decision.opening.committed)
        return _commit_notes(decision, self.step, self._context, voted=voted)

    def close(self, opening: Opening) -> tuple[bool, list[Effect]]:
        """End the context's iteration as the opening of the next says: keep its step, or undo
        it.
        """
        committed, step = self.voted_for(opening.committed), self.step
        self._worked = bool(self.microbatches.folded or self.microbatches.held)
        effects = step.abandon() if step is not None else []
        if committed and step is not None:
            self.num_committed += len(self.microbatches.folded)
            if step.begun is not None:
                self.positions.committed(step.begun)
            if isinstance(self.microbatches, DataMicrobatches):
                self.microbatches.committed()
            self.stage.parameter_hash = step.vote.proposal
            effects += self._context.compute.submit(jobs.CommitStep(opening.committed.number))
        elif step is not None:
            effects += self._context.compute.reset()
        return committed, effects + self.microbatches.reset()

    def begin_era(
        self, decision: messages.Open, stage_before: int | None, *, pristine: bool = True
    ) -> list[Effect]:
        """An era of the run begins for this node, whose view the context has.

        Args:
            decision: Opens an iteration with an origin.
            stage_before: Of which the node was a member; None: of none.
            pristine: One that was none: whether its device holds what the run began with.
        """
        opening = decision.opening
        origin, iteration = opening.origin, opening.committed.number
        assert origin is not None
        entering = stage_before is None
        moved = stage_before not in (None, self._context.member.stage_index)
        fields = (
            ("iteration", iteration),
            ("source", origin.source.value),
            ("num_repeated", origin.num_repeated),
            ("reason", _why_back(decision, origin)),
        )
        effects: list[Effect] = [Note("run.returned", fields)]
        if moved:
            self._context.why = "all nodes of it were lost"
            told = (("stage", self._context.member.stage_index), ("reason", self._context.why))
            effects.append(Note("stage.assigned", told))
        effects += self.arrival.end()
        self.stage.parameter_hash = ""
        back = origin.source is not Source.NEIGHBOURS
        if back:
            self.positions.go_back(iteration)
            if isinstance(self.microbatches, DataMicrobatches):
                self.microbatches.deferrals.go_back(iteration)
        rebuilds = moved or (entering and not pristine)
        return effects + self.rollback.begin(opening, entering=entering, moved=rebuilds)

    def open(self, now_s: float, opening: Opening, *, renewed: bool) -> list[Effect]:
        """Begin the context's iteration; `renewed` if its view is a new one."""
        context = self._context
        self.paused = opening.paused
        if opening.committed.number == context.start_iteration:
            self.positions.begin()
        self.readiness.reset()
        amended = self.stage.opened() + self.arrival.opened(opening) + self.rollback.tell()
        idle = self.stage.loaded and not self.paused and not self._worked
        amended += self._idleness.opened(now_s, idle=idle)
        self.step = Step(context, self.replay_source, loaded=self.stage.loaded)
        return amended + self._open(now_s, opening, renewed=renewed)

    def _open(self, now_s: float, opening: Opening, *, renewed: bool) -> list[Effect]:
        """Take up or look for flows in the view of an iteration that was opened."""
        context = self._context
        if renewed:
            self.routing.renew(now_s)
        elif self.flows is not None and self.routing.adopt(opening.epoch, self.flows):
            self._mended = False
            fields = (("epoch", opening.epoch), ("num_flows", self.flows.num_complete))
            return [Note("flows.settled", fields), *self._take_up(now_s, activate=False)]
        anew = renewed or self._mended
        if anew:
            data = self._role is Role.DATA
            kind = DataFlows if data else RelayFlows
            self.flows = kind(now_s, context, self.routing.price_s)
            self._mended = False
        if isinstance(self.flows, DataFlows):
            self.flows.carried = self.routing.carried()
        effects = self._take_up(now_s, activate=anew)
        early = [*self._early] if anew and not renewed else []
        self._early.clear()
        for sender, message in early:
            effects += self.flow_message(now_s, sender, message)
        return effects

    def end(self) -> list[Effect]:
        """The run is over: let go of what is held for an iteration that this node may still be
        in.
        """
        effects = self.step.abandon() if self.step is not None else []
        effects += self.arrival.end() + self.replay_source.end()
        return effects + self.rollback.end() + self.microbatches.reset()

    def mend(self, now_s: float) -> list[Effect]:
        """Go on with the iteration in the context's view, which some members are no more in."""
        context, effects = self._context, []
        if self.step is not None:
            effects += self.step.abandon()
            if self.aggregating:
                effects += context.compute.retract()
        effects += self.arrival.fetch_instead()
        self.step = Step(context, self.replay_source, loaded=self.stage.loaded)
        self._mended = True
        self._early.clear()
        self.routing.renew(now_s)
        if self.flows is None:
            return effects
        self.flows.freeze()
        if isinstance(self.microbatches, DataMicrobatches) and self.stage.loaded:
            effects += self.microbatches.mend(now_s)
        return effects + self._tell_ready()

    def _take_up(self, now_s: float, *, activate: bool) -> list[Effect]:
        """Work on the iteration, if this node holds the parameters that it needs."""
        if not self.stage.loaded or self.flows is None:
            return []
        effects = self.flows.activate(now_s) if activate else []
        if isinstance(self.microbatches, DataMicrobatches) and not self.paused:
            effects += self.microbatches.open(now_s)
        return effects + self._tell_ready()

    def _state_came(self, now_s: float) -> list[Effect]:
        """The state that this node lacked stands on its device."""
        return self.arrival.end() + self._loaded(now_s)

    def _loaded(self, now_s: float) -> list[Effect]:
        """The stage's committed state is there."""
        self.stage.loaded = True
        note = Note("state.loaded", (("iteration", self.stage.iteration),))
        effects: list[Effect] = [note, *self._take_up(now_s, activate=not self._mended)]
        if self._mended and isinstance(self.microbatches, DataMicrobatches):
            # Flows are not built any more in this iteration, and those of before may be broken.
            effects += self.microbatches.mend(now_s)
        if isinstance(self.microbatches, RelayMicrobatches):
            effects += self.microbatches.admit()
        if self.step is not None:
            effects += self.step.state_loaded()
        return effects

    # --- messages -----------------------------------------------------------------------------

    def flow_message(self, now_s: float, sender: NodeId, message: Message) -> list[Effect]:
        """Take in a message of the context's view."""
        flows = self.flows
        if flows is None:
            return []
        if self._mended and isinstance(message, _BUILDING):
            # The flows in use are frozen, here and elsewhere: whoever builds flows in this view has
            # opened the next iteration already.
            self._early.append((sender, message))
            return []
        match message:
            case messages.FlowCost():
                return flows.announced(now_s, sender, message)
            case messages.RequestFlow():
                return flows.requested(now_s, sender, message) + self._tell_ready()
            case messages.FlowAnswer():
                effects = flows.answered(now_s, sender, message)
                if isinstance(self.microbatches, DataMicrobatches):
                    effects += self.microbatches.inject()
                return effects + self._tell_ready()
            case messages.Withdraw():
                return flows.withdrawn(now_s, sender, message)
            case _ if isinstance(message, RoutingMessage):
                return self.routing.received(sender, message)
        return []

    def iteration_message(self, now_s: float, received: Received) -> list[Effect]:
        """Take in a message of the context's iteration."""
        message, sender, tensor = received.message, received.sender, received.tensor
        microbatches = self.microbatches
        match message:
            case messages.ForwardActivation() if tensor is not None:
                return microbatches.activation(sender, message, tensor)
            case messages.BackwardGradient() if tensor is not None:
                return microbatches.gradient(sender, message, tensor)
            case messages.Complete():
                return microbatches.complete(now_s, sender, message)
            case messages.Deny():
                return microbatches.denied(now_s, sender, message)
            case messages.CanTake():
                return self._peer_ready(sender)
            case messages.Reroute() if isinstance(microbatches, RelayMicrobatches):
                return microbatches.reroute(now_s, sender, message)
            case messages.Mended() if isinstance(microbatches, DataMicrobatches):
                return microbatches.mended(sender, message)
        assert self.step is not None
        effects = self.step.received(received)
        begun = isinstance(message, messages.BeginAggregation)
        return effects + (self._contribute() if begun else [])

    def _contribute(self) -> list[Effect]:
        """Take part in the reduction, as soon as all that this node has to add up is added."""
        if self.step is None or not self.microbatches.settled:
            return []
        return self.step.contribute(self.microbatches.folded)

    def _peer_ready(self, peer: NodeId) -> list[Effect]:
        self.readiness.peer_ready(peer)
        if isinstance(self.microbatches, DataMicrobatches):
            return self.microbatches.can_take(peer)
        return self._tell_ready()

    def _tell_ready(self) -> list[Effect]:
        if self.flows is None or not self.stage.loaded:
            return []
        return self.readiness.tell(self.flows)

    # --- state --------------------------------------------------------------------------------

    def fetched(self, event: StateFetched) -> list[Effect]:
        """A state that this node asked for has come."""
        machine = self.rollback if self.rollback.takes(event) else self.stage
        return machine.fetched(event)

    def fetch_failed(self, now_s: float, event: StateFetchFailed) -> list[Effect]:
        """Nobody gives it."""
        if self.rollback.takes(event):
            return self.rollback.fetch_failed(event)
        if self.stage.keeps_own(event):
            return self._loaded(now_s)
        return self.stage.fetch_failed(event)


def _of(kind: type[_Flows], flows: RelayFlows | DataFlows | None) -> _Flows:
    assert isinstance(flows, kind)
    return flows


def _why_back(decision: messages.Open, origin: Origin) -> str:
    """Return why there is another era; who hears of it later is told why the iteration was
    repeated.
    """
    told = decision.reason
    return told if told.startswith(origin.reason) else origin.reason


def awaited_by(pipeline: Pipeline) -> set[NodeId]:
    """Return those without whom a node's part in the iteration can't go on now."""
    awaited = {held.downstream for held in pipeline.microbatches.held.values() if held.awaits}
    if pipeline.flows is not None:
        awaited |= pipeline.readiness.awaited(pipeline.flows)
    if pipeline.step is not None:
        awaited |= pipeline.step.awaited
    return awaited


def _commit_notes(
    decision: messages.Open,
    step: Step | None,
    context: Context,
    *,
    voted: bool,
) -> list[Effect]:
    committed = decision.opening.committed
    begun = step.begun if step is not None else None
    if decision.committed:
        loss, num_tokens = decision.loss, decision.num_tokens
    elif begun is not None and voted:
        loss, num_tokens = begun.loss_sum / begun.num_committed, begun.num_tokens
    else:
        return []
    fields = (
        ("iteration", str(committed)),
        ("loss", loss),
        ("num_tokens", num_tokens),
        *(step.account if step is not None else ()),
        ("num_passes", context.compute.num_passes),
    )
    return [Note("iteration.committed", fields)]
