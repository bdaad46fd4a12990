"""A candidate's way in: offer, get a stage, build it, say that it stands ready.

    OFFERING -> (Assign) -> BUILDING -> [FETCHING] -> PREPARED -> (in the view)

The candidate repeats what it said last until the leader lets it in; the leader answers repeats
alike. If it does not answer, it may have forgotten a candidate that was silent for a while: that
one then offers itself as at first. What lets it in may be lost on its way, and the leader after it:
if others go on treating the candidate as a member, it asks them for it. A run that starts from a
given state adds a step: the stage's part comes from the leader, until an iteration is committed;
then nobody needs it any more, nor who has it.
Where the run has committed anything, a candidate that stands prepared follows a member of its stage
until it is level (`decod.protocol.state.replay`), and the leader lets it in then.
"""

from dataclasses import replace

from decod.ids import Iteration, NodeId
from decod.protocol.core import messages
from decod.protocol.core.context import Context, Identity
from decod.protocol.core.effects import FetchState, Stop, StopReason, UseMembers
from decod.protocol.core.events import (
    JobFinished,
    LeaderFound,
    Received,
    SendFailed,
    StateFetched,
    StateFetchFailed,
)
from decod.protocol.core.jobs import Build, Built, Job, Load
from decod.protocol.core.messages import Assign, Join, Prepared, Refuse
from decod.protocol.core.messages.decision_messages import Candidacy, Canvass
from decod.protocol.core.messages.membership_messages import Average, Follow, Followed
from decod.protocol.core.messages.scopes import OfRun
from decod.protocol.core.view import Member, Opening, Role
from decod.protocol.state.replay import Replay
from decod.protocol.state.replay_sources import ReplaySource, refuse
from decod.protocol.state.rollback import inventory

_KNOCK_INTERVAL_S = 2.0
"""Pause between two repeats of an offer."""


