"""Who leads, as one node sees it: its own decisions if it leads, its part in elections if not.

`Leadership` owns the `Leader` of this node's term, while there is one, and its `Election`. It
decides which terms count: a message of a lower term than this node's view is dropped and its sender
told; one of a higher term is kept until the decision arrives that opened it, and that is asked for.
"""

from dataclasses import replace
from enum import Enum
from random import Random
from typing import get_args

from decod.ids import NodeId
from decod.protocol.core import messages
from decod.protocol.core.context import Context
from decod.protocol.core.deadline import earliest
from decod.protocol.core.effects import Effect, Note, Send, Stop, StopReason, noted
from decod.protocol.core.era import Hashes
from decod.protocol.core.events import (
    CheckpointRead,
    CheckpointWritten,
    DrainRequested,
    LeaderFound,
    Received,
    VotePersisted,
)
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.election_messages import (
    Candidacy,
    Canvass,
    CanvassAnswer,
    Confirm,
    ElectionMessage,
    LeaderIs,
    Vote,
)
from decod.protocol.core.messages.forwarding_messages import Passed
from decod.protocol.core.messages.replay_messages import FollowMessage
from decod.protocol.core.node_identity import Promise, RunFacts
from decod.protocol.leadership.departures import EVERYBODY
from decod.protocol.leadership.election import Election
from decod.protocol.leadership.handover import Handover
from decod.protocol.leadership.leader import Leader, begin_era, give_up, loads_told
from decod.protocol.leadership.leader_watch import BEATS_PER_TIMEOUT, DEPUTIES_MAX
from decod.protocol.leadership.resuming import replaceable, serves
from decod.protocol.leadership.utilisation import Utilisation
from decod.protocol.leadership.verdicts import audited, audits_overdue, not_finite
from decod.protocol.links.ban_news import word_of
from decod.protocol.links.forwarding import Forwarding
from decod.protocol.strategy.strategy import Strategy

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
        self,
        context: Context,
        facts: RunFacts,
        strategy: Strategy,
        forwarding: Forwarding,
        rng: Random,
    ) -> None:
        self._forwarding = forwarding
        self.leader: Leader | None = None
        if context.view.leader == context.node_id:
            self.leader = self._leader_of(context, facts, strategy, forwarding, rng)
        self.election = Election(context, rng, facts.promise, self._hashes)
        self.handover = Handover(context, self.election)
        self._context, self._rng = context, rng
        self._facts = facts
        self._strategy = strategy
        self._beat_s: float | None = None
        self._told_s: dict[NodeId, float] = {}
        """When nodes that are behind in terms were last told."""

    @staticmethod
    def _leader_of(
        context: Context, facts: RunFacts, strategy: Strategy, forwarding: Forwarding, rng: Random
    ) -> Leader:
        def agreed_epoch() -> int:
            return strategy.agreed_epoch

        around = forwarding.around
        leader = Leader(context.node_id, context.run, facts, agreed_epoch, around, rng)
        leader.partings.average_travels = lambda: strategy.average_travels
        leader.recovery.has_start = not context.fetches_initial
        return leader

    def _hashes(self) -> Hashes:
        vote = self._strategy.vote
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

    def overdue(self, now_s: float) -> list[Effect]:
        leader, effects = self.leader, list[Effect]()
        if leader is not None:
            effects = leader.overdue(now_s) + audits_overdue(leader, now_s)
        if self._beat_s is not None and self._beat_s <= now_s:
            effects += self._beat(now_s)
        if self._context.node_id in self._context.view:
            effects += self.election.overdue(now_s)
        effects += self._take_over(now_s)
        if self.leader is None:
            return effects + self.handover.overdue(now_s)
        return effects + self._resign(now_s)

    def _beat(self, now_s: float) -> list[Effect]:
        """Show the deputies that this node lives."""
        context = self._context
        deputies = [m.node_id for m in context.view.data_nodes if m.node_id != context.node_id]
        if self.leader is None or not deputies:
            self._beat_s = None
            return []
        self._beat_s = now_s + context.run.protocol.election_timeout_s / BEATS_PER_TIMEOUT
        return [Send(node, context.heartbeat) for node in deputies[:DEPUTIES_MAX]]

    # --- terms --------------------------------------------------------------------------------

    def screen(self, now_s: float, received: Received) -> tuple[Fate, list[Effect]]:
        """Say what becomes of a message, from its sender's term."""
        context, term, sender = self._context, received.term, received.sender
        ours, message, voter = context.view.term, received.message, self.election.voter
        if isinstance(message, _DECISIONS) and voter.withstands(message):
            return Fate.DROP, []
        if term in (0, ours):
            self.election.heard(now_s, sender)
            return Fate.TAKE, []
        known, any_term = sender in context.view, isinstance(message, _ANY_TERM)
        if any_term and (term < ours or not known):
            return Fate.TAKE, []
        if term < ours:
            return Fate.DROP, self._tell(now_s, sender)
        if not known:
            # That term may have admitted it, and have iterations and views of the same numbers as
            # here.
            member = context.node_id in context.view
            return (Fate.KEEP if member else Fate.TAKE), []
        effects: list[Effect] = []
        if self.election.superseded(now_s, term):
            effects += self._step_down()
        if any_term:
            return Fate.TAKE, effects
        if self._rarely(now_s, sender):
            effects.append(Send(sender, context.catch_up))
        return Fate.KEEP, effects

    def _rarely(self, now_s: float, node: NodeId) -> bool:
        """Whether a node may be told or asked something about terms again."""
        pause_s = self._context.run.protocol.heartbeat_interval_s
        if now_s - self._told_s.get(node, -pause_s) < pause_s:
            return False
        if len(self._told_s) >= _TOLD_MAX:
            self._told_s.clear()
        self._told_s[node] = now_s
        return True

    def _tell(self, now_s: float, node: NodeId) -> list[Effect]:
        return [self.election.told(node)] if self._rarely(now_s, node) else []

    def _step_down(self) -> list[Effect]:
        """This node's term is over: it decides nothing any more."""
        self.leader, self._beat_s = None, None
        return [Note("leader.stopped", (("term", self._context.view.term),))]

    def drain(self, now_s: float, event: DrainRequested) -> list[Effect] | None:
        """The operator wants this node to leave. None: it is no leader, and leaves as others do."""
        leader, handover = self.leader, self.handover
        if leader is not None and (event.ends_run or not handover.possible(leader)):
            reason = leader.failure or "the leader has ended the run"
            return leader.finish(reason=reason, failed=bool(leader.failure))
        if leader is None and not handover.wanted:
            self.election.abstain(now_s)
            return None
        awaits = self._context.run.sync.steps_locally and not handover.wanted
        handover.ask(now_s, event.timeout_s)
        awaited: list[Effect] = [Note("contribution.awaited")] if awaits else []
        return awaited + self._resign(now_s)

    def average_first(self) -> list[Effect]:
        """The run is to end when an average holds what members have learnt by themselves."""
        if self.leader is not None:
            self.leader.partings.ask(EVERYBODY)
        return []

    def _resign(self, now_s: float) -> list[Effect]:
        """Let another data node lead, if this one is to leave and nothing is in hand."""
        if self.leader is None:
            return []
        resigned, effects = self.handover.resign(now_s, self.leader)
        if resigned:
            self.leader, self._beat_s = None, None
        return effects

    def _relieved(self, now_s: float, leader: Leader, node: NodeId) -> list[Effect]:
        """A member's compute process stands still: others do its work, if they can."""
        view = leader.view
        if node == leader.node_id:
            alone = len(view.data_nodes) == 1
            return [] if alone else self.crippled(messages.STANDS_STILL)
        if not replaceable(view, node) or not leader.quorum.allows({*view.by_id} - {node}):
            return []
        return leader.remove(now_s, {node: messages.STANDS_STILL})

    def crippled(self, reason: str) -> list[Effect]:
        """Without its compute process this node can't keep its word: it says so and stops.

        If it leads, and there is another data node, that is as if its host were lost; alone it ends
        the run, which nobody could lead any more.
        """
        if self.leader is None:
            leave = messages.Leave(f"device failed: {reason}"[:200], at_once=True)
            return [Send(self._context.view.leader, leave), Stop(StopReason.CRIPPLED, reason)]
        if len(self._context.view.data_nodes) == 1:
            return give_up(self.leader, f"the leader's device failed: {reason}")
        self.leader, self._beat_s = None, None
        return [Stop(StopReason.CRIPPLED, reason)]

    def fence(self, effect: Send) -> bool:
        """Whether this node must not send a message: it has voted for another leader."""
        vote = isinstance(effect.message, messages.Ready)
        return vote and self.election.bound

    # --- iterations -------------------------------------------------------------------------------

    def adopt(self, now_s: float, decision: messages.Open) -> list[Effect]:
        """The context has a new iteration, which this decision has opened."""
        effects = self.election.adopt(now_s, decision)
        self._told_s.clear()
        if decision.opening.view.leader != self._context.node_id:
            self.leader = None
        elif self._beat_s is None:
            self._beat_s = now_s
        effects += self.handover.opened(now_s)
        return effects + self._resign(now_s)

    def _take_over(self, now_s: float) -> list[Effect]:
        """Lead, if this node has just been elected."""
        won = self.election.campaign.take()
        if won is None:
            return []
        strategy = self._strategy
        self.leader = leader = self._leader_of(
            self._context, self._facts, strategy, self._forwarding, self._rng
        )
        won = replace(won, resigned=self.handover.resigned)
        return leader.take_over(now_s, won, strategy.begun) + self.exclude(now_s)

    def exclude(self, now_s: float) -> list[Effect]:
        """Go on without members that are banned, and forget candidates that are. These are told,
        and so are the other candidates: nobody else tells them.
        """
        leader, bans = self.leader, self._context.bans
        if leader is None:
            return []
        view, candidates = leader.view, leader.admission.candidates
        known = {n: why for n, why in bans.banned.items() if n in view or n in candidates}
        liars = leader.audits.take_convicted()
        told = [Send(node, word_of(bans)) for node in dict.fromkeys((*known, *candidates, *liars))]
        return [*told, *(leader.remove(now_s, known) if known else [])]

    # --- messages -----------------------------------------------------------------------------

    def received(  # noqa: C901 - a line each.
        self, now_s: float, received: Received
    ) -> list[Effect]:
        """Take in a message for the leader, or about who that is."""
        message, sender = received.message, received.sender
        election = self.election
        match message:
            case Canvass():
                return election.canvassed(now_s, sender, message)
            case CanvassAnswer():
                return election.campaign.answered(now_s, sender, message)
            case Candidacy():
                return election.stood(now_s, sender, message)
            case Vote():
                effects = election.campaign.voted(now_s, sender, message)
                return effects + self._take_over(now_s)
            case Confirm():
                return election.confirm(now_s, sender, message)
            case LeaderIs() if sender in self._context.view:
                stopped, effects = election.leader_is(now_s, message)
                return (self._step_down() if stopped else []) + effects
            case messages.Pong(nonce) if self.leader is None:
                return election.check.answered(sender, nonce)
            case messages.Leave() if self.leader is None:
                return self.handover.left(now_s, sender, received.term)
            case messages.Suspect(node, messages.STANDS_STILL) if self.leader and node == sender:
                return self._relieved(now_s, self.leader, node)
            case messages.Suspect(node, reason) if self.leader is not None and node == sender:
                return _refused(now_s, self.leader, sender, reason)
            case messages.CatchUp(iteration) if self.leader is None:
                term = received.term or self._context.view.term
                return election.catch_up(sender, iteration, view_term=term)
        if self.leader is None:
            return []
        return for_leader(now_s, self.leader, sender, message)

    def found(self, event: LeaderFound) -> list[Effect]:
        """Somebody says that another leads. Believed only where this node can't lead anyway."""
        leader, term = self.leader, self._context.view.term
        if leader is None or not leader.quorum.lacking or event.term <= term:
            return []
        name = event.leader[:8]
        return [Stop(StopReason.SUPERSEDED, f"{name} leads the run in term {event.term}")]

    def checkpointed(self, now_s: float, event: CheckpointWritten | CheckpointRead) -> list[Effect]:
        """This host has a checkpoint: a stage that is lost can be rebuilt from that too."""
        if self.leader is None:
            return []
        if isinstance(event, CheckpointWritten):
            self.leader.recovery.checkpoint = event.iteration
            return []
        self.leader.recovery.read(event)
        return begin_era(self.leader, now_s)

    def persisted(self, now_s: float, event: VotePersisted) -> list[Effect]:
        """A vote is on disk."""
        effects = self.election.persisted(now_s, Promise(event.term, event.candidate))
        return effects + self._take_over(now_s)

    def unreachable(
        self, now_s: float, node: NodeId, message: Message, reason: str
    ) -> list[Effect] | None:
        """A message could not be delivered. None: whoever leads is to hear of it."""
        ping = isinstance(message, messages.Ping)
        if self.leader is not None:
            return self.leader.unreachable(now_s, node, ping=ping, reason=reason)
        if node == self._context.view.leader and self._context.node_id in self._context.view:
            self.election.doubt(now_s)
            return self.election.check.unreachable(now_s, node) if ping else None
        return None

    def counted(self, now_s: float, utilisation: Utilisation) -> list[Effect]:
        """The utilisation query has come back to this node, from all members or some."""
        loads = utilisation.complete() if self.leader is not None else None
        return loads_told(self.leader, now_s, loads) if self.leader and loads is not None else []

    def voted(self, now_s: float) -> list[Effect]:
        """Count the vote of all members, if this node leads and the vote is cast."""
        vote = self._strategy.vote if self.leader is not None else None
        return self.leader.voted(now_s, vote) if self.leader and vote is not None else []


