"""The door to the core: one node's whole protocol as a single machine. Start reading here.

`NodeMachine.step` takes what happened and returns what to do. It owns the other machines and
decides only what concerns them all: which round and view they are in.

    JOINING    -> offers itself to the leader, gets a stage, builds it
    SYNCING    -> is in the view; loads the stage's state from a member
    TRAINING   -> flows and microbatches
    AGGREGATING-> reduces, votes; a commit or abort opens the next round (-> TRAINING)
    PAUSED     -> its operator lent it to nobody for a while, or all iterations are done; it holds
                  its state for whoever needs it
    DRAINING   -> as TRAINING, and leaves with the next commit
    STOPPED

A message of a later round or view than this node's is kept until the node gets there; one of an
earlier is dropped. A message that could not be delivered is reported to the leader as a doubt about
its receiver, and tried again as long as its round lasts.
"""

from collections import deque
from collections.abc import Iterator
from random import Random
from typing import TypeGuard, get_args

from decod.ids import NodeId, Round
from decod.protocol import messages
from decod.protocol.context import Context
from decod.protocol.deadline import earliest
from decod.protocol.delivery import Delivery
from decod.protocol.effects import (
    Effect,
    FreeTensor,
    Send,
    SendTensor,
    Stop,
    StopReason,
    UseMembers,
    noted,
)
from decod.protocol.ending import Ending
from decod.protocol.events import (
    CheckpointRead,
    CheckpointWritten,
    CommitsHeld,
    DeadlinePassed,
    DrainRequested,
    Event,
    JobFailed,
    JobFinished,
    KeptRead,
    LeaderFound,
    LinkMeasured,
    PauseRequested,
    Received,
    SendFailed,
    StateFetched,
    StateFetchFailed,
    StateForgotten,
    StateKept,
    StateRequested,
    TensorLate,
    TensorSent,
    VotePersisted,
)
from decod.protocol.follow_messages import FollowMessage
from decod.protocol.identity import Identity, NodeState, RunFacts
from decod.protocol.joining import Joining
from decod.protocol.keeping import inventory
from decod.protocol.leader import Leader
from decod.protocol.links import LinkTable
from decod.protocol.office import FOR_OFFICE, Fate, Office
from decod.protocol.openings import (
    begins_era,
    changes_view,
    in_step,
    note_opening,
    superseded,
)
from decod.protocol.params import ProtocolConfig
from decod.protocol.standing import Standing
from decod.protocol.stash import Stash, released
from decod.protocol.utilisation import Utilisation
from decod.protocol.view import View, tree_place
from decod.protocol.way_messages import Passed
from decod.protocol.ways import Ways
from decod.protocol.work import Work

_Frequent = (
    messages.ForwardActivation
    | messages.BackwardGradient
    | messages.Complete
    | messages.CanTake
    | messages.ReducePart
    | messages.ReducedPart
    | messages.BeginAggregation
    | messages.GradientSquares
    | messages.GradientNorm
    | messages.Ready
    | messages.UtilisationQuery
    | messages.UtilisationAnswer
)
"""Most messages by far; all of them belong to a round."""

_FREQUENT_TYPES = frozenset(get_args(_Frequent))


