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
  commits it, once a quorum has confirmed that (`Ballot` says why). (Members that do not answer are
  waited for a little. If such a one has not voted, it is no longer in step, and leaves.)
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

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from itertools import count
from random import Random

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context, Promise
from decod.protocol.core.era import Hashes
from decod.protocol.core.events import earliest
from decod.protocol.core.messages import Mend, Open, Ping
from decod.protocol.core.messages.decision_messages import (
    Candidacy,
    Canvass,
    CanvassAnswer,
    Confirm,
    LeaderIs,
    Vote,
)
from decod.protocol.core.view import Role, View
from decod.protocol.leadership.quorum import (
    Ballot,
    LastDecisions,
    Voter,
    electors_of,
    ids_of,
    is_quorum,
    place_in,
)
from decod.protocol.links.liveness import Accrual

BEATS_PER_TIMEOUT = 4
"""How often the leader shows its deputies that it lives, in `election_timeout_s`."""

_BEATS_LEAST = 20
"""Of fewer nobody can tell how regular they are."""

DEPUTIES_MAX = 8
"""Data nodes that the leader does this for. Further ones stand only if these do not."""


class LeaderWatch:
    """When the leader was last heard, and how long one member lets it be silent.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self.heard_s = 0.0
        """When the leader itself was last heard."""
        self.vacant = False
        """Nobody leads: this node did, and has given up its term."""
        self._num_heard = 0
        self._context = context
        timeout_s = context.run.protocol.election_timeout_s
        self._regular = Accrual(floor_s=timeout_s, interval_s=timeout_s / BEATS_PER_TIMEOUT)

    def heard(self, now_s: float) -> None:
        """The leader has sent something."""
        self._num_heard += 1
        if self._num_heard > 1:
            self._regular.ended(now_s - self.heard_s)
        self.heard_s = now_s

    @property
    def patient_until_s(self) -> float:
        """Until when the leader may be silent."""
        return self.heard_s if self.vacant else self.heard_s + self._patience_s

    @property
    def _patience_s(self) -> float:
        """How long the leader may be silent: in turn, so that one stands at a time."""
        context = self._context
        config = self._context.run.protocol
        rank = context.view.ranks[context.node_id]
        far_s = 0.0 if rank < DEPUTIES_MAX else config.heartbeat_timeout_s
        slack = self._regular.slack if self._num_heard > _BEATS_LEAST else 1.0
        return slack * config.election_timeout_s * (1 + rank / 4) + far_s


class LeaderCheck:
    """One member's questions to its leader.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self.by_s: float | None = None
        """Until when the leader may answer; None: it is not being asked."""
        self._context = context
        self._out = context.out
        self._nonces = count(1)
        self._nonce = 0
        self._askers: dict[NodeId, Canvass] = {}
        self._silent_until_s: float | None = None
        """The leader has not answered: until then it is not asked anew."""

    def reset(self) -> None:
        """Nobody wants to know any more, or there is something new to know."""
        self.by_s = self._silent_until_s = None
        self._askers.clear()

    def heard(self) -> None:
        """The leader lives."""
        self._silent_until_s = None

    def ask(self, now_s: float, sender: NodeId, question: Canvass) -> None:
        """Ask the leader; or answer at once what has just been found."""
        if self._silent_until_s is not None and now_s < self._silent_until_s:
            self._out.send(sender, answer_to(question, silent=True))
            return
        if self.by_s is None:
            self._nonce = next(self._nonces)
            self.by_s = now_s + self._patience_s
        self._askers[sender] = question
        self._out.send(self._context.view.leader, Ping(self._nonce))

    def answered(self, sender: NodeId, nonce: int) -> None:
        """A pong has come."""
        ours = sender == self._context.view.leader and nonce == self._nonce
        if ours:
            self._conclude(silent=False)

    def unreachable(self, now_s: float, node: NodeId) -> None:
        """A ping could not be delivered."""
        if node == self._context.view.leader:
            self.silent(now_s)

    def silent(self, now_s: float) -> None:
        """The leader does not answer."""
        self._conclude(silent=True)
        self._silent_until_s = now_s + self._patience_s

    @property
    def _patience_s(self) -> float:
        return self._context.run.protocol.election_timeout_s / 2

    def _conclude(self, *, silent: bool) -> None:
        """Tell all who have asked, once."""
        askers = dict(self._askers)
        self.reset()
        for node, question in askers.items():
            self._out.send(node, answer_to(question, silent=silent))


