"""Who leads, as one node sees it: its own decisions if it leads, its part in elections if not.

`Leadership` owns the `Leader` of this node's term, while there is one, and its `Election`. It
decides which terms count: a message of a lower term than this node's view is dropped and its sender
told; one of a higher term is kept until the decision arrives that opened it, and that is asked for.
"""

import math
from dataclasses import replace
from enum import Enum
from random import Random
from typing import get_args

from decod.ids import NodeId
from decod.protocol.core import messages
from decod.protocol.core.context import Context, Promise
from decod.protocol.core.effects import Send, Stop, StopReason
from decod.protocol.core.era import Hashes
from decod.protocol.core.events import (
    CheckpointRead,
    CheckpointWritten,
    DrainRequested,
    LeaderFound,
    Received,
    VotePersisted,
    earliest,
)
from decod.protocol.core.messages import Leave, Message
from decod.protocol.core.messages.decision_messages import (
    Candidacy,
    Canvass,
    CanvassAnswer,
    Confirm,
    ElectionMessage,
    LeaderIs,
    Vote,
)
from decod.protocol.core.messages.membership_messages import FollowMessage
from decod.protocol.core.messages.scopes import Passed
from decod.protocol.leadership.election import (
    BEATS_PER_TIMEOUT,
    DEPUTIES_MAX,
    Election,
    ElectionState,
)
from decod.protocol.leadership.leader import UNDER_WAY, Leader, LeaderState, replaceable
from decod.protocol.leadership.utilisation import Utilisation
from decod.protocol.links.ban_news import word_of
from decod.protocol.links.forwarding import Forwarding
from decod.protocol.strategy.strategy import Strategy

_GRACE = 3
"""How many election timeouts a leader whose time is up stays for its successor's election."""

_LISTEN_S = 0.5
"""How long a leader that is to leave listens before it resigns. Whoever stops all nodes of a run
at once stops those too that would have to elect another."""

_ENDED = (StopReason.SUPERSEDED, StopReason.REMOVED, StopReason.LEADER_LOST)


