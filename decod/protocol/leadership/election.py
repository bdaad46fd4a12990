"""Who leads: at most one node a term, and another when the leader is gone (invariant I4).

    FOLLOWING -> (leader silent) CANVASSING -> (a quorum finds so too) STANDING -> won
        ^------------(it is heard, or time is up)--------'------------'

Data nodes may stand; all members of the view, relays too, have a vote. So with two data nodes of
which one is dead there still is a majority, and a leader that is cut off from the others is in the
minority. Whose votes it takes is said in `protocol.leadership.quorum`.

**Canvassing** binds nobody. A data node that has not heard from the leader for a while asks all
members; each of them pings the leader itself before it answers. So a node that has lost only its
own link to the leader changes nothing, and a leader that is slow is not replaced as long as half
of the members get an answer. Who is ahead of the asker sends it the decision that it missed.

**Standing** takes a new term. A vote is given once in a term, kept on disk before it is sent, and
binds: until an iteration of that term or a higher one is opened, the voter casts no vote for an
iteration, without which nobody can commit one. With it comes how far the voter has got. From that
the winner knows what may have been decided:

- If any voter has not cast its vote for the newest iteration, nobody can have committed it: the
  winner repeats it as the next attempt.
- If all have, the dead leader may have committed it, and told nobody who is left: the winner
  commits it, once a quorum has confirmed that (`protocol.leadership.ballot` says why). (Members
  that do not answer are waited for a little. If such a one has not voted, it is no longer in step,
  and leaves.)
- What any voter knows to be committed or aborted is so, because a candidate that is behind a voter
  is not voted for; it is brought up to date, and asks again.

Who has confirmed a commit doesn't let a leader of a lower term abort the iteration or change its
view any more: it would forget what it has confirmed. Who has only voted does, and is then ahead of
its candidate, which hears of it.

A node that restarts has forgotten what it knew. It still knows its last term, and votes for nobody
whose view is of an earlier one.

Questions that nobody answers are asked again, since messages get lost. Every wait is random in
length after a first failure, so two candidates do not meet for ever.
"""

from collections.abc import Callable
from random import Random

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.deadline import earliest
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.era import Hashes
from decod.protocol.core.messages import Mend, Open
from decod.protocol.core.messages.election_messages import Candidacy, Canvass, Confirm, LeaderIs
from decod.protocol.core.node_identity import Promise
from decod.protocol.core.view import Role
from decod.protocol.leadership.ballot import place_in
from decod.protocol.leadership.campaign import Campaign, ElectionState
from decod.protocol.leadership.last_decisions import LastDecisions
from decod.protocol.leadership.leader_check import LeaderCheck, answer_to
from decod.protocol.leadership.leader_watch import LeaderWatch
from decod.protocol.leadership.voter import Voter