class Joining:
    """What a node does until it is in the view."""

    def __init__(self, context: Context, identity: Identity, offer: Join) -> None:
        self._context = context
        self._out = context.out
        self._identity = identity
        self._offer = offer
        self._initial_due = context.facts.initial_from_leader
        """What was built is not the state yet that the run starts from."""
        self._initial_held = not context.facts.initial_from_leader
        self._fetching = False
        self._assigned: Assign | None = None
        self._assigned_in = (0, 0)
        """Term and version of the view in which this node was no member yet."""
        self._built: Built | None = None
        self._job: Job | None = None
        """What the device does for the stage assigned last. A late result of an earlier stage, or
        of the same one in another cut, is of no use."""
        self._heard_s: float | None = None
        """When the leader was last heard; the first knock counts too."""
        self._known_s = 0.0
        """When the leader last showed that it knows this candidate: what a donor says does not."""
        self._refused_until_s: float | None = None
        """When this candidate gives up, if the leader still refuses it then."""
        self._told: Iteration | None = None
        """What the leader was last told to be the iteration of the state here."""
        self._ask_s: float | None = None
        """When those that treat this node as a member may be asked since when it is one."""
        self.replay = Replay(
            context,
            identity.address,
            self,
            incarnation=offer.incarnation,
            reach=identity.reach,
        )
        self.deadline_s: float | None = None

    def heard(self, now_s: float, received: Received) -> None:
        """Somebody says something: as to a member, maybe, before this node knows it is one."""
        context = self._context
        sender = received.sender
        if sender == context.view.leader:
            self._heard_s = now_s
            if isinstance(received.message, (Assign, messages.Ping)):
                self._known_s = now_s
        outside = context.node_id not in context.view
        if not (outside and self._ready and _to_member(received.message)):
            return
        asks = self._ask_s is not None and self._ask_s <= now_s
        if asks or self._ask_s is None:
            # Not at once: as a rule it is on its way.
            self._ask_s = now_s + context.run.protocol.heartbeat_interval_s
        if asks:
            self._out.send(sender, context.catch_up)

    def knock(self, now_s: float) -> None:
        """Offer this node, or say that it is prepared."""
        if self._identity.node_id in self._context.view:
            self.deadline_s = None
            return
        leader: NodeId = self._context.view.leader
        building = self._assigned is not None and self._built is None
        if self._heard_s is None or building or self._fetching or leader == self._context.node_id:
            # Who asks nothing gets no answers, however long it takes; who leads needs none.
            self._heard_s = self._known_s = now_s
        silent_s = now_s - self._heard_s
        if silent_s > self._context.run.protocol.leader_timeout_s:
            detail = f"the leader has not answered for {silent_s:.0f} s"
            self._out.put(Stop(StopReason.LEADER_LOST, detail))
            return
        self.deadline_s = now_s + _KNOCK_INTERVAL_S
        assigned = self._assigned
        forgotten = now_s - self._known_s > self._context.run.protocol.heartbeat_timeout_s
        # The run may begin without this node while it waits for the leader's state.
        waits = self._built is not None and self._initial_due
        # What is on this host's disk may have been found after the first offer.
        if assigned is None or self._context.kept or forgotten or waits:
            self._out.send(leader, self._offered())
        if waits:
            self._fetch_initial()
        elif assigned is not None and self._built is not None:
            if self._identity.role is not Role.CLIENT:  # Else it fetches when it is in the view.
                self.replay.aim(assigned.stage_index, assigned.donors)
                self.replay.knock(now_s)
            self._say_ready()

    def _say_ready(self) -> None:
        if self._assigned is None or self._built is None:
            return
        self._told = self.replay.level
        state_at = self._told or Iteration(self._context.facts.start_iteration, 0)
        prepared = Prepared(
            self._assigned.stage_index,
            self._built.parameter_hash,
            state_at,
            self._assigned.cut,
        )
        self._out.send(self._context.view.leader, prepared)

    def progressed(self, now_s: float) -> None:  # noqa: ARG002
        """Tell the leader how far this node is, when it has caught up with what it knows of."""
        if self.replay.abreast and self.replay.level != self._told:
            self._say_ready()

    def fetched(self, event: StateFetched) -> None:
        """A state has come that this candidate asked for, or that it needs no more."""
        context = self._context
        if self.replay.takes(event):
            self.replay.fetched(event)
        elif (
            not self._fetching
            or event.iteration != context.facts.start_iteration
            or event.cut != context.built_in
        ):
            self._out.free(event.tensor)
        else:
            context.tensors.add(event.tensor)
            self._job = Load(event.iteration, (event.manifest,))
            context.compute.submit(self._job, self, [event.tensor.id])

    def exchanged(self, now_s: float, received: Received, replay_source: ReplaySource) -> None:
        """A candidate follows this member, or the member that this node follows says something."""
        message = received.message
        sender = received.sender
        match message:
            case Follow() if self._context.node_id in self._context.view:
                replay_source.follow(now_s, sender, message)
            case Follow():
                # Meant for the member that it was before it started again.
                refuse(self._context, sender, message, "it is no member")
            case Followed():
                self.replay.answered(now_s, sender, message)
                self.progressed(now_s)
            case Average():
                self.replay.average(now_s, sender, message, received.tensor)
                self.progressed(now_s)

    def missed(self, now_s: float, event: SendFailed, replay_source: ReplaySource) -> None:
        """Something of that could not be delivered."""
        if isinstance(event.message, Follow):
            self.replay.unreachable(now_s, event.to, event.reason)
        else:
            replay_source.undelivered(event)

    def _offered(self) -> Join:
        return replace(self._offer, kept=inventory(self._context))

    def redirected(self, now_s: float, event: LeaderFound) -> None:
        """Another node leads the run by now: begin again there."""
        view = self._context.view
        if event.leader == view.leader:
            return
        self._context.view = replace(view, leader=event.leader)
        self._assigned = self._job = self._heard_s = self._refused_until_s = None
        self._fetching = False
        self.replay.end()
        self.knock(now_s)

    def admitted(self, opening: Opening) -> bool:
        """Whether this node is let in, and not who had its id before a restart."""
        view = opening.view
        member = view.by_id.get(self._identity.node_id)
        if not self._ready or member is None or (view.term, view.version) <= self._assigned_in:
            return False
        return member.since_iteration == opening.committed.number

    @property
    def _ready(self) -> bool:
        """Whether what the run needs stands here."""
        return self._built is not None and not self._initial_due

    @property
    def pristine(self) -> bool:
        """Whether the device holds what the run began with."""
        return self.replay.pristine and self._initial_held

    def entered(self) -> None:
        self.deadline_s = None

    def received(self, now_s: float, received: Received) -> None:
        """Take in the leader's answer to an offer."""
        message = received.message
        view = self._context.view
        if received.sender != view.leader or self._context.node_id in view:
            return
        if isinstance(message, Assign):
            run = self._context.run
            if run.allows(message.cut) and message.stage_index < run.num_stages(message.cut):
                self.assigned(message)
        else:
            assert isinstance(message, Refuse)
            self.refused(now_s, message)

    def refused(self, now_s: float, message: Refuse) -> None:
        """The leader does not take this node. If it may do so later, it is asked until then."""
        detail = message.reason
        if message.over:
            self.replay.end()
            self._out.put(Stop(StopReason.FINISHED, detail))
        elif not message.again_s:
            self._out.put(Stop(StopReason.REFUSED, detail))
        elif self._refused_until_s is None:
            patience_s = self._context.run.protocol.leader_timeout_s
            self._refused_until_s = now_s + message.again_s + patience_s
            self._out.note("candidate.refused", reason=detail, again_s=round(message.again_s))
        elif now_s > self._refused_until_s:
            self._out.put(Stop(StopReason.REFUSED, detail))

    def assigned(self, message: Assign) -> None:
        """The leader has chosen a stage: build it."""
        self._refused_until_s = None
        self._assigned_in = (message.view_term, message.view_version)
        if message == self._assigned:
            self._assigned = message  # It may name other donors.
            if message.begun and self._initial_due:
                self._initial_due = self._fetching = False
                self._say_ready()
            return
        self._assigned = message
        self._built = None
        self._fetching = False
        self._initial_due = self._context.facts.initial_from_leader and not message.begun
        self._context.why = message.reason
        self._out.note("stage.assigned", stage=message.stage_index, reason=message.reason)
        self.replay.built()
        if message.donors and not self._context.run.trains_all:
            # They have the weights that the stage does not train.
            self._out.put(UseMembers(message.donors))
        self._context.built_in = message.cut
        self._job = Build(message.stage_index, cut=message.cut)
        self._context.compute.submit(self._job, self)

    @property
    def donors(self) -> tuple[Member, ...]:
        """Members of the stage that this candidate is to build, as the leader has named them."""
        return () if self._assigned is None else self._assigned.donors

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:
        """A stage has been built, or loaded with what the run starts from."""
        result = event.result
        entered = self._context.node_id in self._context.view
        if job is self._job and isinstance(result, Built) and not entered:
            self.built(now_s, result, initial=isinstance(job, Load))

    def job_failed(self, now_s: float, job: Job, reason: str) -> bool:  # noqa: ARG002
        """Without a stage this node can't take part."""
        return True

    def replay_failed(self, now_s: float, reason: str) -> None:
        """A step of the stage that this candidate follows could not be taken here."""
        self.replay.restart(now_s, reason)

    def built(self, now_s: float, result: Built, *, initial: bool) -> None:
        """The stage stands: with weights from the seed or, `initial`, with its given state."""
        self._built = result
        self._initial_held = initial or not self._context.facts.initial_from_leader
        if initial:
            self._initial_due = self._fetching = False
        self.knock(now_s)

    def fetch_failed(self, now_s: float, event: StateFetchFailed) -> None:
        """Nobody could give what this candidate asked for; another knock asks again."""
        if self.replay.takes(event):
            self.replay.fetch_failed(now_s, event)
        else:
            self._fetching = False

    def _fetch_initial(self) -> None:
        if self._fetching or self._assigned is None:
            return
        self._fetching = True
        donors = (self._context.view.leader,)
        iteration = self._context.facts.start_iteration
        wanted = FetchState(donors, self._assigned.stage_index, iteration, cut=self._assigned.cut)
        self._out.put(wanted)


def _to_member(message: messages.Message) -> bool:
    """Whether nobody sends a message to a node that it does not take for a member."""
    among_members = (messages.Heartbeat, Canvass, Candidacy)
    return not isinstance(message, OfRun) or isinstance(message, among_members)