class Handover:
    """One node's part: it leads and wants to leave, or it may take the leadership over.

        LEADING --asked, and another data node could lead--> ENDING --the iteration in hand ends-->
        RESIGNED --a view without it--> (stops)
            '--nobody has taken over--> elected again: ENDING, or it stays

    A leader that resigns decides nothing more and says so to the other data nodes, again and again.
    They stand at once, in their order, without asking whether it lives; it votes like everybody
    else. So its successor comes by the rules of every election (`protocol.leadership.election`),
    only sooner, and the iteration that had just been opened is repeated without it. If nobody is
    elected within two timeouts it stands itself. Then it leads until all have voted for a commit,
    which shows that its heirs live: for only a leader can find out that they do not, and let them
    in when they come back. Who can't give the leadership to anybody stays, and says so: its daemon
    ends the run.

    Args:
        context: The node's.
        election: The node's.
    """

    def __init__(self, context: Context, election: Election) -> None:
        self._context = context
        self._out = context.out
        self._election = election
        self.wanted = False
        """This node led when its operator asked it to leave, and goes as soon as another leads."""
        self._leave_by_s: float | None = None
        self._listens_until_s: float | None = None
        self._asked_term = 0
        """The term in which this node was asked. In a later one it was elected again: nobody else
        was."""
        self._ended = False
        """What was in hand then, or when it was elected again, has ended."""
        self._say_s: float | None = None
        """This node has resigned: when it says so again."""
        self._resigned_term = 0
        """The leader of this term has resigned."""
        self._stand_s: float | None = None

    @property
    def deadline_s(self) -> float | None:
        return earliest(self._leave_by_s, self._listens_until_s, self._say_s, self._stand_s)

    @property
    def resigned(self) -> bool:
        """Whether the leader of this node's term has given its leadership up."""
        return self._resigned_term == self._context.view.term

    # --- the leader ---------------------------------------------------------------------------

    def possible(self, leader: Leader) -> bool:
        """Whether there is somebody to whom the run could go, and anything to go on with."""
        runs = leader.state not in (LeaderState.PAUSED, LeaderState.FINISHED)
        begun = runs and leader.started and not leader.quorum.lacking
        stay = {n for n in leader.view.by_id if not leader.seats.leaves(n)}
        elected = leader.quorum.chosen_by(stay, leader.view)
        return begun and elected and bool(self._heirs(leader))

    def _heirs(self, leader: Leader) -> list[NodeId]:
        """Return the other data nodes that stay."""
        data_nodes = [member.node_id for member in leader.view.data_nodes]
        return [n for n in data_nodes if n != leader.node_id and not leader.seats.leaves(n)]

    def ask(self, now_s: float, timeout_s: float) -> None:
        """The operator wants the leader to leave; asking again may shorten the time."""
        if not self.wanted:
            self.wanted = True
            self._ended = False
            self._asked_term = self._context.view.term
            self._listens_until_s = now_s + _LISTEN_S
        if timeout_s < math.inf:
            self._leave_by_s = earliest(self._leave_by_s, now_s + timeout_s)

    def resign(self, now_s: float, leader: Leader) -> bool:
        """Give the leadership up, if the time has come. Returns whether it has."""
        late = self._leave_by_s is not None and self._leave_by_s <= now_s
        listens = self._listens_until_s is not None and now_s < self._listens_until_s
        if not self.wanted or (listens and not late):
            return False
        self._listens_until_s = None
        leader.seats.wait_for_average(leader.node_id)
        # Who has voted for a commit holds its stage's state; the others would ask this node for it.
        committed = leader.committed.number
        members = leader.view.by_id
        ready = any(members[node].since_iteration < committed for node in self._heirs(leader))
        if not self.possible(leader) or (late and not ready):
            self.wanted = False
            self._leave_by_s = None
            leader.seats.stay(leader.node_id)
            self._out.note("handover.failed", reason="no other data node can lead")
            return False
        idle = self._first and leader.state not in UNDER_WAY
        ended = self._ended and leader.seats.free(leader.node_id)
        if not ready or not (ended or late or idle):
            return False
        self._ended = False
        if late:
            self._leave_by_s = now_s + _GRACE * self._context.run.protocol.election_timeout_s
        self._election.resign(now_s)
        self._out.note("leader.resigned", term=self._context.view.term)
        self._say(now_s)
        return True

    @property
    def _first(self) -> bool:
        """Whether this node has not resigned before, or not in vain."""
        return self._asked_term == self._context.view.term

    def _say(self, now_s: float) -> None:
        context = self._context
        self._resigned_term = context.view.term
        self._say_s = now_s + context.run.protocol.election_timeout_s / BEATS_PER_TIMEOUT
        others = [m.node_id for m in context.view.data_nodes if m.node_id != context.node_id]
        self._out.send_all(others, Leave("it hands over"))

    def ended(self, stop: Stop) -> Stop:
        """Return how this node's end is told: a leader that has handed over was not voted out."""
        if self.wanted and stop.reason in _ENDED:
            return Stop(StopReason.DRAINED, stop.detail)
        return stop

    # --- the others ---------------------------------------------------------------------------

    def left(self, now_s: float, sender: NodeId, term: int) -> None:
        """A node says that it leaves, and this one does not lead: does the leader resign?"""
        view = self._context.view
        if sender == view.leader and term == view.term and not self.resigned:
            self._resigned_term = term
            self._line_up(now_s)

    def _line_up(self, now_s: float) -> None:
        """Stand in turn, so that the votes are not shared."""
        view = self._context.view
        me = self._context.node_id
        others = [m.node_id for m in view.data_nodes if m.node_id != view.leader]
        if me in others:
            rank = others.index(me)
            self._stand_s = now_s + rank * self._context.run.protocol.election_timeout_s / 4
        self._stand_when_due(now_s)

    def opened(self, now_s: float) -> None:
        """An iteration has begun, which this node may have missed when it stood."""
        self._say_s = self._stand_s = None
        last = self._election.decisions.opened
        by_all = last is not None and last.committed and last.view_term == self._context.view.term
        self._ended |= by_all or self._first
        me_leads = self._context.view.leader == self._context.node_id
        if self.resigned and not me_leads:
            self._line_up(now_s)

    # --- time ---------------------------------------------------------------------------------

    def overdue(self, now_s: float) -> None:
        """This node does not lead (any more): stand, say again that it has resigned, or go."""
        self._listens_until_s = None
        if self._leave_by_s is not None and self._leave_by_s <= now_s:
            self._out.put(Stop(StopReason.DRAINED, "time was up before another data node led"))
            return
        if self._say_s is not None and self._say_s <= now_s:
            self._say(now_s)
        self._stand_when_due(now_s)

    def _stand_when_due(self, now_s: float) -> None:
        election = self._election
        if self._stand_s is None or self._stand_s > now_s:
            return
        self._stand_s = now_s + self._context.run.protocol.election_timeout_s
        voted = election.voter.bound and election.voter.promise.candidate != self._context.node_id
        busy = voted or election.campaign.state is ElectionState.STANDING
        if election.may_stand and not busy:
            election.campaign.stand(now_s)


