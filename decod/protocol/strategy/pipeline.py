"""Training in a pipeline: each microbatch flows through one member of every stage, and back.

`Readiness` says who may be sent microbatches (GWTF V-E). Devices that get none are timed now and
then (`Idleness`).
"""

from collections import deque
from random import Random
from typing import cast

from typing_extensions import override

from decod.ids import NodeId
from decod.protocol.averaging.overlap import Overlap
from decod.protocol.core import jobs, messages
from decod.protocol.core.context import Context
from decod.protocol.core.effects import CountWork
from decod.protocol.core.events import (
    DeadlinePassed,
    JobFinished,
    Received,
    SendFailed,
    TensorSent,
    earliest,
)
from decod.protocol.core.jobs import Job, Measure, Measured
from decod.protocol.core.messages import CanTake, Message
from decod.protocol.core.messages.audit_messages import OfOpinion
from decod.protocol.core.messages.microbatch_messages import Travelling
from decod.protocol.core.messages.routing_messages import RoutingMessage
from decod.protocol.core.messages.scopes import OfAveraging, OfView
from decod.protocol.core.view import Opening, Role
from decod.protocol.flows.building import DataFlows, RelayFlows
from decod.protocol.flows.registry import make_routing
from decod.protocol.flows.routing import KnownFlow
from decod.protocol.state.stage_copy import StageCopy
from decod.protocol.strategy.data_microbatches import DataMicrobatches
from decod.protocol.strategy.microbatch import Complaints
from decod.protocol.strategy.relay_microbatches import RelayMicrobatches
from decod.protocol.strategy.step import (
    LocalSteps,
    Step,
    StepPolicy,
    note_commit,
)
from decod.protocol.strategy.strategy import StrategyEvent, StrategyFacts
from decod.protocol.strategy.witnessing import Audits, unproven


class Readiness:
    """One iteration's CAN TAKE, received and sent.

    After a commit a node tells an upstream peer that it can take microbatches once every node
    behind it, on the flows that come from that peer, has said so. The data nodes, at the sinks,
    begin.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._out = context.out
        self._ready: set[NodeId] = set()
        self._told: set[NodeId] = set()

    def reset(self) -> None:
        """Another iteration has begun."""
        self._ready.clear()
        self._told.clear()

    def peer_ready(self, peer: NodeId) -> None:
        self._ready.add(peer)

    def awaited(self, flows: RelayFlows | DataFlows) -> set[NodeId]:
        """Return the next nodes of this node's flows that have not said CAN TAKE."""
        return flows.next_nodes - self._ready

    def tell(self, flows: RelayFlows | DataFlows) -> None:
        """Tell each upstream peer, once, when all that lies behind its flows is ready."""
        pairs = flows.outflows.paired
        waiting = {pairs[flow_id] for flow_id in pairs if self._waits_for(flows.behind(flow_id))}
        tell = sorted(set(pairs.values()) - waiting - self._told)
        self._told.update(tell)
        self._out.send_all(tell, CanTake(self._context.iteration))

    def _waits_for(self, node: NodeId | None) -> bool:
        # Nobody waits for a node that was lost: others take its place.
        return node is not None and node not in self._ready and node in self._context.view


_IDLE_ITERATIONS = 2
"""In a row, after which the device is timed."""

_PAUSE_RATIO = 10.0
"""So many times as long as the last measurement took none is made."""

_QUICKER = 0.5
"""A step that takes this share of what one took when the device was timed is another device's."""