class Election:
    """One member's part in elections: when it begins a campaign, and what it answers others.

    Args:
        context: The node's.
        rng: For the length of waits.
        promise: What the node has kept of an earlier life in this run.
        hashes: Returns those of the vote that this node's subtree has cast for the iteration; none
            if it has not, or against it.
    """

    def __init__(
        self, context: Context, rng: Random, promise: Promise, hashes: Callable[[], Hashes]
    ) -> None:
        self.decisions = LastDecisions()
        self.abstains = False
        self._context = context
        self._timeout_s = context.run.protocol.election_timeout_s
        self.voter, self.check = Voter(context, promise, hashes), LeaderCheck(context)
        self.leader_watch = watch = LeaderWatch(context)
        self.campaign = Campaign(context, rng, self.voter, watch, self.decisions)

    # --- what others may ask ------------------------------------------------------------------

    @property
    def term(self) -> int:
        """The highest term that this node is bound to."""
        return self.voter.term

    @property
    def bound(self) -> bool:
        """Whether this node has voted for a leader that has not opened an iteration yet."""
        return self.voter.bound

    @property
    def electing(self) -> bool:
        """Whether nobody is known to lead."""
        return self.campaign.trying or self.bound or self.leader_watch.vacant

    @property
    def deadline_s(self) -> float | None:
        member = self._context.view.by_id.get(self._context.node_id)
        if member is None:
            return None
        act_s = self._act_s if member.role is Role.DATA else None  # Relays never stand.
        return earliest(self.check.by_s, self._remind_s, act_s)

    @property
    def _act_s(self) -> float | None:
        match self.campaign.state:
            case ElectionState.WON:
                return None
            case ElectionState.FOLLOWING if not self.may_stand:
                return None
            case ElectionState.FOLLOWING:
                return max(self.leader_watch.patient_until_s, self.campaign.from_s)
        return self.campaign.deadline_s

    @property
    def _remind_s(self) -> float | None:
        return self.voter.reminded_s + self._timeout_s if self.bound else None

    @property
    def _leads(self) -> bool:
        return self._context.view.leader == self._context.node_id and not self.leader_watch.vacant

    @property
    def may_stand(self) -> bool:
        member = self._context.view.by_id.get(self._context.node_id)
        return (
            member is not None and member.role is Role.DATA and not (self._leads or self.abstains)
        )

    # --- what happens -------------------------------------------------------------------------

    def adopt(self, now_s: float, decision: Open) -> list[Effect]:
        """The context has a new iteration."""
        self.decisions.adopt(decision)
        view = decision.opening.view
        self.leader_watch.vacant, self.leader_watch.heard_s = False, now_s
        self.campaign.adopt(now_s, view)
        self.check.reset()
        return self.voter.follow(view)

    def mended(self, now_s: float, mend: Mend) -> None:
        """The context has a new view in the same iteration: the leader lives."""
        self.decisions.mended = mend
        self.voter.moved()
        self.leader_watch.heard_s = now_s
        self.check.reset()
        if self.campaign.trying:
            self.campaign.stop(now_s)

    def heard(self, now_s: float, sender: NodeId, *, announced: bool = False) -> None:
        """The leader lives: it has sent something, or (`announced`) had it passed on."""
        direct = sender == self._context.view.leader
        if not (direct or announced) or self.bound or self.leader_watch.vacant:
            return
        if direct or self.campaign.state is ElectionState.FOLLOWING:
            self.leader_watch.heard(now_s)
            self.check.heard()
        if direct and self.campaign.state is ElectionState.CANVASSING:
            self.campaign.stop(now_s)

    def doubt(self, now_s: float) -> None:
        """The leader can't be reached from here: ask the others now rather than later."""
        if self.campaign.state is ElectionState.FOLLOWING:
            self.leader_watch.heard_s = min(self.leader_watch.heard_s, now_s - self._timeout_s)

    def overdue(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.check.by_s is not None and self.check.by_s <= now_s:
            effects += self.check.silent(now_s)
        if self._remind_s is not None and self._remind_s <= now_s:
            # The election that this node has voted in came to nothing: its leader must know.
            self.voter.reminded_s = now_s
            effects.append(self.told(self._context.view.leader))
        act_s = self._act_s
        if act_s is None or now_s < act_s:
            return effects
        if self.campaign.state is ElectionState.FOLLOWING:
            return effects + self.campaign.canvass(now_s)
        return effects + self.campaign.overdue(now_s)

    def told(self, node: NodeId) -> Effect:
        """Return what tells a node of the highest term that this one knows."""
        view = self._context.view
        if self.bound or self.leader_watch.vacant:
            return Send(node, LeaderIs(self.term, None))
        leader = view.by_id.get(view.leader)
        return Send(node, LeaderIs(view.term, view.leader, leader.address if leader else None))

    def superseded(self, now_s: float, term: int) -> bool:
        """A member knows a higher term. Returns whether this node led, and must stop."""
        self.campaign.hear_of(term)
        if not self._leads or term <= self._context.view.term:
            return False
        self.leader_watch.vacant = True
        self.campaign.stop(now_s)
        return True

    def abstain(self, now_s: float) -> None:
        """This node has asked to leave: from now on it has no vote, and does not stand."""
        self.abstains = True
        if self.campaign.trying:
            self.campaign.stop(now_s)

    def resign(self, now_s: float) -> None:
        """This node gives its leadership up: others may stand first."""
        self.leader_watch.vacant = True
        self.campaign.stop(now_s)
        self.campaign.from_s += 2 * self._timeout_s

    # --- canvassing ---------------------------------------------------------------------------

    def canvassed(self, now_s: float, sender: NodeId, message: Canvass) -> list[Effect]:
        """Somebody wants to know whether the leader answers this node."""
        view = self._context.view
        if sender not in view:
            return [self.told(sender)]
        if self.abstains:
            return []
        if place_in(message) < self.voter.place:
            return self.decisions.send(sender)
        if self._leads:
            return [Send(sender, self._context.heartbeat)]
        if self.bound or self.leader_watch.vacant or sender == view.leader:
            # Of a leader that was voted out nothing more is expected; its successor gets its time.
            silent = sender == view.leader or now_s - self.voter.bound_s > self._timeout_s / 2
            chosen = sender == self.voter.promise.candidate
            return [answer_to(sender, message, silent=silent or chosen)]
        self._give_way(now_s, sender)
        return self.check.ask(now_s, sender, message)

    def _give_way(self, now_s: float, sender: NodeId) -> None:
        """Let a data node that comes first try first, or the two would share the votes."""
        order = [m.node_id for m in self._context.view.data_nodes]
        me = self._context.node_id
        if me not in order or sender not in order or order.index(me) < order.index(sender):
            return
        if self.campaign.state is ElectionState.CANVASSING:
            self.campaign.stop(now_s)
        self.campaign.from_s = max(self.campaign.from_s, now_s + self._timeout_s)

    # --- standing -----------------------------------------------------------------------------

    def persisted(self, now_s: float, promise: Promise) -> list[Effect]:
        """A vote is on disk: send it, if it still is the last."""
        if not self.voter.persisted(promise) or promise.candidate is None:
            return []
        if promise.candidate != self._context.node_id:
            return [Send(promise.candidate, self.voter.vote)]
        return self.campaign.vote_kept(now_s)

    def stood(self, now_s: float, sender: NodeId, message: Candidacy) -> list[Effect]:
        """A member stands for leader."""
        if sender not in self._context.view or self._leads or self.abstains:
            # A leader that hears this lives; it is told when another has won.
            return []
        refusal = Send(sender, self.voter.refusal)
        if place_in(message) < self.voter.place:
            return [*self.decisions.send(sender), refusal]
        promise = Promise(message.term, sender)
        if promise == self.voter.promise and self.bound:
            return [Send(sender, self.voter.vote)] if self.voter.kept == promise else []
        if message.term <= self.term or not self.voter.remembers(message):
            return [refusal]
        return self._bind_to(now_s, promise)

    def _bind_to(self, now_s: float, promise: Promise) -> list[Effect]:
        """Vote for another."""
        if self.campaign.state is not ElectionState.FOLLOWING:
            self.campaign.stop(now_s)
        # The new leader gets its time to open an iteration.
        self.leader_watch.heard_s = now_s
        self.campaign.hear_of(promise.term)
        return self.voter.bind(now_s, promise)

    def confirm(self, now_s: float, sender: NodeId, message: Confirm) -> list[Effect]:
        """A candidate has a quorum of votes, and is to commit the iteration if another confirms
        it.
        """
        if sender not in self._context.view or self._leads or self.abstains:
            return []
        if place_in(message) < self.voter.place:
            return self.decisions.send(sender)
        promise, voter = Promise(message.term, sender), self.voter
        if message.term < self.term or not voter.remembers(message):
            return []
        if voter.confirm(message, promise):
            return [Send(sender, voter.vote)]
        return self._bind_to(now_s, promise) if message.term > self.term else []

    def catch_up(self, sender: NodeId, iteration: Iteration, *, view_term: int) -> list[Effect]:
        """A member asks for the decision that it may have missed; anybody may know it."""
        if (view_term, iteration) > self.voter.place[:2]:
            return []
        return self.decisions.send(sender)

    def leader_is(self, now_s: float, message: LeaderIs) -> tuple[bool, list[Effect]]:
        """A node knows of a higher term. Returns whether this node led, and must stop."""
        if message.term <= self._context.view.term:
            return False, []
        stopped = self.superseded(now_s, message.term)
        if message.leader is None or message.leader == self._context.node_id:
            return stopped, []
        return stopped, [Send(message.leader, self._context.catch_up)]
