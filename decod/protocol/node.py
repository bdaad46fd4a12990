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
from decod.protocol.effects import (
    Effect,
    FreeTensor,
    Note,
    Send,
    SendTensor,
    Stop,
    StopReason,
    UseMembers,
)
from decod.protocol.era import Source
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
    TensorSent,
    VotePersisted,
)
from decod.protocol.follow_messages import FollowMessage
from decod.protocol.identity import Identity, NodeState, RunFacts
from decod.protocol.joining import Joining
from decod.protocol.keeping import inventory
from decod.protocol.leader import Leader
from decod.protocol.links import LinkTable
from decod.protocol.membership import Membership
from decod.protocol.office import FOR_OFFICE, Fate, Office
from decod.protocol.outbox import Outbox
from decod.protocol.params import ProtocolConfig
from decod.protocol.standing import Standing
from decod.protocol.stash import Stash, released
from decod.protocol.survey import Survey
from decod.protocol.utilisation import Utilisation
from decod.protocol.view import Opening, View, tree_place
from decod.protocol.work import Work, awaited_by

_Frequent = (
    messages.ForwardActivation
    | messages.BackwardGradient
    | messages.Complete
    | messages.CanTake
    | messages.ReducePart
    | messages.ReducedPart
    | messages.BeginAggregation
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
        )
        self.work = work = Work(
            self.context, identity.role, num_microbatches=facts.num_microbatches, rng=rng
        )
        self.office = Office(self.context, facts, work, rng)
        self._membership = Membership(self.context, lambda: awaited_by(self.work))
        self._survey = Survey(self.context)
        self._utilisation = Utilisation(self.context, work.keeping, self.own_load)
        self._joining = Joining(self.context, identity, _offer_of(identity, facts, rng))
        self._outbox = Outbox(self.context)
        self._standing = Standing(self.context, identity.capacity)
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
        if self._standing.draining or self.office.handover.wanted:
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
        )

    @property
    def deadline_s(self) -> float | None:
        if self._stopped:
            return None
        return earliest(
            self._joining.deadline_s,
            self._membership.deadline_s,
            self._standing.deadline_s,
            self._survey.deadline_s,
            self.work.deadline_s,
            self.office.deadline_s,
            self._outbox.deadline_s,
        )

    # --- the contract -------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Effect]:
        """Begin: ask the leader to be taken in."""
        return self._settle(now_s, [*self.office.start(now_s), *self._joining.knock(now_s)])

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take in one event; never blocks, never raises for what a peer sent."""
        if self._stopped:
            tensor = event.tensor if isinstance(event, (Received, StateFetched)) else None
            return [FreeTensor(tensor.id)] if tensor is not None else []
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
            if isinstance(effect, (Send, SendTensor)):
                self._membership.told(now_s, effect.to)
            elif isinstance(effect, Stop):
                effect = self.office.handover.ended(self._standing.ended(effect))
                self._stopped = True
            settled.append(effect)
        return settled

    def _handle(self, now_s: float, event: Event) -> list[Effect]:  # noqa: C901 - a line each.
        match event:
            case Received():
                self._membership.heard(now_s, event)
                asked = self._joining.heard(now_s, event)
                return asked + self._screen(now_s, event)
            case JobFinished():
                return self._job_finished(now_s, event)
            case JobFailed():
                return self._job_failed(now_s, event)
            case TensorSent():
                self.work.followers.sent(event)
                reports = self._survey.sent(now_s, event)
                return reports + self.context.tensors.release(event.tensor)
            case SendFailed():
                return self._undelivered(now_s, event)
            case LinkMeasured():
                return self._survey.measured(now_s, event)
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
                return self._joining.fetched(event, self.work.stage)
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
        yield self._outbox.overdue(now_s)
        knock_s = self._joining.deadline_s
        if knock_s is not None and knock_s <= now_s:
            yield self._joining.knock(now_s)
        yield self.office.overdue(now_s)
        parts = (self._standing, self._membership, self._survey, self.work)
        for overdue in [part.overdue for part in parts]:
            if self.in_view and not self._stopped:
                yield overdue(now_s)

    def _undelivered(self, now_s: float, event: SendFailed) -> list[Effect]:
        """Doubt the receiver, and try again later if the message still matters then."""
        if isinstance(event.message, FollowMessage):
            effects = self._joining.missed(now_s, event, self.work.followers)
            return effects + self.work.followed(now_s)
        effects = self._outbox.undelivered(now_s, event) + self.work.microbatches.undelivered(event)
        self._survey.undelivered(event)
        handled = self.office.unreachable(now_s, event.to, event.message, event.reason)
        if handled is not None:
            return effects + handled
        return effects + self._membership.undelivered(now_s, event.to, event.reason)

    # --- messages -----------------------------------------------------------------------------

    def _screen(self, now_s: float, received: Received) -> list[Effect]:
        """Take in a message, unless its term is another than this node's."""
        fate, effects = self.office.screen(now_s, received)
        match fate:
            case Fate.TAKE:
                return effects + self._receive(now_s, received)
            case Fate.KEEP:
                return effects + self._stash.keep(received)
        return effects + released(received)

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
            case messages.Refuse(reason, over=over):
                refused = Stop(StopReason.FINISHED if over else StopReason.REFUSED, reason)
                return [] if self.in_view or sender != self.context.view.leader else [refused]
            case _ if isinstance(message, FollowMessage):
                effects = self._joining.exchanged(now_s, received, self.work.followers)
                return effects + self.work.followed(now_s)
            case messages.Differs():
                return self.work.stage.differs(sender, message)
            case messages.Ping(nonce):
                return [Send(sender, messages.Pong(nonce))]
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
            if _changed(opening, self.context):
                # First: those who are told next may be new, and are dialled where the view says.
                effects.append(UseMembers(opening.view.members))
            effects += [Send(child, message) for child in place.children]
        if opening.finished:
            reason = StopReason.FAILED if opening.failed else StopReason.FINISHED
            detail = message.reason if isinstance(message, messages.Abort) else "the run is over"
            return [*effects, *self.work.end(), Stop(reason, detail)]
        if node_id not in opening.view:
            # A goodbye to who had this id before a restart is not for a candidate.
            return [self._dismissed(opening.view)] if self.in_view else []
        if not self.in_view and not self._joining.admitted(opening):
            return effects
        if self.in_view and not _in_step(self.context, self.work, message):
            detail = f"the run has committed iteration {opening.committed.iteration} without it"
            return [*effects, Stop(StopReason.REMOVED, detail)]
        effects += self.work.note_commit(message)
        return effects + self._open(now_s, message)

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
        return [*effects, *self.work.mend(now_s), *self._replay(now_s)]

    def _dismissed(self, view: View) -> Effect:
        leads = self.context.view.leader == self.identity.node_id
        return _superseded(view) if leads else self._standing.dismissed()

    def _open(self, now_s: float, decision: messages.Commit | messages.Abort) -> list[Effect]:
        context, work, entering = self.context, self.work, not self.in_view
        opening = decision.opening
        committed, effects = work.close(opening)
        renewed = _changed(opening, context)
        stage_before = None if entering else context.member.stage_index
        returns = opening.origin is not None and (entering or _begins_era(opening, context))
        context.round = opening.round
        if renewed:
            context.adopt(opening.view)
            self._membership.adopt(now_s)
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
        effects.append(_note_opening(context))
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
        if job is None and not event.fatal:
            return effects
        effects.append(Note("job.failed", (("job", type(job).__name__), ("reason", event.reason))))
        handled, following = None, self._joining.following
        if job is not None and self.in_view and not event.fatal:
            handled = self.work.job_failed(now_s, job, event.reason)
        elif job is not None and following.awaits(job) and not event.fatal:
            handled = following.failed(now_s, event.reason)
        if handled is None:
            return effects + self._crippled(event.reason)
        return effects + handled + self.office.voted(now_s)

    def _crippled(self, reason: str) -> list[Effect]:
        """Without its compute process this node can't keep its word: say so and stop."""
        if self.leader is not None:
            return self.office.crippled(reason)
        leave = messages.Leave(f"device failed: {reason}"[:200], at_once=True)
        return [Send(self.context.view.leader, leave), Stop(StopReason.FAILED, reason)]


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


