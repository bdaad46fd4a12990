"""One data node's campaign: how it canvasses, stands, counts the votes, and comes to lead.

Who may begin one, and what members answer, is in `decod.protocol.leadership.election`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from random import Random

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.deadline import earliest
from decod.protocol.core.effects import Effect, Note, Send
from decod.protocol.core.era import Hashes
from decod.protocol.core.messages import Open
from decod.protocol.core.messages.election_messages import (
    Candidacy,
    Canvass,
    CanvassAnswer,
    Confirm,
    Vote,
)
from decod.protocol.core.node_identity import Promise
from decod.protocol.core.view import Role, View
from decod.protocol.leadership.ballot import Ballot, place_in
from decod.protocol.leadership.last_decisions import LastDecisions
from decod.protocol.leadership.leader_watch import LeaderWatch
from decod.protocol.leadership.quorum import electors_of, ids_of, is_quorum
from decod.protocol.leadership.voter import Voter

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
        self._context, self._rng = context, rng
        self._voter, self._leader_watch, self._decisions = voter, leader_watch, decisions
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

    def overdue(self, now_s: float) -> list[Effect]:
        """Conclude, ask again, or stop."""
        if self._complete_by_s is not None and self._complete_by_s <= now_s:
            return self._conclude(now_s)
        if self._by_s > now_s:
            return self._ask(now_s)
        self.stop(now_s)
        return []

    def stop(self, now_s: float) -> None:
        """Stop trying; after a random while another try may be made."""
        if self._ballot is not None:
            # Nobody but this node could have learnt that a quorum has confirmed its own commit.
            self._voter.confirmed_term = self._ballot.confirmed_before
        self.state, self._complete_by_s, self._ballot = ElectionState.FOLLOWING, None, None
        self.from_s = now_s + self._timeout_s * self._rng.uniform(0.125, 0.625)

    def _ask(self, now_s: float) -> list[Effect]:
        """Ask what this node wants to know now of all who have not said it."""
        self._ask_s = now_s + self._timeout_s / ASKS_PER_TIMEOUT
        question: Canvass | Candidacy | Confirm = Canvass(*self._voter.place)
        answered: Collection[NodeId] = self._silent
        if self.state is ElectionState.STANDING:
            if self._ballot is None:
                return []
            kind = Confirm if self._ballot.proposed else Candidacy
            question = kind(self._voter.promise.term, *self._voter.place)
            answered = self._ballot.answered
        others = (n for n in ids_of(self._context.view) if n != self._context.node_id)
        self.unanswered = tuple(node for node in others if node not in answered)
        return [Send(node, question) for node in self.unanswered]

    # --- canvassing ---------------------------------------------------------------------------

    @property
    def _electors(self) -> tuple[NodeId, ...]:
        opened = self._decisions.opened
        return electors_of(opened.opening) if opened else ids_of(self._context.view)

    def _chosen_by(self, nodes: set[NodeId]) -> bool:
        return is_quorum(nodes, self._electors) and is_quorum(nodes, ids_of(self._context.view))

    def canvass(self, now_s: float) -> list[Effect]:
        """Ask all members whether the leader answers them."""
        self.state = ElectionState.CANVASSING
        # Half of it is the leader's to answer the others; the rest is for the way.
        self._by_s = now_s + 0.75 * self._timeout_s
        self._silent = {self._context.node_id}
        fields = (("peer", self._context.view.leader), ("term", self._context.view.term))
        doubted = Note("leader.doubted", fields)
        return [doubted, *self._ask(now_s), *self._count_silent(now_s)]

    def answered(self, now_s: float, sender: NodeId, message: CanvassAnswer) -> list[Effect]:
        """A member has looked for the leader."""
        current = place_in(message) == self._voter.place
        if self.state is not ElectionState.CANVASSING or not current or not message.silent:
            return []
        self._silent.add(sender)
        return self._count_silent(now_s)

    def _count_silent(self, now_s: float) -> list[Effect]:
        return self.stand(now_s) if self._chosen_by(self._silent) else []

    # --- standing -----------------------------------------------------------------------------

    def stand(self, now_s: float) -> list[Effect]:
        """Take a new term, and vote for this node in it."""
        leads = self._context.view.leader == self._context.node_id
        assert self._leader_watch.vacant or not leads, "who leads does not stand"
        assert self._context.member.role is Role.DATA, "relays never stand"
        self.state = ElectionState.STANDING
        self._by_s, self._complete_by_s, self._ballot = now_s + self._timeout_s, None, None
        self._ask_s = self._by_s
        self.seen_term = max(self._voter.term, self.seen_term) + 1
        return self._voter.bind(now_s, Promise(self.seen_term, self._context.node_id))

    def vote_kept(self, now_s: float) -> list[Effect]:
        """This node's vote for itself is on disk: ask for the others'."""
        if self.state is not ElectionState.STANDING:
            return []
        promise, me = self._voter.promise, self._context.node_id
        members = {*ids_of(self._context.view), *self._electors}
        self._ballot = Ballot(me, self._voter.place, members, self._chosen_by)
        fields = (("term", promise.term), ("iteration", str(self._context.iteration)))
        effects: list[Effect] = [Note("leader.standing", fields), *self._ask(now_s)]
        return effects + self.voted(now_s, me, self._voter.vote)

    def voted(self, now_s: float, sender: NodeId, message: Vote) -> list[Effect]:
        """A member's answer to this node's candidacy, or to what it proposes."""
        self.hear_of(message.term)
        ballot, ours = self._ballot, message.term == self._voter.promise.term
        if ballot is None or not ours or not message.granted:
            return []
        if ballot.proposed:
            if message.confirmed_term == message.term and place_in(message) == self._voter.place:
                ballot.confirmed.add(sender)
            return self._win(now_s, ballot) if ballot.agreed else []
        ballot.votes[sender] = message
        if not ballot.elected:
            return []
        view = self._context.view
        missing = {*ids_of(view)} - ballot.votes.keys() - {view.leader}
        if not missing or not ballot.open:
            return self._conclude(now_s)
        if self._complete_by_s is None:
            self._complete_by_s = self._by_s = now_s + self._timeout_s / 2
        return []

    def _conclude(self, now_s: float) -> list[Effect]:
        """The votes are counted: lead the term, or have confirmed first what is to be committed."""
        ballot = self._ballot
        assert ballot is not None
        self._complete_by_s, ballot.proposed = None, ballot.hashes
        if not ballot.proposed:
            return self._win(now_s, ballot)
        self._voter.confirmed_term = self._voter.promise.term
        self._by_s = now_s + self._timeout_s
        return [*self._ask(now_s), *self.voted(now_s, self._context.node_id, self._voter.vote)]

    def _win(self, now_s: float, ballot: Ballot) -> list[Effect]:
        """This node leads the term."""
        view = self._context.view
        assert self._voter.promise.candidate == self._context.node_id, self._voter.promise
        assert self._voter.promise.term > view.term, (self._voter.promise.term, view.term)
        assert ballot.elected, "nobody leads without a quorum of votes"
        self.state, self._ballot = ElectionState.WON, None
        self._leader_watch.vacant, self._leader_watch.heard_s = False, now_s
        opened = self._decisions.opened
        assert opened is not None, "nobody is elected before the first iteration"
        self._succession = Succession(
            self._voter.promise.term, view.leader, opened, view, ballot.proposed
        )
        fields = (("term", self._voter.promise.term), ("num_votes", len(ballot.votes)))
        return [Note("leader.elected", fields)]

    def take(self) -> Succession | None:
        """Return what this node has won, once."""
        succession, self._succession = self._succession, None
        return succession