_ANY_TERM = (
    messages.Join
    | messages.Prepared
    | FollowMessage
    | messages.Ping
    | messages.Pong
    | messages.Leave
    | messages.CatchUp
    | messages.Bans
    | Passed
    | messages.Open
    | ElectionMessage
)
"""What is looked at whatever its sender's term: strangers know none, decisions say theirs, and what
became of a message is its origin's affair."""

_DECISIONS = (messages.Open, messages.Mend)


FOR_LEADERSHIP = (
    messages.Join,
    messages.Prepared,
    messages.Suspect,
    messages.Pong,
    messages.Leave,
    messages.CatchUp,
    messages.Report,
    messages.Capacity,
    messages.AuditResult,
    messages.StandOut,
    *get_args(ElectionMessage),
)
"""Messages for the leader, or about who that is."""


_TOLD_MAX = 4096
"""Nodes of other terms that are remembered as told; beyond that all are forgotten."""


class Fate(Enum):
    """What becomes of a message because of its term."""

    TAKE = "take"
    KEEP = "keep"
    DROP = "drop"


class Leadership:
    """One node's view of who leads."""

    def __init__(
        self, context: Context, strategy: Strategy, forwarding: Forwarding, rng: Random
    ) -> None:
        self._context = context
        self._out = context.out
        self._rng = rng
        self._strategy = strategy
        self._forwarding = forwarding
        leads = context.view.leader == context.node_id
        self.leader = self._new_leader() if leads else None
        self.election = Election(context, rng, context.facts.promise, self._hashes)
        self.handover = Handover(context, self.election)
        self._beat_s: float | None = None
        self._told_s: dict[NodeId, float] = {}
        """When nodes that are behind in terms were last told."""

    def _new_leader(self) -> Leader:
        leader = Leader(self._context, self._strategy, self._forwarding.around, self._rng)
        leader.recovery.has_start = not self._context.facts.initial_from_leader
        return leader

    def _hashes(self) -> Hashes:
        vote = self._strategy.facts.vote
        agreed = vote is not None and not (
            vote.failure or vote.votes or self._strategy.copy.stage.is_odd
        )
        return vote.hashes if vote is not None and agreed else ()

    # --- time ---------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float | None:
        leader_s = self.leader.deadline_s if self.leader is not None else None
        return earliest(self.election.deadline_s, self._beat_s, self.handover.deadline_s, leader_s)

    def start(self, now_s: float) -> None:
        if self.leader is not None:
            self.leader.polling.start(now_s)

    def overdue(self, now_s: float) -> None:
        leader = self.leader
        if leader is not None:
            leader.overdue(now_s)
        if self._beat_s is not None and self._beat_s <= now_s:
            self._beat(now_s)
        if self._context.node_id in self._context.view:
            self.election.overdue(now_s)
        self._take_over(now_s)
        if self.leader is None:
            self.handover.overdue(now_s)
        else:
            self._resign(now_s)

    def _beat(self, now_s: float) -> None:
        """Show the deputies that this node lives."""
        context = self._context
        deputies = [m.node_id for m in context.view.data_nodes if m.node_id != context.node_id]
        if self.leader is None or not deputies:
            self._beat_s = None
            return
        self._beat_s = now_s + context.run.protocol.election_timeout_s / BEATS_PER_TIMEOUT
        self._out.send_all(deputies[:DEPUTIES_MAX], context.heartbeat)

    # --- terms --------------------------------------------------------------------------------

    def screen(self, now_s: float, received: Received) -> Fate:
        """Say what becomes of a message, from its sender's term."""
        context = self._context
        term = received.term
        sender = received.sender
        ours = context.view.term
        message = received.message
        voter = self.election.voter
        if isinstance(message, _DECISIONS) and voter.withstands(message):
            return Fate.DROP
        if term in (0, ours):
            self.election.heard(now_s, sender)
            return Fate.TAKE
        known = sender in context.view
        any_term = isinstance(message, _ANY_TERM)
        if any_term and (term < ours or not known):
            return Fate.TAKE
        if term < ours:
            if self._rarely(now_s, sender):
                self.election.tell(sender)
            return Fate.DROP
        if not known:
            # That term may have admitted it, and have iterations and views of the same numbers as
            # here.
            member = context.node_id in context.view
            return Fate.KEEP if member else Fate.TAKE
        if self.election.superseded(now_s, term):
            self._step_down()
        if any_term:
            return Fate.TAKE
        if self._rarely(now_s, sender):
            self._out.send(sender, context.catch_up)
        return Fate.KEEP

    def _rarely(self, now_s: float, node: NodeId) -> bool:
        """Whether a node may be told or asked something about terms again."""
        pause_s = self._context.run.protocol.heartbeat_interval_s
        if now_s - self._told_s.get(node, -pause_s) < pause_s:
            return False
        if len(self._told_s) >= _TOLD_MAX:
            self._told_s.clear()
        self._told_s[node] = now_s
        return True

    def _step_down(self) -> None:
        """This node's term is over: it decides nothing any more."""
        self.leader = None
        self._beat_s = None
        self._out.note("leader.stopped", term=self._context.view.term)

    def drain(self, now_s: float, event: DrainRequested) -> bool:
        """The operator wants this node to leave. Returns whether it does so as a leader does."""
        leader = self.leader
        handover = self.handover
        if leader is not None and (event.ends_run or not handover.possible(leader)):
            reason = leader.failure or "the leader has ended the run"
            leader.finish(reason=reason, failed=bool(leader.failure))
        elif leader is None and not handover.wanted:
            self.election.abstain(now_s)
            return False
        else:
            if self._context.run.sync.steps_locally and not handover.wanted:
                self._out.note("contribution.awaited")
            handover.ask(now_s, event.timeout_s)
            self._resign(now_s)
        return True

    def average_first(self) -> None:
        """The run is to end when an average holds what members have learnt by themselves."""
        if self.leader is not None:
            self.leader.seats.wait_to_end()

    def _resign(self, now_s: float) -> None:
        """Let another data node lead, if this one is to leave and nothing is in hand."""
        if self.leader is not None and self.handover.resign(now_s, self.leader):
            self.leader = None
            self._beat_s = None

    def _relieved(self, now_s: float, leader: Leader, node: NodeId) -> None:
        """A member's compute process stands still: others do its work, if they can."""
        view = leader.view
        if node == leader.node_id:
            if len(view.data_nodes) > 1:
                self.crippled(messages.STANDS_STILL)
        elif replaceable(view, node) and leader.quorum.allows({*view.by_id} - {node}):
            leader.remove(now_s, {node: messages.STANDS_STILL})

    def crippled(self, reason: str) -> None:
        """Without its compute process this node can't keep its word: it says so and stops.

        If it leads, and there is another data node, that is as if its host were lost; alone it ends
        the run, which nobody could lead any more.
        """
        if self.leader is None:
            leave = messages.Leave(f"device failed: {reason}"[:200], at_once=True)
            self._out.send(self._context.view.leader, leave)
            self._out.put(Stop(StopReason.CRIPPLED, reason))
        elif len(self._context.view.data_nodes) == 1:
            self.leader.give_up(f"the leader's device failed: {reason}")
        else:
            self.leader = None
            self._beat_s = None
            self._out.put(Stop(StopReason.CRIPPLED, reason))

    def fence(self, effect: Send) -> bool:
        """Whether this node must not send a message: it has voted for another leader."""
        vote = isinstance(effect.message, messages.Ready)
        return vote and self.election.voter.bound

    # --- iterations -------------------------------------------------------------------------------

    def adopt(self, now_s: float, decision: messages.Open) -> None:
        """The context has a new iteration, which this decision has opened."""
        self.election.adopt(now_s, decision)
        self._told_s.clear()
        if decision.opening.view.leader != self._context.node_id:
            self.leader = None
        elif self._beat_s is None:
            self._beat_s = now_s
        self.handover.opened(now_s)
        self._resign(now_s)

    def _take_over(self, now_s: float) -> None:
        """Lead, if this node has just been elected."""
        won = self.election.campaign.take()
        if won is None:
            return
        self.leader = leader = self._new_leader()
        won = replace(won, resigned=self.handover.resigned)
        leader.take_over(now_s, won, self._strategy.facts.begun)
        self.exclude(now_s)

    def exclude(self, now_s: float) -> None:
        """Go on without members that are banned, and forget candidates that are. These are told,
        and so are the other candidates: nobody else tells them.
        """
        leader = self.leader
        bans = self._context.bans
        if leader is None:
            return
        view = leader.view
        candidates = leader.admission.candidates
        known = {n: why for n, why in bans.banned.items() if n in view or n in candidates}
        liars = leader.audits.take_convicted()
        self._out.send_all(dict.fromkeys((*known, *candidates, *liars)), word_of(bans))
        if known:
            leader.remove(now_s, known)

    # --- messages -----------------------------------------------------------------------------

    def received(self, now_s: float, received: Received) -> None:  # noqa: C901 - a line each.
        """Take in a message for the leader, or about who that is."""
        message = received.message
        sender = received.sender
        election = self.election
        match message:
            case Canvass():
                election.canvassed(now_s, sender, message)
            case CanvassAnswer():
                election.campaign.answered(now_s, sender, message)
            case Candidacy():
                election.stood(now_s, sender, message)
            case Vote():
                election.campaign.voted(now_s, sender, message)
                self._take_over(now_s)
            case Confirm():
                election.confirm(now_s, sender, message)
            case LeaderIs(term) if sender in self._context.view:
                if election.superseded(now_s, term):
                    self._step_down()
                election.led_by(message)
            case messages.Pong(nonce) if self.leader is None:
                election.check.answered(sender, nonce)
            case messages.Leave() if self.leader is None:
                self.handover.left(now_s, sender, received.term)
            case messages.Suspect(node, messages.STANDS_STILL) if self.leader and node == sender:
                self._relieved(now_s, self.leader, node)
            case messages.Suspect(node, reason) if self.leader is not None and node == sender:
                self.leader.stuck(now_s, sender, reason)
            case messages.CatchUp(iteration) if self.leader is None:
                term = received.term or self._context.view.term
                election.catch_up(sender, iteration, view_term=term)
            case _ if self.leader is not None:
                self.leader.received(now_s, sender, message)

    def found(self, event: LeaderFound) -> None:
        """Somebody says that another leads. Believed only where this node can't lead anyway."""
        leader = self.leader
        if leader is not None and leader.quorum.lacking and event.term > self._context.view.term:
            name = event.leader[:8]
            self._out.put(Stop(StopReason.SUPERSEDED, f"{name} leads the run in term {event.term}"))

    def checkpointed(self, now_s: float, event: CheckpointWritten | CheckpointRead) -> None:
        """This host has a checkpoint: a stage that is lost can be rebuilt from that too."""
        if self.leader is None:
            return
        if isinstance(event, CheckpointWritten):
            self.leader.recovery.written(event.iteration, event.cut)
        else:
            self.leader.recovery.read(event)
            self.leader.begin_era(now_s)

    def persisted(self, now_s: float, event: VotePersisted) -> None:
        """A vote is on disk."""
        self.election.persisted(now_s, Promise(event.term, event.candidate))
        self._take_over(now_s)

    def unreachable(self, now_s: float, node: NodeId, message: Message, reason: str) -> bool:
        """A message could not be delivered. Returns whether whoever leads need not hear of it."""
        ping = isinstance(message, messages.Ping)
        if self.leader is not None:
            self.leader.unreachable(now_s, node, ping=ping, reason=reason)
            return True
        if node == self._context.view.leader and self._context.node_id in self._context.view:
            self.election.doubt(now_s)
            if ping:
                self.election.check.unreachable(now_s, node)
            return ping
        return False

    def counted(self, now_s: float, utilisation: Utilisation) -> None:
        """The utilisation query has come back to this node, from all members or some."""
        loads = utilisation.complete() if self.leader is not None else None
        if self.leader is not None and loads is not None:
            self.leader.loads_told(now_s, loads)

    def voted(self, now_s: float) -> None:
        """Count the vote of all members, if this node leads and the vote is cast."""
        vote = self._strategy.facts.vote if self.leader is not None else None
        if self.leader is not None and vote is not None:
            self.leader.voted(now_s, vote)