def _changed(opening: Opening, context: Context) -> bool:
    """Whether an opening's view is another than the context's."""
    old, new = context.view, opening.view
    return (old.term, old.version) != (new.term, new.version)


def _superseded(view: View) -> Stop:
    leader = view.by_id[view.leader].label
    return Stop(StopReason.SUPERSEDED, f"{leader} leads the run in term {view.term}")


def _begins_era(opening: Opening, context: Context) -> bool:
    return opening.round.era > context.round.era


def _in_step(context: Context, work: Work, decision: messages.Commit | messages.Abort) -> bool:
    """Whether a member can follow: it holds what was committed, has voted for it, or goes back.

    A leader that was elected without the votes of most of a stage may commit what the others hold.
    """
    committed, view, origin = decision.opening.committed, context.view, decision.opening.origin
    if _begins_era(decision.opening, context):
        back = origin is not None and origin.source is not Source.NEIGHBOURS
        return back or (origin is not None and committed.iteration == work.stage.iteration)
    voted = work.voted_for(committed)
    if isinstance(decision, messages.Commit) and decision.view_term:
        told = (decision.view_term, decision.view_version)
        own = work.aggregation.proposal if work.aggregation is not None else ""
        level = dict(decision.hashes).get(context.member.stage_index, own) == own
        voted = voted and told == (view.term, view.version) and level
    return committed.iteration == work.stage.iteration or voted


def _is_frequent(message: messages.Message) -> TypeGuard[_Frequent]:
    return type(message) in _FREQUENT_TYPES


def _place_of(message: messages.Message, round_: Round, *, view_version: int) -> tuple[Round, int]:
    """Return the round and the view that a message of a round means; `view_version`: any view."""
    if isinstance(message, messages.OF_ROUND_AND_VIEW):
        return round_, message.view_version
    if isinstance(message, messages.OF_CHANGED_PATH):
        return round_, max(message.path_version, view_version)
    return round_, view_version


def _note_opening(context: Context) -> Note:
    fields = (
        ("round", str(context.round)),
        ("view_version", context.view.version),
        ("num_members", len(context.view.members)),
        ("term", context.view.term),
        ("leader", context.view.leader),
    )
    return Note("round.opened", fields)