class Idleness:
    """One member's iterations without work.

    What a device costs is known from the passes that it has done. If it was slow for a while,
    because its owner used it for something else, it gets no more microbatches, and nobody learns
    that it is fast again. So it does the passes of a made-up microbatch when some iterations have
    left it without work, a tenth of the time at most, since others may wait for its sums meanwhile.
    It does so at once when the optimizer's step, which it takes in every iteration, has become much
    quicker.

    Deviation: GWTF takes all costs as known.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._num_idle = 0
        self._again_s = 0.0
        self._step_then_s = 0.0
        """What a step took when the device was timed last."""

    def opened(self, now_s: float, *, idle: bool) -> None:
        """An iteration begins.

        Args:
            now_s: The time.
            idle: This node may be given work, and had none in the last iteration.
        """
        self._num_idle = self._num_idle + 1 if idle else 0
        member = self._context.member
        relay = member.role is Role.RELAY and member.capacity > 0
        quicker = self._context.compute.step_s <= _QUICKER * self._step_then_s
        early = now_s < self._again_s and not quicker
        if relay and self._num_idle >= _IDLE_ITERATIONS and not early:
            self._num_idle = 0
            self._context.compute.submit(Measure(), self)

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        """The device has been timed."""
        if isinstance(event.result, Measured):
            self._again_s = now_s + _PAUSE_RATIO * event.duration_s
            self._step_then_s = self._context.compute.step_s
            self._context.links.measured_anew(event.result)

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:
        """The device is timed another time."""


_BUILDING = messages.FlowCost | messages.RequestFlow | messages.FlowAnswer | messages.Withdraw

_EARLY_MAX = 4096
"""Messages that are kept; beyond that the oldest are dropped, as if lost on the way."""


class PipelineFacts(StrategyFacts):
    """What others ask about a member of a pipeline."""

    def __init__(self, context: Context, pipeline: "Pipeline") -> None:
        super().__init__(context)
        self._pipeline = pipeline

    @property
    @override
    def awaited(self) -> set[NodeId]:
        pipeline = self._pipeline
        held = pipeline.microbatches.held.values()
        awaited = {each.downstream for each in held if each.awaits}
        if pipeline.flows is not None:
            awaited |= pipeline.readiness.awaited(pipeline.flows)
        return awaited | super().awaited

    @property
    @override
    def num_flows(self) -> int:
        flows = self._pipeline.flows
        return flows.num_complete if flows is not None else 0

    @property
    @override
    def known_flows(self) -> tuple[KnownFlow, ...]:
        flows = self._pipeline.flows
        return self._pipeline.routing.known_flows(flows) if flows is not None else ()

    @property
    @override
    def agreed_epoch(self) -> int:
        return self._pipeline.routing.agreed_epoch

    @property
    @override
    def average_travels(self) -> bool:
        overlap = self._pipeline.overlap
        return overlap is not None and not overlap.settled


class Pipeline:
    """Flows, microbatches and reduction of one member.

    Args:
        context: The node's.
        role: Decides which flows and microbatches it has.
        rng: Source of randomness for the search for better flows.
    """

    def __init__(self, context: Context, role: Role, rng: Random) -> None:
        self._context = context
        self._out = context.out
        sync = context.run.sync
        self._policy = LocalSteps(sync.fragments) if sync.steps_locally else StepPolicy()
        self.copy = StageCopy(context, self._state_loaded)
        self.flows: RelayFlows | DataFlows | None = None
        self.overlap = Overlap(context, self._average_settled) if context.run.sync.overlap else None
        self.routing = make_routing(context, rng)
        self._step: Step | None = None
        self._audits: Audits | None = None
        self._opened = frozenset[NodeId]()
        """The members with whom the iteration was opened."""
        self._hashes: dict[int, str] = {}
        """Of the committed parameters, by stage."""
        self._fetching: set[tuple[int, int]] = set()
        """States that this node has asked for as a judge: stage and iteration."""
        self.microbatches: RelayMicrobatches | DataMicrobatches
        if role is Role.DATA:
            self._build: type[RelayFlows | DataFlows] = DataFlows
            self.microbatches = DataMicrobatches(
                context,
                lambda: cast("DataFlows", self.flows),
                self._contribute,
                num_microbatches=context.run.batch.num_microbatches,
            )
        else:
            self._build = RelayFlows
            self.microbatches = RelayMicrobatches(
                context, lambda: cast("RelayFlows", self.flows), lambda: self.copy.loaded
            )
        self.facts = PipelineFacts(context, self)
        self._mended = False
        """Whether some members were lost since the flows in use were found."""
        self._early: deque[tuple[NodeId, Message]] = deque(maxlen=_EARLY_MAX)
        """What peers said of the next iteration's flows before this node had opened it."""
        self._complaints = Complaints(context)
        self.readiness = Readiness(context)
        self._idleness = Idleness(context)
        self._worked = True
        self._stays_ready = False
        """Whether relays that could take microbatches in the last iteration can do so in this one:
        members of the same view have stepped by themselves, so nobody fetches a state. Asking them
        would cost a way through all stages in each iteration."""

    @property
    def deadline_s(self) -> float | None:
        flows = self.flows
        searches = self.copy.loaded and not self.facts.paused
        return earliest(
            self.microbatches.deadline_s,
            flows.deadline_s if flows is not None else None,
            self.routing.deadline_s if searches else None,
            self.copy.deadline_s,
        )

    def _overdue(self, now_s: float) -> None:
        self.microbatches.overdue(now_s)
        if self.flows is not None:
            self.flows.overdue(now_s)
        if self.copy.loaded and not self.facts.paused:
            self.routing.overdue(now_s, self.flows)
        self.copy.overdue(now_s)

    # --- iterations -------------------------------------------------------------------------------

    def close(self, decision: messages.Open) -> bool:
        """End the context's iteration as a decision says: keep its step, or undo it.

        Who has missed the word hears of it in what opens the next iteration, by another leader.
        """
        opening = decision.opening
        facts = self.facts
        step = self._step
        committed = facts.voted_for(opening.committed)
        account = step.account if step is not None else ()
        note_commit(decision, facts.begun, account, self._context, voted=committed)
        self._hashes = dict(decision.hashes)
        before = self._context.opening
        self._stays_ready = committed and before.local and not before.arrival
        self._worked = bool(self.microbatches.folded or self.microbatches.held)
        self._abandon_step()
        if committed and step is not None:
            averaged = None if before.local else before.spec.fragment
            num_own = len(self.microbatches.folded)
            facts.num_committed += num_own
            work = {self._context.node_id: num_own, **self.microbatches.relays_work()}
            self._out.put(CountWork(opening.committed.number, tuple(sorted(work.items()))))
            if step.begun is not None:
                facts.positions.committed(step.begun)
            marked = opening.mark_of(opening.committed.number) is not None
            self.microbatches.committed(averaged, arrived=before.arrival, marked=marked)
            folded = tuple(self.microbatches.folded)
            if self.overlap is not None and averaged is not None:
                own = self._policy.weigh(folded, averaged)
                self.overlap.stepped(own, opening.committed.number)
            self._policy.closed(folded, averaged)
            self.copy.stage.parameter_hash = step.vote.proposal
            self._context.compute.submit(jobs.CommitStep(opening.committed.number))
        elif step is not None:
            self._context.compute.reset()
        self.microbatches.reset()
        if decision.ended:
            if self.overlap is not None:
                self.overlap.stop()
            self.copy.end()
        return committed

    def open(self, now_s: float, opening: Opening, *, renewed: bool) -> None:
        """Begin the context's iteration; `renewed` if its view is a new one."""
        context = self._context
        if self.facts.opened(opening):
            self.microbatches.go_back(opening.committed.number)
        self.readiness.reset()
        self._complaints.reset()
        self.copy.opened(opening)
        if not self.copy.loaded:
            self._policy.returned()
            if self.overlap is not None:
                self.overlap.returned()
        idle = self.copy.loaded and not self.facts.paused and not self._worked
        self._idleness.opened(now_s, idle=idle)
        self._opened = frozenset(context.view.by_id)
        self._begin_step()
        if self.overlap is not None:
            self.overlap.opened()
        self._open(now_s, opening, renewed=renewed)

    def _open(self, now_s: float, opening: Opening, *, renewed: bool) -> None:
        """Take up or look for flows in the view of an iteration that was opened."""
        context = self._context
        if renewed:
            self.routing.renew(now_s)
        elif self.flows is not None and self.routing.adopt(opening.epoch, self.flows):
            self._mended = False
            num_flows = self.flows.num_complete
            self._out.note("flows.settled", epoch=opening.epoch, num_flows=num_flows)
            self._take_up(now_s, activate=False)
            return
        anew = renewed or self._mended
        if anew:
            self._stays_ready = False
            self.flows = self._build(now_s, context, self.routing.price_s)
            self._mended = False
        if self.flows is not None:
            self.flows.carry(self.routing.carried)
        self._take_up(now_s, activate=anew)
        early = [*self._early] if anew and not renewed else []
        self._early.clear()
        for sender, message in early:
            self._of_view(now_s, sender, message)

    def _begin_step(self) -> None:
        """Begin the step of an iteration, or begin it again with other members."""
        context = self._context
        loaded = self.copy.loaded
        source = self.copy.replay_source
        step = Step(context, self._policy, source, self.overlap, loaded=loaded)
        self._step = self.facts.step = step
        lost = self._opened - context.view.by_id.keys()
        of = (context, self.microbatches, step.witnessed)
        self._audits = self.copy.judging = Audits(*of, lost, self._hashes, self._fetching)

    def _abandon_step(self) -> None:
        """Release all that is held for the step."""
        if self._step is not None:
            self._step.abandon()
        if self._audits is not None:
            self._audits.abandon()

    def _average_settled(self) -> None:
        """The average of the last outer step is here, or dropped."""
        if self._step is not None:
            self._step.average_settled()

    def mend(self, now_s: float) -> None:
        """Go on with the iteration in the context's view, which some members are no more in."""
        context = self._context
        self._abandon_step()
        if self.facts.aggregating:
            context.compute.retract()
        self.copy.arrival.fetch_instead()
        self._begin_step()
        if self.overlap is not None:
            self.overlap.opened()
        self._mended = True
        self._early.clear()
        self.routing.renew(now_s)
        if self.flows is None:
            return
        self.flows.freeze()
        if self.copy.loaded:
            self.microbatches.mend(now_s)
        self._tell_ready()

    def _take_up(self, now_s: float, *, activate: bool) -> None:
        """Work on the iteration, if this node holds the parameters that it needs."""
        if not self.copy.loaded or self.flows is None:
            return
        if activate:
            self.flows.activate(now_s)
        if not self.facts.paused:
            self.microbatches.open(now_s, ready=self._stays_ready)
            self._stays_ready = False
        self._tell_ready()

    def _state_loaded(self, now_s: float) -> None:
        """The state that this node lacked stands on its device."""
        self._out.note("state.loaded", iteration=self.copy.stage.iteration)
        self._take_up(now_s, activate=not self._mended)
        if self._mended:
            # Flows are not built any more in this iteration, and those of before may be broken.
            self.microbatches.mend(now_s)
        self.microbatches.admit()
        if self._step is not None:
            self._step.state_loaded()

    # --- what happens between two openings --------------------------------------------------------

    def step(self, now_s: float, event: StrategyEvent) -> None:
        """Take in a message, what became of one, or a deadline that has passed."""
        match event:
            case Received(sender, message) if isinstance(message, OfView):
                self._of_view(now_s, sender, message)
            case Received():
                self._of_iteration(now_s, event)
            case SendFailed():
                if self.overlap is not None:
                    self.overlap.undelivered(event)
                self.microbatches.undelivered(event)
            case TensorSent():
                beside = self.overlap is not None and self.overlap.sent(event)
                if not beside and event.to in self._context.view:
                    self.facts.spent.sent(now_s, event.duration_s)
            case DeadlinePassed():
                self._overdue(now_s)

    def _of_view(self, now_s: float, sender: NodeId, message: Message) -> None:
        """Take in a message of the context's view."""
        flows = self.flows
        if flows is None:
            return
        if self._mended and isinstance(message, _BUILDING):
            # The flows in use are frozen, here and elsewhere: whoever builds flows in this view has
            # opened the next iteration already.
            self._early.append((sender, message))
            return
        match message:
            case messages.FlowCost():
                flows.announced(now_s, sender, message)
            case messages.RequestFlow():
                flows.requested(now_s, sender, message)
                self._tell_ready()
            case messages.FlowAnswer():
                flows.answered(now_s, sender, message)
                self.microbatches.inject()
                self._tell_ready()
            case messages.Withdraw():
                flows.withdrawn(now_s, sender, message)
            case _ if isinstance(message, RoutingMessage):
                self.routing.received(sender, message)

    def _of_iteration(self, now_s: float, received: Received) -> None:
        """Take in a message of the context's iteration."""
        message = received.message
        sender = received.sender
        if isinstance(message, OfAveraging) and message.travels:
            if self.overlap is not None:
                self.overlap.received(received)
            else:
                self._out.free(received.tensor)
            return
        match message:
            case messages.ForwardActivation() | messages.BackwardGradient():
                self._travelled(received, message)
            case messages.Unusable():
                self._complaints.received(received)
            case CanTake():
                self.readiness.peer_ready(sender)
                self.microbatches.received(now_s, sender, message)
                self._tell_ready()
            case messages.Complete() | messages.Deny() | messages.Reroute() | messages.Mended():
                self.microbatches.received(now_s, sender, message)
            case messages.Audit() | OfOpinion() if self._audits is not None:
                self._audits.received(received)
            case _:
                assert self._step is not None
                self._step.received(received)
                if isinstance(message, messages.BeginAggregation):
                    self._contribute()

    def _travelled(self, received: Received, message: Travelling) -> None:
        """Take in what another stage has computed, if its sender can be held to it."""
        sender = received.sender
        tensor = received.tensor
        if tensor is None or unproven(self._context, received):
            return
        if isinstance(message, messages.ForwardActivation):
            self.microbatches.activation(sender, message, tensor)
        else:
            self.microbatches.gradient(sender, message, tensor)

    def _contribute(self) -> None:
        """Take part in the reduction, as soon as all that this node has to add up is added."""
        if self._step is not None and self.microbatches.all_done:
            self._step.contribute(self.microbatches.folded)

    def _tell_ready(self) -> None:
        if self.flows is not None and self.copy.loaded:
            self.readiness.tell(self.flows)