class NodeMachine:
    """One node of a run. `leader` is this node's own id if it leads.

    Args:
        identity: This node.
        config: The run's protocol parameters.
        facts: The run.
        leader: Who leads.
        compute_s: Measured time for one microbatch: c_i of equation (1).
        rng: Source of all randomness.
    """

    def __init__(
        self,
        identity: Identity,
        config: ProtocolConfig,
        facts: RunFacts,
        *,
        leader: NodeId,
        compute_s: float,
        rng: Random,
    ) -> None:
        self.identity = identity
        num_stages = facts.shape.num_relay_stages + 1
        self.context = Context(
            node_id=identity.node_id,
            config=config,
            links=LinkTable(activation_size_bytes=facts.activation_size_bytes, compute_s=compute_s),
            view=View(version=0, leader=leader, term=1, num_stages=num_stages, members=()),
            round=Round(0, 0),
            start_iteration=facts.shape.start_iteration,
            fetches_initial=facts.initial_from_leader and leader != identity.node_id,
            num_shares=facts.shape.num_data_nodes,
            clips=facts.clips,
        )
        self.work = work = Work(
            self.context, identity.role, num_microbatches=facts.num_microbatches, rng=rng
        )
        self.ways = Ways(self.context)
        self.office = Office(self.context, facts, work, self.ways, rng)
        self._utilisation = Utilisation(self.context, work.keeping, self.own_load)
        self._joining = Joining(self.context, identity, _offer_of(identity, facts, rng))
        self._delivery = Delivery(self.context, self.ways, work, self.office, self._joining)
        self._membership, self._survey = self._delivery.membership, self._delivery.survey
        self._standing = Standing(self.context, identity.capacity)
        self._ending: Ending | None = None
        """The run has ended."""
        self._stopped = False
        self._stash = Stash()

    # --- what others may ask ------------------------------------------------------------------

    @property
    def leader(self) -> Leader | None:
        """This node's decisions, if it leads."""
        return self.office.leader

    @property
    def in_view(self) -> bool:
        return self.identity.node_id in self.context.view

    @property
    def state(self) -> NodeState:
        if self._stopped:
            return NodeState.STOPPED
        if not self.in_view:
            return NodeState.JOINING
        if self._ending is not None or self._standing.draining or self.office.handover.wanted:
            return NodeState.DRAINING
        if not self.work.stage.loaded:
            return NodeState.SYNCING
        if self.work.paused or not self._standing.capacity:
            return NodeState.PAUSED
        return NodeState.AGGREGATING if self.work.aggregating else NodeState.TRAINING

    def own_load(self, *, with_kept: bool = False) -> messages.NodeLoad:
        """Return how busy this node is and, if asked, what its host keeps."""
        return messages.NodeLoad(
            node_id=self.identity.node_id,
            num_flows=self.work.num_flows,
            capacity=self._standing.capacity,
            num_microbatches=self.work.num_committed,
            state=self.state.value,
            kept=inventory(self.context) if with_kept else (),
            awaited=self._membership.late,
        )

    @property
    def deadline_s(self) -> float | None:
        if self._stopped:
            return None
        if self._ending is not None:
            return earliest(self._ending.deadline_s, self._delivery.outbox.deadline_s)
        return earliest(
            self._joining.deadline_s,
            self._standing.deadline_s,
            self.work.deadline_s,
            self.office.deadline_s,
            self._delivery.deadline_s,
        )

    # --- the contract -------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Effect]:
        """Begin: ask the leader to be taken in."""
        self.office.start(now_s)
        return self._settle(now_s, self._joining.knock(now_s))

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take in one event; never blocks, never raises for what a peer sent."""
        if self._stopped:
            tensor = event.tensor if isinstance(event, (Received, StateFetched)) else None
            return [FreeTensor(tensor.id)] if tensor is not None else []
        if self._ending is not None:
            effects = self._ending.taken(now_s, event, self.ways, self._delivery.outbox)
            return self._settle(now_s, effects)
        if isinstance(event, DeadlinePassed):
            return [e for part in self._overdue(now_s) if part for e in self._settle(now_s, part)]
        return self._settle(now_s, self._handle(now_s, event))

    def _settle(self, now_s: float, effects: list[Effect]) -> list[Effect]:
        """Deliver what this node said to itself, until nothing of that is left."""
        queue, settled = deque(effects), list[Effect]()
        while queue:
            effect = queue.popleft()
            if isinstance(effect, Send):
                if effect.to == self.identity.node_id:
                    said = self._receive(now_s, Received(effect.to, effect.message))
                    queue.extendleft(reversed(said))
                    continue
                if self.office.fence(effect):
                    continue
            if isinstance(effect, (Send, SendTensor)) and effect.way is None:
                self._membership.told(now_s, effect.to)
                effect = self.ways.routed(effect)
            elif isinstance(effect, Stop):
                settled += [e for early in self._stash.take_all() for e in released(early)]
                effect = self.office.handover.ended(self._standing.ended(effect))
                self._stopped = True
            settled.append(effect)
        return settled

    def _handle(self, now_s: float, event: Event) -> list[Effect]:  # noqa: C901 - a line each.
        match event:
            case Received(way=way) if way is not None and way.goal != self.identity.node_id:
                return self.ways.pass_on(event)
            case Received():
                self._membership.heard(now_s, event)
                asked = self._joining.heard(now_s, event)
                return asked + self._screen(now_s, event)
            case JobFinished():
                return self._job_finished(now_s, event)
            case JobFailed():
                return self._job_failed(now_s, event)
            case TensorSent():
                return self._delivery.sent(now_s, event)
            case SendFailed():
                return self._delivery.failed(now_s, event)
            case TensorLate(late):
                return self._membership.suspect(now_s, late, messages.TOO_SLOW)
            case LinkMeasured():
                return self._delivery.measured(now_s, event)
            case DeadlinePassed():
                return []
            case VotePersisted():
                return self.office.persisted(now_s, event)
            case LeaderFound():
                if self.in_view:
                    return self.office.found(event)
                return self._joining.redirected(now_s, event)
            case StateRequested():
                return self.work.stage.requested(event)
            case StateFetched() if not self.in_view:
                return self._joining.fetched(event)
            case StateFetched():
                return self.work.fetched(event)
            case StateFetchFailed() if not self.in_view:
                return self._joining.fetch_failed(now_s, event)
            case StateFetchFailed():
                return self.work.fetch_failed(now_s, event)
            case StateKept() | StateForgotten() | KeptRead():
                return self._utilisation.told(event) + self.office.counted(now_s, self._utilisation)
            case CheckpointWritten() | CheckpointRead():
                return self.office.checkpointed(now_s, event)
            case DrainRequested(timeout_s):
                effects = self.office.drain(now_s, event)
                return self._standing.drain(now_s, timeout_s) if effects is None else effects
            case PauseRequested(paused, frees):
                return self._standing.pause(now_s, paused=paused, frees_device=frees)
            case CommitsHeld(held):
                return self.leader.hold(now_s, held=held) if self.leader is not None else []

    def _overdue(self, now_s: float) -> Iterator[list[Effect]]:
        """Let one machine after the other act, each in the round that the one before has left."""
        yield self._delivery.overdue(now_s)
        knock_s = self._joining.deadline_s
        if knock_s is not None and knock_s <= now_s:
            yield self._joining.knock(now_s)
        yield self.office.overdue(now_s)
        parts = (self._standing, self._membership, self._survey, self.work)
        for overdue in [part.overdue for part in parts]:
            if self.in_view and not self._stopped:
                yield overdue(now_s)

    # --- messages -----------------------------------------------------------------------------

    def _screen(self, now_s: float, received: Received) -> list[Effect]:
        """Take in a message, unless its term is another than this node's."""
        fate, effects = self.office.screen(now_s, received)
        if fate is Fate.TAKE:
            return effects + self._receive(now_s, received)
        return effects + (self._stash.keep(received) if fate is Fate.KEEP else released(received))

    def _receive(self, now_s: float, received: Received) -> list[Effect]:  # noqa: C901 - a line each.
        message, sender = received.message, received.sender
        if _is_frequent(message):
            return self._of_round(now_s, received, message.round)
        match message:
            case _ if isinstance(message, FOR_OFFICE):
                return self.office.received(now_s, received)
            case messages.CapacityAnswer():
                return self._standing.answered(sender, message)
            case messages.Assign():
                from_leader = sender == self.context.view.leader
                return self._joining.assigned(message) if from_leader else []
            case messages.Refuse():
                ours = self.in_view or sender != self.context.view.leader
                return [] if ours else self._joining.refused(now_s, message)
            case _ if isinstance(message, FollowMessage):
                effects = self._joining.exchanged(now_s, received, self.work.followers)
                return effects + self.work.followed(now_s)
            case Passed():
                return self._delivery.passed(now_s, sender, message)
            case messages.Differs():
                return self.work.stage.differs(sender, message)
            case messages.Ping():
                return self._delivery.pinged(now_s, received, message)
            case messages.Heartbeat(round_):
                behind = self.in_view and round_ > self.context.round
                return self._membership.catch_up(now_s) if behind else []
            case messages.Commit() | messages.Abort():
                return self._decided(now_s, message)
            case _ if isinstance(message, messages.VIEW_MESSAGES):
                return self._of_view(now_s, received, message.view_version)
            case messages.LinkProbe():
                return released(received)
            case _:
                return self._of_round(now_s, received, message.round)

    def _of_view(self, now_s: float, received: Received, version: int) -> list[Effect]:
        if version > self.context.view.version:
            return self._stash.keep(received)
        if version < self.context.view.version or received.sender not in self.context.view:
            return []
        self._survey.heard(received.sender, received.message)
        return self.work.flow_message(now_s, received.sender, received.message)

    def _of_round(self, now_s: float, received: Received, round_: Round) -> list[Effect]:
        context = self.context
        here = (context.round, context.view.version)
        place = _place_of(received.message, round_, view_version=context.view.version)
        if place > here:
            return self._stash.keep(received)
        if place < here or received.sender not in context.view:
            return released(received)
        return self._round_message(now_s, received)

    def _round_message(self, now_s: float, received: Received) -> list[Effect]:
        message = received.message
        if isinstance(message, (messages.BeginAggregation, messages.UtilisationQuery)):
            self._membership.announced(now_s)
            self.office.election.heard(now_s, received.sender, announced=True)
        match message:
            case messages.UtilisationQuery():
                asked = self._utilisation.queried(message)
                return asked + self.office.counted(now_s, self._utilisation)
            case messages.UtilisationAnswer():
                counted = self._utilisation.answered(received.sender, message)
                return counted + self.office.counted(now_s, self._utilisation)
            case messages.Mend():
                return self._mend(now_s, message)
        return self.work.round_message(now_s, received) + self.office.voted(now_s)

    # --- rounds -------------------------------------------------------------------------------

    def _decided(self, now_s: float, message: messages.Commit | messages.Abort) -> list[Effect]:
        """A round is over, one way or the other; pass the word on and open the next."""
        opening, node_id = message.opening, self.identity.node_id
        if (opening.view.term, opening.round) <= (self.context.view.term, self.context.round):
            return []
        effects: list[Effect] = []
        if node_id in opening.view:
            fanout = self.context.config.tree_fanout
            place = tree_place(opening.view, node_id, fanout=fanout)
            if changes_view(opening, self.context):
                # First: those who are told next may be new, and are dialled where the view says.
                effects.append(UseMembers(opening.view.members))
            effects += [Send(child, message) for child in place.children]
        if opening.finished:
            return [*effects, *self._end(now_s, message)]
        if node_id not in opening.view:
            # A goodbye to who had this id before a restart is not for a candidate.
            return [self._dismissed(opening.view)] if self.in_view else []
        if not self.in_view and not self._joining.admitted(opening):
            return effects
        if self.in_view and not in_step(self.context, self.work, message):
            detail = f"the run has committed iteration {opening.committed.iteration} without it"
            return [*effects, Stop(StopReason.REMOVED, detail)]
        effects += self.work.note_commit(message)
        return effects + self._open(now_s, message)

    def _end(self, now_s: float, decision: messages.Commit | messages.Abort) -> list[Effect]:
        """The run has ended. What was committed last may only be learnt from that."""
        effects = self.work.note_commit(decision)
        effects += self.work.close(decision.opening)[1] + self.work.end()
        self.context.round = decision.opening.round
        self._ending = Ending(now_s, self.context, decision)
        return effects

    def _mend(self, now_s: float, message: messages.Mend) -> list[Effect]:
        """Members are lost, but the round is not: pass the word on, and go on without them."""
        context, view = self.context, message.view
        if view.term != context.view.term or view.version <= context.view.version:
            return []
        if self.identity.node_id not in view:
            return [self._dismissed(view)]
        place = tree_place(view, self.identity.node_id, fanout=context.config.tree_fanout)
        told = [Send(child, message) for child in place.children]
        effects: list[Effect] = [UseMembers(view.members), *told]
        context.adopt(view)
        self._membership.adopt(now_s)
        self.office.election.mended(now_s, message)
        self._survey.opened(now_s, renewed=True)
        effects += self.ways.adopt()
        return [*effects, *self.work.mend(now_s), *self._replay(now_s)]

    def _dismissed(self, view: View) -> Effect:
        leads = self.context.view.leader == self.identity.node_id
        return superseded(view) if leads else self._standing.dismissed()

    def _open(self, now_s: float, decision: messages.Commit | messages.Abort) -> list[Effect]:
        context, work, entering = self.context, self.work, not self.in_view
        opening = decision.opening
        committed, effects = work.close(opening)
        renewed = changes_view(opening, context)
        stage_before = None if entering else context.member.stage_index
        returns = opening.origin is not None and (entering or begins_era(opening, context))
        context.round = opening.round
        effects += self.ways.opened()
        if renewed:
            context.adopt(opening.view)
            self._membership.adopt(now_s)
            effects += self.ways.adopt()
        effects += self.office.adopt(now_s, decision)
        self._survey.opened(now_s, renewed=renewed)
        self._membership.announced(now_s)
        self._joining.entered()
        if returns:
            effects += self._joining.following.end() if entering else []
            effects += work.begin_era(decision, stage_before, pristine=self._joining.pristine)
        elif entering:
            effects += work.entering.enter(now_s, decision, self._joining.following)
        elif committed:
            effects += work.stage.committed(opening.committed.iteration)
        effects += work.keeping.opened(opening, stepped=committed)
        effects += work.followers.opened(now_s, opening, stepped=committed)
        effects.append(note_opening(context))
        effects += self._standing.opened(now_s)
        if self._standing.draining:
            self.office.election.abstain(now_s)
        effects += work.open(now_s, opening, renewed=renewed)
        return effects + self._replay(now_s)

    def _replay(self, now_s: float) -> list[Effect]:
        """Take up the early messages, in the order in which they came."""
        return [e for early in self._stash.take_all() for e in self._receive(now_s, early)]

    # --- jobs ---------------------------------------------------------------------------------

    def _job_finished(self, now_s: float, event: JobFinished) -> list[Effect]:
        job, effects = self.context.compute.finished(event)
        if job is None:
            return effects
        if not self.in_view:
            return effects + self._joining.job_finished(now_s, job, event.result)
        return effects + self.work.job_finished(now_s, job, event) + self.office.voted(now_s)

    def _job_failed(self, now_s: float, event: JobFailed) -> list[Effect]:
        job, effects = self.context.compute.finished(event)
        if job is not None:
            effects.append(noted("job.failed", job=type(job).__name__, reason=event.reason))
        elif not event.fatal:
            return effects
        handled = None
        if job is not None and not event.fatal:
            machine = self.work if self.in_view else self._joining
            handled = machine.job_failed(now_s, job, event.reason)
        if handled is None:
            return effects + self.office.crippled(event.reason)
        return effects + handled + self.office.voted(now_s)


def _offer_of(identity: Identity, facts: RunFacts, rng: Random) -> messages.Join:
    return messages.Join(
        address=identity.address,
        role=identity.role,
        capacity=identity.capacity,
        stage_index=identity.stage_index,
        manifest_sha256=facts.shape.manifest_sha256,
        incarnation=rng.getrandbits(63),
        name=identity.name,
    )


def _is_frequent(message: messages.Message) -> TypeGuard[_Frequent]:
    return type(message) in _FREQUENT_TYPES


def _place_of(message: messages.Message, round_: Round, *, view_version: int) -> tuple[Round, int]:
    """Return the round and the view that a message of a round means; `view_version`: any view."""
    if isinstance(message, messages.OF_ROUND_AND_VIEW):
        return round_, message.view_version
    if isinstance(message, messages.OF_CHANGED_PATH):
        return round_, max(message.path_version, view_version)
    return round_, view_version