def answer_to(question: Canvass, *, silent: bool) -> CanvassAnswer:
    """Return what tells a data node whether the leader answers."""
    place = (question.view_term, question.iteration, question.view_version)
    return CanvassAnswer(*place, silent)


ASKS_PER_TIMEOUT = 8
"""How often a candidate repeats a question, in `election_timeout_s`."""


@dataclass(frozen=True, slots=True)
class Succession:
    """A won election."""

    term: int
    old: NodeId
    """Who led before; this node itself if its term was called in question and it won again."""
    last: Open
    """What has opened the newest iteration that any voter knew."""
    view: View
    """The newest in that iteration."""
    hashes: Hashes
    """Of the iteration's proposed parameters if it is to be committed; none if it is to be
    repeated."""
    resigned: bool = False
    """The old leader has handed over."""

    @property
    def told(self) -> tuple[str, str]:
        """What became of the old leader: an event of its, and why there is another."""
        if self.resigned:
            return "member.leaving", "the leader has handed over"
        return "member.lost", "lost the leader"


class ElectionState(Enum):
    FOLLOWING = "following"
    """Somebody leads, or another may stand."""
    CANVASSING = "canvassing"
    STANDING = "standing"
    WON = "won"
    """This node leads."""


class Campaign:
    """What one member does to lead the next term. `take` gives the outcome, once.

    Who may begin one, and what members answer, is in `Election`.

    Args:
        context: The node's.
        rng: For the length of waits.
        voter: The node's own votes.
        leader_watch: Is told when this node leads itself.
        decisions: The last ones that the node knows.
    """

    def __init__(
        self,
        context: Context,
        rng: Random,
        voter: Voter,
        leader_watch: LeaderWatch,
        decisions: LastDecisions,
    ) -> None:
        self.state = ElectionState.FOLLOWING
        self._context = context
        self._out = context.out
        self._rng = rng
        self._voter = voter
        self._leader_watch = leader_watch
        self._decisions = decisions
        self._timeout_s = context.run.protocol.election_timeout_s
        self.seen_term = voter.promise.term
        """The highest that anybody has spoken of."""
        self.from_s = 0.0
        """Not to canvass before."""
        self._by_s = 0.0
        """When canvassing or standing ends."""
        self._ask_s = 0.0
        """When to ask again whoever has not answered."""
        self._silent: set[NodeId] = set()
        """Who does not hear the leader."""
        self.unanswered: tuple[NodeId, ...] = ()
        """Who had not said yes when this node last asked."""
        self._ballot: Ballot | None = None
        """While this node stands and its own vote is on disk."""
        self._complete_by_s: float | None = None
        """Until when a candidate with a quorum waits for the other votes."""
        self._succession: Succession | None = None

    @property
    def trying(self) -> bool:
        """Whether this node canvasses or stands."""
        return self.state in (ElectionState.CANVASSING, ElectionState.STANDING)

    @property
    def deadline_s(self) -> float | None:
        return earliest(self._by_s, self._complete_by_s, self._ask_s) if self.trying else None

    def hear_of(self, term: int) -> None:
        """Somebody has spoken of a term."""
        self.seen_term = max(self.seen_term, term)

    def adopt(self, now_s: float, view: View) -> None:
        """The context has a new iteration, whose leader may be this node."""
        self.hear_of(view.term)
        leads = view.leader == self._context.node_id
        self.state = ElectionState.WON if leads else ElectionState.FOLLOWING
        self.from_s = now_s
        self._complete_by_s = self._succession = self._ballot = None
        self.unanswered = ()

    def overdue(self, now_s: float) -> None:
        """Conclude, ask again, or stop."""
        if self._complete_by_s is not None and self._complete_by_s <= now_s:
            self._conclude(now_s)
        elif self._by_s > now_s:
            self._ask(now_s)
        else:
            self.stop(now_s)

    def stop(self, now_s: float) -> None:
        """Stop trying; after a random while another try may be made."""
        if self._ballot is not None:
            # Nobody but this node could have learnt that a quorum has confirmed its own commit.
            self._voter.confirmed_term = self._ballot.confirmed_before
        self.state = ElectionState.FOLLOWING
        self._complete_by_s = None
        self._ballot = None
        self.from_s = now_s + self._timeout_s * self._rng.uniform(0.125, 0.625)

    def _ask(self, now_s: float) -> None:
        """Ask what this node wants to know now of all who have not said it."""
        self._ask_s = now_s + self._timeout_s / ASKS_PER_TIMEOUT
        question: Canvass | Candidacy | Confirm = Canvass(*self._voter.place)
        answered: Collection[NodeId] = self._silent
        if self.state is ElectionState.STANDING:
            if self._ballot is None:
                return
            kind = Confirm if self._ballot.proposed else Candidacy
            question = kind(self._voter.promise.term, *self._voter.place)
            answered = self._ballot.answered
        others = (n for n in ids_of(self._context.view) if n != self._context.node_id)
        self.unanswered = tuple(node for node in others if node not in answered)
        self._out.send_all(self.unanswered, question)

    # --- canvassing ---------------------------------------------------------------------------

    @property
    def _electors(self) -> tuple[NodeId, ...]:
        opened = self._decisions.opened
        return electors_of(opened.opening) if opened else ids_of(self._context.view)

    def _chosen_by(self, nodes: set[NodeId]) -> bool:
        return is_quorum(nodes, self._electors) and is_quorum(nodes, ids_of(self._context.view))

    def canvass(self, now_s: float) -> None:
        """Ask all members whether the leader answers them."""
        self.state = ElectionState.CANVASSING
        # Half of it is the leader's to answer the others; the rest is for the way.
        self._by_s = now_s + 0.75 * self._timeout_s
        self._silent = {self._context.node_id}
        view = self._context.view
        self._out.note("leader.doubted", peer=view.leader, term=view.term)
        self._ask(now_s)
        self._count_silent(now_s)

    def answered(self, now_s: float, sender: NodeId, message: CanvassAnswer) -> None:
        """A member has looked for the leader."""
        current = place_in(message) == self._voter.place
        if self.state is ElectionState.CANVASSING and current and message.silent:
            self._silent.add(sender)
            self._count_silent(now_s)

    def _count_silent(self, now_s: float) -> None:
        if self._chosen_by(self._silent):
            self.stand(now_s)

    # --- standing -----------------------------------------------------------------------------

    def stand(self, now_s: float) -> None:
        """Take a new term, and vote for this node in it."""
        leads = self._context.view.leader == self._context.node_id
        assert self._leader_watch.vacant or not leads, "who leads does not stand"
        assert self._context.member.role is Role.DATA, "relays never stand"
        self.state = ElectionState.STANDING
        self._by_s = now_s + self._timeout_s
        self._complete_by_s = None
        self._ballot = None
        self._ask_s = self._by_s
        self.seen_term = max(self._voter.term, self.seen_term) + 1
        self._voter.bind(now_s, Promise(self.seen_term, self._context.node_id))

    def vote_kept(self, now_s: float) -> None:
        """This node's vote for itself is on disk: ask for the others'."""
        if self.state is not ElectionState.STANDING:
            return
        promise = self._voter.promise
        me = self._context.node_id
        members = {*ids_of(self._context.view), *self._electors}
        self._ballot = Ballot(me, self._voter.place, members, self._chosen_by)
        self._out.note("leader.standing", term=promise.term, iteration=str(self._context.iteration))
        self._ask(now_s)
        self.voted(now_s, me, self._voter.vote)

    def voted(self, now_s: float, sender: NodeId, message: Vote) -> None:
        """A member's answer to this node's candidacy, or to what it proposes."""
        self.hear_of(message.term)
        ballot = self._ballot
        ours = message.term == self._voter.promise.term
        if ballot is None or not ours or not message.granted:
            return
        if ballot.proposed:
            if message.confirmed_term == message.term and place_in(message) == self._voter.place:
                ballot.confirmed.add(sender)
            if ballot.agreed:
                self._win(now_s, ballot)
            return
        ballot.votes[sender] = message
        if not ballot.elected:
            return
        view = self._context.view
        missing = {*ids_of(view)} - ballot.votes.keys() - {view.leader}
        if not missing or not ballot.open:
            self._conclude(now_s)
        elif self._complete_by_s is None:
            self._complete_by_s = self._by_s = now_s + self._timeout_s / 2

    def _conclude(self, now_s: float) -> None:
        """The votes are counted: lead the term, or have confirmed first what is to be committed."""
        ballot = self._ballot
        assert ballot is not None
        self._complete_by_s = None
        ballot.proposed = ballot.hashes
        if not ballot.proposed:
            self._win(now_s, ballot)
        else:
            self._voter.confirmed_term = self._voter.promise.term
            self._by_s = now_s + self._timeout_s
            self._ask(now_s)
            self.voted(now_s, self._context.node_id, self._voter.vote)

    def _win(self, now_s: float, ballot: Ballot) -> None:
        """This node leads the term."""
        view = self._context.view
        promise = self._voter.promise
        assert promise.candidate == self._context.node_id, promise
        assert promise.term > view.term, (promise.term, view.term)
        assert ballot.elected, "nobody leads without a quorum of votes"
        self.state = ElectionState.WON
        self._ballot = None
        self._leader_watch.vacant = False
        self._leader_watch.heard_s = now_s
        opened = self._decisions.opened
        assert opened is not None, "nobody is elected before the first iteration"
        self._succession = Succession(promise.term, view.leader, opened, view, ballot.proposed)
        self._out.note("leader.elected", term=promise.term, num_votes=len(ballot.votes))

    def take(self) -> Succession | None:
        """Return what this node has won, once."""
        succession = self._succession
        self._succession = None
        return succession


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
        self._out = context.out
        self._timeout_s = context.run.protocol.election_timeout_s
        self.voter = Voter(context, promise, hashes)
        self.check = LeaderCheck(context)
        self.leader_watch = watch = LeaderWatch(context)
        self.campaign = Campaign(context, rng, self.voter, watch, self.decisions)

    # --- what others may ask ------------------------------------------------------------------

    @property
    def electing(self) -> bool:
        """Whether nobody is known to lead."""
        return self.campaign.trying or self.voter.bound or self.leader_watch.vacant

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
        return self.voter.reminded_s + self._timeout_s if self.voter.bound else None

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

    def adopt(self, now_s: float, decision: Open) -> None:
        """The context has a new iteration."""
        self.decisions.adopt(decision)
        view = decision.opening.view
        self.leader_watch.vacant = False
        self.leader_watch.heard_s = now_s
        self.campaign.adopt(now_s, view)
        self.check.reset()
        self.voter.follow(view)

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
        if not (direct or announced) or self.voter.bound or self.leader_watch.vacant:
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

    def overdue(self, now_s: float) -> None:
        if self.check.by_s is not None and self.check.by_s <= now_s:
            self.check.silent(now_s)
        if self._remind_s is not None and self._remind_s <= now_s:
            # The election that this node has voted in came to nothing: its leader must know.
            self.voter.reminded_s = now_s
            self.tell(self._context.view.leader)
        act_s = self._act_s
        if act_s is None or now_s < act_s:
            return
        if self.campaign.state is ElectionState.FOLLOWING:
            self.campaign.canvass(now_s)
        else:
            self.campaign.overdue(now_s)

    def tell(self, node: NodeId) -> None:
        """Tell a node of the highest term that this one knows."""
        view = self._context.view
        if self.voter.bound or self.leader_watch.vacant:
            self._out.send(node, LeaderIs(self.voter.term, None))
        else:
            leader = view.by_id.get(view.leader)
            address = leader.address if leader else None
            self._out.send(node, LeaderIs(view.term, view.leader, address))

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

    def canvassed(self, now_s: float, sender: NodeId, message: Canvass) -> None:
        """Somebody wants to know whether the leader answers this node."""
        view = self._context.view
        if sender not in view:
            self.tell(sender)
        elif self.abstains:
            return
        elif place_in(message) < self.voter.place:
            self.decisions.send(sender, self._out)
        elif self._leads:
            self._out.send(sender, self._context.heartbeat)
        elif self.voter.bound or self.leader_watch.vacant or sender == view.leader:
            # Of a leader that was voted out nothing more is expected; its successor gets its time.
            silent = sender == view.leader or now_s - self.voter.bound_s > self._timeout_s / 2
            chosen = sender == self.voter.promise.candidate
            self._out.send(sender, answer_to(message, silent=silent or chosen))
        else:
            self._give_way(now_s, sender)
            self.check.ask(now_s, sender, message)

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

    def persisted(self, now_s: float, promise: Promise) -> None:
        """A vote is on disk: send it, if it still is the last."""
        if not self.voter.persisted(promise) or promise.candidate is None:
            return
        if promise.candidate == self._context.node_id:
            self.campaign.vote_kept(now_s)
        else:
            self._out.send(promise.candidate, self.voter.vote)

    def stood(self, now_s: float, sender: NodeId, message: Candidacy) -> None:
        """A member stands for leader."""
        if sender not in self._context.view or self._leads or self.abstains:
            # A leader that hears this lives; it is told when another has won.
            return
        promise = Promise(message.term, sender)
        if place_in(message) < self.voter.place:
            self.decisions.send(sender, self._out)
            self._out.send(sender, self.voter.refusal)
        elif promise == self.voter.promise and self.voter.bound:
            if self.voter.kept == promise:
                self._out.send(sender, self.voter.vote)
        elif message.term <= self.voter.term or not self.voter.remembers(message):
            self._out.send(sender, self.voter.refusal)
        else:
            self._bind_to(now_s, promise)

    def _bind_to(self, now_s: float, promise: Promise) -> None:
        """Vote for another."""
        if self.campaign.state is not ElectionState.FOLLOWING:
            self.campaign.stop(now_s)
        # The new leader gets its time to open an iteration.
        self.leader_watch.heard_s = now_s
        self.campaign.hear_of(promise.term)
        self.voter.bind(now_s, promise)

    def confirm(self, now_s: float, sender: NodeId, message: Confirm) -> None:
        """A candidate has a quorum of votes, and is to commit the iteration if another confirms
        it.
        """
        if sender not in self._context.view or self._leads or self.abstains:
            return
        promise = Promise(message.term, sender)
        voter = self.voter
        if place_in(message) < voter.place:
            self.decisions.send(sender, self._out)
        elif message.term < voter.term or not voter.remembers(message):
            return
        elif voter.confirm(message, promise):
            self._out.send(sender, voter.vote)
        elif message.term > voter.term:
            self._bind_to(now_s, promise)

    def catch_up(self, sender: NodeId, iteration: Iteration, *, view_term: int) -> None:
        """A member asks for the decision that it may have missed; anybody may know it."""
        if (view_term, iteration) <= self.voter.place[:2]:
            self.decisions.send(sender, self._out)

    def led_by(self, message: LeaderIs) -> None:
        """A node knows of a higher term: ask who leads it for what this node has missed."""
        others = message.leader not in (None, self._context.node_id)
        if message.leader is not None and others and message.term > self._context.view.term:
            self._out.send(message.leader, self._context.catch_up)
