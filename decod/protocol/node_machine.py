"""The door to the core: one node's whole protocol as a single machine. Start reading here.

`NodeMachine.step` takes what happened and returns what to do. It owns the other machines and
decides only what concerns them all: which iteration and view they are in.

    JOINING    -> offers itself to the leader, gets a stage, builds it
    SYNCING    -> is in the view; loads the stage's state from a member
    TRAINING   -> flows and microbatches
    AGGREGATING-> reduces, votes; a commit or abort opens the next iteration (-> TRAINING)
    PAUSED     -> its operator lent it to nobody for a while, or all iterations are done; it holds
                  its state for whoever needs it
    DRAINING   -> as TRAINING, and leaves with the next commit
    STOPPED

A message of a later iteration or view than this node's is kept until the node gets there; one of an
earlier is dropped. A message that could not be delivered is reported to the leader as a doubt about
its receiver, and tried again as long as its iteration lasts.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import get_args

from decod.ids import Iteration, NodeId
from decod.protocol.core import messages
from decod.protocol.core.context import Context, Identity, NodeState, RunFacts
from decod.protocol.core.dispatch import Dispatch
from decod.protocol.core.effects import (
    Effect,
    FreeTensor,
    Note,
    Send,
    SendTensor,
    Stop,
    StopReason,
    UseMembers,
)
from decod.protocol.core.era import Source
from decod.protocol.core.events import (
    AverageRequested,
    BansMade,
    BlockCommits,
    CheckpointRead,
    CheckpointWritten,
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
    RecutRequested,
    SendFailed,
    StateFetched,
    StateFetchFailed,
    StateForgotten,
    StateKept,
    StateRequested,
    TensorLate,
    TensorSent,
    VotePersisted,
    Woke,
    earliest,
)
from decod.protocol.core.known_views import KnownViews
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.membership_messages import FollowMessage
from decod.protocol.core.messages.scopes import OfAveraging, OfBatch, OfView, Passed
from decod.protocol.core.seals import doubts_at_first
from decod.protocol.core.view import Member, Opening, Role, View, tree_place
from decod.protocol.delivery import Delivery, Ending
from decod.protocol.leadership.availability import Availability
from decod.protocol.leadership.joining import Joining
from decod.protocol.leadership.leader import Leader
from decod.protocol.leadership.leadership import FOR_LEADERSHIP, Fate, Leadership
from decod.protocol.leadership.utilisation import Utilisation
from decod.protocol.links.forwarding import Forwarding
from decod.protocol.state.rollback import inventory
from decod.protocol.state.stage_copy import note_return
from decod.protocol.strategy.pipeline import Pipeline
from decod.protocol.strategy.servers.servers import Servers
from decod.protocol.strategy.strategy import Strategy, StrategyFactory
from decod.run.run_config import Organisation, RunConfig


def changes_view(opening: Opening, context: Context) -> bool:
    """Return whether an opening's view is another than the context's."""
    old = context.view
    new = opening.view
    return (old.term, old.version) != (new.term, new.version)


def begins_era(opening: Opening, context: Context) -> bool:
    """Return whether the run goes back to an earlier state."""
    return opening.iteration.era > context.iteration.era


def in_step(context: Context, strategy: Strategy, decision: messages.Open) -> bool:
    """Return whether a member can follow: it holds what was committed, has voted for it, or goes
    back.

    A leader that was elected without the votes of most of a stage may commit what the others hold.
    """
    committed = decision.opening.committed
    view = context.view
    origin = decision.opening.origin
    if context.member.role is Role.CLIENT:
        return True  # It fetches what it lacks.
    anchor = decision.opening.anchor.number
    if begins_era(decision.opening, context):
        back = origin is not None and origin.source is not Source.NEIGHBOURS
        return back or (origin is not None and anchor == strategy.copy.stage.iteration)
    voted = strategy.facts.voted_for(committed)
    if decision.committed and decision.view_term:
        told = (decision.view_term, decision.view_version)
        own = strategy.facts.proposal
        level = dict(decision.hashes).get(context.member.stage_index, own) == own
        voted = voted and told == (view.term, view.version) and level
    return anchor == strategy.copy.stage.iteration or voted


def can_cut(run: RunConfig, decision: messages.Open) -> bool:
    """Return whether the model can be cut as a decision says."""
    opening = decision.opening
    cuts = {opening.view.cut, *(mark.cut for mark in opening.marks)}
    if opening.origin is not None:
        cuts.add(opening.origin.cut)
    view = opening.view
    return all(map(run.allows, cuts)) and view.num_stages == run.num_stages(view.cut)


def superseded(view: View) -> Stop:
    """Return the end of a leader whom another has followed."""
    leader = view.by_id[view.leader].label
    return Stop(StopReason.SUPERSEDED, f"{leader} leads the run in term {view.term}")


def note_opening(context: Context) -> Note:
    """Return the note that an iteration has begun."""
    fields = (
        ("iteration", str(context.iteration)),
        ("view_version", context.view.version),
        ("num_members", len(context.view.members)),
        ("term", context.view.term),
        ("leader", context.view.leader),
    )
    return Note("iteration.opened", fields)


_STRATEGIES: Mapping[Organisation, StrategyFactory] = {
    Organisation.PIPELINE: Pipeline,
    Organisation.SERVERS: Servers,
}


class NodeMachine:
    """One node of a run. `leader` is this node's own id if it leads.

    Args:
        identity: This node.
        run: The run's settings.
        facts: What else is known of it.
        leader: Who leads.
        rng: Source of all randomness.
        strategy: Makes the strategy: what this node does between two openings. None: the run's.
    """

    def __init__(
        self,
        identity: Identity,
        run: RunConfig,
        facts: RunFacts,
        *,
        leader: NodeId,
        rng: Random,
        strategy: StrategyFactory | None = None,
    ) -> None:
        self.identity = identity
        self._seals = identity.seals
        nobody = View(version=0, leader=leader, term=1, num_stages=run.num_stages(), members=())
        if leader == identity.node_id:
            facts = replace(facts, initial_from_leader=False)
        self.context = Context(
            node_id=identity.node_id,
            run=run,
            facts=facts,
            links=LinkTable(
                activation_size_bytes=facts.activation_size_bytes, compute_s=identity.compute_s
            ),
            opening=Opening(Iteration(0, 0), Iteration(0, 0), nobody),
            proofs=identity.proofs,
            bans=identity.bans,
        )
        self._out = self.context.out
        make = strategy or _STRATEGIES[run.organisation]
        self.strategy = make(self.context, identity.role, rng)
        self.forwarding = Forwarding(self.context)
        self.leadership = Leadership(self.context, self.strategy, self.forwarding, rng)
        self._utilisation = Utilisation(self.context, self.strategy.copy.mirrors, self.own_load)
        self._joining = Joining(self.context, identity, _offer_of(identity, facts, rng))
        parts = (self.forwarding, self.strategy, self.leadership, self._joining)
        self._delivery = Delivery(self.context, *parts, identity.read_bans)
        self._liveness = self._delivery.liveness
        self._measuring = self._delivery.measuring
        self._availability = Availability(self.context, identity.capacity)
        self._views = KnownViews(self.context, self._seals)
        self._ending: Ending | None = None
        """The run has ended."""
        self._stopped = False
        self._dispatch = Dispatch(self.context, _num_sent(identity, run))
        self._register()

    # --- what others may ask ------------------------------------------------------------------

    @property
    def leader(self) -> Leader | None:
        """This node's decisions, if it leads."""
        return self.leadership.leader

    @property
    def donors(self) -> tuple[Member, ...]:
        """Members of the stage that this node is to build, if it is a candidate."""
        return self._joining.donors

    @property
    def in_view(self) -> bool:
        return self.identity.node_id in self.context.view

    @property
    def state(self) -> NodeState:
        if self._stopped:
            return NodeState.STOPPED
        if not self.in_view:
            return NodeState.JOINING
        leaving = self._ending is not None or self._availability.draining
        if leaving or self.leadership.handover.wanted:
            return NodeState.DRAINING
        if not self.strategy.copy.loaded:
            return NodeState.SYNCING
        facts = self.strategy.facts
        if facts.paused or not self._availability.capacity:
            return NodeState.PAUSED
        return NodeState.AGGREGATING if facts.aggregating else NodeState.TRAINING

    def own_load(self, *, with_kept: bool = False) -> messages.NodeLoad:
        """Return how busy this node is and, if asked, what its host keeps."""
        facts = self.strategy.facts
        return messages.NodeLoad(
            node_id=self.identity.node_id,
            num_flows=facts.num_flows,
            capacity=self._availability.capacity,
            num_microbatches=facts.num_committed,
            state=self.state.value,
            kept=inventory(self.context) if with_kept else (),
            awaited=self._liveness.late,
            times=facts.spent.usual,
            device=self.identity.device,
            memory_bytes=self.identity.memory_bytes,
            decod_version=self.identity.decod_version,
        )

    @property
    def deadline_s(self) -> float | None:
        if self._stopped:
            return None
        if self._ending is not None:
            return earliest(self._ending.deadline_s, self._delivery.outbox.deadline_s)
        return earliest(
            self._joining.deadline_s,
            self._availability.deadline_s,
            self.strategy.deadline_s,
            self.leadership.deadline_s,
            self._delivery.deadline_s,
        )

    # --- the contract -------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Effect]:
        """Begin: ask the leader to be taken in."""
        self.leadership.start(now_s)
        self._joining.knock(now_s)
        return self._delivered(now_s)

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take in one event; never blocks, never raises for what a peer sent."""
        self.context.now_s = now_s
        if self._stopped:
            tensor = event.tensor if isinstance(event, (Received, StateFetched)) else None
            return [FreeTensor(tensor.id)] if tensor is not None else []
        self._views.answered()
        if isinstance(event, Received) and isinstance(event.message, messages.CatchUp):
            self._views.asked(event.sender, event.message)
        if self._ending is not None:
            self._ending.taken(now_s, event, self.forwarding, self._delivery.outbox)
        elif isinstance(event, DeadlinePassed):
            return self._overdue(now_s)
        else:
            self._handle(now_s, event)
        return self._delivered(now_s)

    def _delivered(self, now_s: float) -> list[Effect]:
        """Deliver what this node has said to itself, until nothing of that is left. Return the
        rest.
        """
        queue = deque(self._out.taken())
        outward = list[Effect]()
        while queue:
            effect = queue.popleft()
            if isinstance(effect, Send):
                if effect.to == self.identity.node_id:
                    self._dispatch.deliver(now_s, Received(effect.to, effect.message))
                    queue.extendleft(reversed(self._out.taken()))
                    continue
                if self.leadership.fence(effect):
                    continue
            if isinstance(effect, (Send, SendTensor)) and effect.way is None:
                self._liveness.told(now_s, effect.to)
                if isinstance(effect, Send):
                    told = self._views.told(effect.to, effect.message)
                    effect = effect if told is effect.message else replace(effect, message=told)
                effect = self.forwarding.routed(effect)
            elif isinstance(effect, Stop):
                self._dispatch.end()
                outward += self._out.taken()
                effect = self.leadership.handover.ended(self._availability.ended(effect))
                self._stopped = True
            outward.append(effect)
        return outward + self._out.taken()  # What routing has let go of.

    def _handle(self, now_s: float, event: Event) -> None:  # noqa: C901 - a line each.
        match event:
            case Received(way=way) if way is not None and way.goal != self.identity.node_id:
                self.forwarding.pass_on(event)
            case Received():
                if not doubts_at_first(event, self._seals, self._out):
                    self._delivery.heard(now_s, event)
                    self._joining.heard(now_s, event)
                    self._screen(now_s, event)
            case JobFinished():
                self._job_finished(now_s, event)
            case JobFailed():
                self._job_failed(now_s, event)
            case TensorSent():
                self._delivery.sent(now_s, event)
            case SendFailed():
                self._delivery.failed(now_s, event)
            case TensorLate(late):
                self._liveness.suspect(now_s, late, messages.TOO_SLOW)
            case LinkMeasured():
                self._delivery.measured(now_s, event)
            case DeadlinePassed():
                raise AssertionError("see `_overdue`")
            case VotePersisted():
                self.leadership.persisted(now_s, event)
            case LeaderFound():
                if self.in_view:
                    self.leadership.found(event)
                else:
                    self._joining.redirected(now_s, event)
            case StateRequested():
                self.strategy.copy.stage.requested(event)
            case StateFetched() if not self.in_view:
                self._joining.fetched(event)
            case StateFetched():
                self.strategy.copy.fetched(event)
            case StateFetchFailed() if not self.in_view:
                self._joining.fetch_failed(now_s, event)
            case StateFetchFailed():
                self.strategy.copy.fetch_failed(now_s, event)
            case StateKept() | StateForgotten() | KeptRead():
                self._utilisation.told(event)
                self.leadership.counted(now_s, self._utilisation)
            case CheckpointWritten() | CheckpointRead():
                self.leadership.checkpointed(now_s, event)
            case DrainRequested(timeout_s):
                if not self.leadership.drain(now_s, event):
                    self._availability.drain(now_s, timeout_s)
            case PauseRequested(paused, frees):
                self._availability.pause(now_s, paused=paused, frees_device=frees)
            case BansMade(bans):
                self._delivery.banned(now_s, bans, self.identity.node_id)
            case Woke(asleep_s):
                if self.in_view:
                    self._liveness.woke(now_s, asleep_s)
            case AverageRequested():
                self.leadership.average_first()
            case BlockCommits(blocked):
                leader = self.leader
                if leader:
                    leader.block_commits(now_s, blocked=blocked)
            case RecutRequested(cut):
                if self.leader:
                    self.leader.recut(now_s, cut)

    def _overdue(self, now_s: float) -> list[Effect]:
        """Let one machine after the other act, each in the iteration that the one before has
        left.
        """
        self._delivery.overdue(now_s)
        outward = self._delivered(now_s)
        knock_s = self._joining.deadline_s
        if knock_s is not None and knock_s <= now_s:
            self._joining.knock(now_s)
            outward += self._delivered(now_s)
        self.leadership.overdue(now_s)
        outward += self._delivered(now_s)
        for part in (self._availability, self._liveness, self._measuring):
            if self.in_view and not self._stopped:
                part.overdue(now_s)
                outward += self._delivered(now_s)
        if self.in_view and not self._stopped:
            self.strategy.step(now_s, DeadlinePassed())
            outward += self._delivered(now_s)
        return outward

    # --- messages -----------------------------------------------------------------------------

    def _register(self) -> None:
        """Say who takes in which kind of message."""
        register = self._dispatch.register
        register(self.leadership.received, *FOR_LEADERSHIP)
        register(self._availability.received, messages.CapacityAnswer)
        register(self._joining.received, messages.Assign, messages.Refuse)
        register(self._replayed, *get_args(FollowMessage))
        register(self._delivery.received, Passed, messages.Ping, messages.Bans)
        register(self._liveness.received, messages.Heartbeat)
        register(self._opened, messages.Open)
        register(self._mended, messages.Mend)
        register(self._counted, messages.UtilisationQuery, messages.UtilisationAnswer)
        register(self.strategy.copy.stage.received, messages.Differs)
        register(self._dispatch.drop, messages.LinkProbe)
        self._dispatch.register_rest(self._of_view, OfView)
        self._dispatch.register_rest(self._of_iteration, OfBatch, OfAveraging)
        self._dispatch.check()

    def _screen(self, now_s: float, received: Received) -> None:
        """Take in a message, unless its term is another than this node's."""
        match self.leadership.screen(now_s, received):
            case Fate.TAKE:
                self._dispatch.deliver(now_s, received)
            case Fate.KEEP:
                self._dispatch.keep(received)
            case Fate.DROP:
                self._out.free(received.tensor)

    def _replayed(self, now_s: float, received: Received) -> None:
        self._joining.exchanged(now_s, received, self.strategy.copy.replay_source)
        self.strategy.copy.arrival.progressed(now_s)

    def _of_view(self, now_s: float, received: Received) -> None:
        self._measuring.heard(received.sender, received.message)
        self.strategy.step(now_s, received)

    def _of_iteration(self, now_s: float, received: Received) -> None:
        if isinstance(received.message, messages.BeginAggregation):
            self._announced(now_s, received.sender)
        self.strategy.step(now_s, received)
        self.leadership.voted(now_s)

    def _counted(self, now_s: float, received: Received) -> None:
        if isinstance(received.message, messages.UtilisationQuery):
            self._announced(now_s, received.sender)
        self._utilisation.received(received)
        self.leadership.counted(now_s, self._utilisation)

    def _announced(self, now_s: float, sender: NodeId) -> None:
        """The leader's word has come down the tree."""
        self._liveness.announced(now_s)
        self.leadership.election.heard(now_s, sender, announced=True)

    # --- iterations -------------------------------------------------------------------------------

    def _opened(self, now_s: float, received: Received) -> None:
        """An iteration is over, one way or the other; pass the word on and open the next."""
        told = received.message
        node_id = self.identity.node_id
        assert isinstance(told, messages.Open)
        here = (self.context.view.term, self.context.iteration)
        if (told.opening.view.term, told.opening.iteration) <= here:
            return
        message = self._views.take(received)
        if not isinstance(message, messages.Open) or not can_cut(self.context.run, message):
            return
        opening = message.opening
        if node_id in opening.view:
            fanout = self.context.run.protocol.tree_fanout
            tree = tree_place(opening.view, node_id, fanout=fanout)
            if changes_view(opening, self.context):
                # First: those who are told next may be new, and are dialled where the view says.
                self._out.put(UseMembers(opening.view.members))
            self._out.send_all(tree.children, message)
        if message.ended:
            self._end(now_s, message)
            return
        if node_id not in opening.view:
            # A goodbye to who had this id before a restart is not for a candidate.
            if self.in_view:
                self._out.put(self._dismissed(opening.view))
            return
        if not self.in_view and not self._joining.admitted(opening):
            return
        if self.in_view and not in_step(self.context, self.strategy, message):
            detail = f"the run has committed iteration {opening.committed.number} without it"
            self._out.put(Stop(StopReason.REMOVED, detail))
        else:
            self._open(now_s, message)

    def _end(self, now_s: float, decision: messages.Open) -> None:
        """The run has ended. What was committed last may only be learnt from that."""
        self.strategy.close(decision)
        self.forwarding.end()
        ended = decision.opening.iteration
        self.context.opening = replace(self.context.opening, iteration=ended)
        self._ending = Ending(now_s, self.context, decision)

    def _mended(self, now_s: float, received: Received) -> None:
        """Members are lost, but the iteration is not: pass the word on, and go on without them."""
        word = received.message
        context = self.context
        assert isinstance(word, messages.Mend)
        if not self.in_view:
            self._dispatch.keep(received)  # What lets this node in may come later.
            return
        if word.view.term != context.view.term or word.view.version <= context.view.version:
            return
        message = self._views.take(received)
        if not isinstance(message, messages.Mend) or word.view.cut != context.view.cut:
            return
        view = message.view
        if self.identity.node_id not in view:
            self._out.put(self._dismissed(view))
            return
        place = tree_place(view, self.identity.node_id, fanout=context.run.protocol.tree_fanout)
        self._out.put(UseMembers(view.members))
        self._out.send_all(place.children, message)
        context.adopt(view)
        self._liveness.adopt(now_s)
        self.leadership.election.mended(now_s, message)
        self._measuring.opened(now_s, renewed=True)
        self.forwarding.adopt()
        self.strategy.mend(now_s)
        self._dispatch.replay(now_s)

    def _dismissed(self, view: View) -> Effect:
        leads = self.context.view.leader == self.identity.node_id
        return superseded(view) if leads else self._availability.dismissed()

    def _open(self, now_s: float, decision: messages.Open) -> None:
        context = self.context
        strategy = self.strategy
        entering = not self.in_view
        opening = decision.opening
        committed = strategy.close(decision)
        if committed:
            strategy.facts.spent.committed(now_s, context.compute.computed_s)
        renewed = changes_view(opening, context)
        stage_before = None if entering else context.member.stage_index
        returns = opening.origin is not None and (entering or begins_era(opening, context))
        context.opening = opening
        self.forwarding.opened()
        if renewed:
            context.adopt(opening.view)
            self._liveness.adopt(now_s)
            self.forwarding.adopt()
        self.leadership.adopt(now_s, decision)
        self._measuring.opened(now_s, renewed=renewed)
        self._liveness.announced(now_s)
        self._joining.entered()
        if returns:
            if entering:
                self._joining.replay.end()
            note_return(decision, context, stage_before)
            strategy.copy.begin_era(
                opening,
                stage_before,
                stage_index=context.member.stage_index,
                pristine=self._joining.pristine,
            )
        elif entering:
            strategy.copy.enter(now_s, decision, self._joining.replay)
        elif committed:
            strategy.copy.stage.committed(opening.anchor.number)
        strategy.copy.closed(now_s, opening, stepped=committed)
        self._out.put(note_opening(context))
        self._availability.opened(now_s, resigns=self.leadership.handover.wanted)
        if self._availability.draining:
            self.leadership.election.abstain(now_s)
        strategy.open(now_s, opening, renewed=renewed)
        self._dispatch.replay(now_s)

    # --- jobs ---------------------------------------------------------------------------------

    def _job_finished(self, now_s: float, event: JobFinished) -> None:
        self.context.compute.finished(now_s, event)
        self.leadership.voted(now_s)

    def _job_failed(self, now_s: float, event: JobFailed) -> None:
        if not self.context.compute.failed(now_s, event):
            self.leadership.crippled(event.reason)
            return
        if event.out_of_memory:
            self._availability.out_of_memory(now_s)
        self.leadership.voted(now_s)


def _num_sent(identity: Identity, run: RunConfig) -> int:
    """Return how many microbatches another node may have for this one at a time."""
    if run.organisation is Organisation.SERVERS:
        return run.batch.microbatches_per_iteration
    return identity.capacity


def _offer_of(identity: Identity, facts: RunFacts, rng: Random) -> messages.Join:
    return messages.Join(
        address=identity.address,
        role=identity.role,
        capacity=identity.capacity,
        stage_index=identity.stage_index,
        duty=identity.duty,
        reach=identity.reach,
        manifest_sha256=facts.manifest_sha256,
        incarnation=rng.getrandbits(63),
        name=identity.name,
    )