def for_leader(  # noqa: C901 - a line each.
    now_s: float, leader: Leader, sender: NodeId, message: Message
) -> list[Effect]:
    """Hand a message to the leader."""
    leader.admission.heard(now_s, sender)
    match message:
        case messages.Join():
            return leader.join(now_s, sender, message)
        case messages.Prepared():
            return leader.prepared(now_s, sender, message)
        case messages.Suspect(node, messages.NOT_FINITE) if serves(leader.view, sender, node):
            return leader.remove(now_s, {node: messages.NOT_FINITE})
        case messages.Suspect(node, messages.NOT_FINITE):
            return not_finite(leader, now_s, sender, node)
        case messages.Suspect():
            return leader.suspicions.suspected(now_s, sender, message, leader.progress)
        case messages.Pong(nonce):
            return _answered(now_s, leader, sender, nonce)
        case messages.Leave():
            return leader.leave(now_s, sender, message)
        case messages.Capacity():
            return leader.capacity(now_s, sender, message)
        case messages.CatchUp():
            return leader.catch_up(sender, message)
        case messages.Report():
            return leader.report(now_s, sender, message)
        case messages.StandOut():
            return leader.audits.stand_out(leader.view, sender, message)
        case messages.AuditResult():
            return audited(leader, now_s, sender, message)
    return []


def _refused(now_s: float, leader: Leader, sender: NodeId, reason: str) -> list[Effect]:
    """A member can't get what the era begins with: ask all again what is there."""
    if sender not in leader.view or not leader.recovery.refuse(sender, leader.node_id):
        return []
    leader.polling.due_s = now_s
    return [noted("return.failed", peer=sender, reason=reason)]


def _answered(now_s: float, leader: Leader, sender: NodeId, nonce: int) -> list[Effect]:
    """Who was asked whether it lives does. If it was given up, others may not be needed now."""
    leader.suspicions.probes.answered(sender, nonce)
    later_life = sender in leader.admission.candidates  # It has to prepare first.
    # That a liar lives helps nobody: with it, the iteration would only be repeated again.
    lied = sender in leader.audits.counts.liars
    if later_life or lied or not leader.quorum.returned(sender):
        return []
    return leader.retry(now_s)
