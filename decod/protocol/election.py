"""Who leads: at most one node a term, and another when the leader is gone (invariant I4).

    FOLLOWING -> (leader silent) CANVASSING -> (a quorum finds so too) STANDING -> won
        ^------------(it is heard, or time is up)--------'------------'

Data nodes may stand; all members of the view, relays too, have a vote. So with two data nodes of
which one is dead there still is a majority, and a leader that is cut off from the others is in the
minority. Whose votes it takes is said in `protocol.electorate`.

**Canvassing** binds nobody. A data node that has not heard from the leader for a while asks all
members; each of them pings the leader itself before it answers. So a node that has lost only its
own link to the leader changes nothing, and a leader that is slow is not replaced as long as half
of the members get an answer. Who is ahead of the asker sends it the decision that it missed.

**Standing** takes a new term. A vote is given once in a term, kept on disk before it is sent, and
binds: until a round of that term or a higher one is opened, the voter casts no vote for a round,
without which nobody can commit one. With it comes how far the voter has got. From that the winner
knows what may have been decided:

- If any voter has not cast its vote for the newest round, nobody can have committed it: the winner
  repeats it as the next attempt.
- If all have, the dead leader may have committed it, and told nobody who is left: the winner
  commits it. (Members that do not answer are waited for a little. If such a one has not voted, it
  is no longer in step, and leaves.)
- What any voter knows to be committed or aborted is so, because a candidate that is behind a voter
  is not voted for; it is brought up to date, and asks again.

A node that restarts has forgotten what it knew. It still knows its last term, and votes for nobody
whose view is of an earlier one.

What can't be settled is what only nodes knew that are gone: that the leader has aborted a round
which all but a silent member have voted for, so the winner commits it; or that a winner, before it
was lost in turn, has committed one which a member that was silent then has not voted for, so the
next one repeats it. If such a node comes back it is not in step with the others, and loads their
state. So the members of a view never differ.

Every wait is random in length after a first failure, so two candidates do not meet for ever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from random import Random

from decod.ids import NodeId, Round
from decod.protocol.context import Context
from decod.protocol.deadline import earliest
from decod.protocol.effects import Effect, Note, PersistVote, Send
from decod.protocol.electorate import electors_of, ids_of, is_quorum
from decod.protocol.era import Hashes
from decod.protocol.messages import (
    Abort,
    Candidacy,
    Canvass,
    CanvassAnswer,
    CatchUp,
    Commit,
    Heartbeat,
    LeaderIs,
    Mend,
    Ping,
    Vote,
)
from decod.protocol.view import Opening, Role, View

BEATS_PER_TIMEOUT = 4
"""How often the leader shows its deputies that it lives, in `election_timeout_s`."""

DEPUTIES_MAX = 8
"""Data nodes that the leader does this for. Further ones stand only if these do not."""

Place = tuple[int, Round, int]
"""How far a node has got: term of its view, round, version of its view."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The last vote of a node. It outlives the process."""

    term: int = 0
    candidate: NodeId | None = None


NO_PROMISE = Promise()


@dataclass(frozen=True, slots=True)
class Succession:
    """A won election."""

    term: int
    old: NodeId
    """Who led before; this node itself if its term was called in question and it won again."""
    opening: Opening
    """Of the newest round that any voter knew."""
    view: View
    """The newest in that round."""
    hashes: Hashes
    """Of the round's proposed parameters if it is to be committed; none if it is to be repeated."""
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


class _Check:
    """Asks the leader whether it lives, on behalf of those who want to know."""

    def __init__(self, context: Context) -> None:
        self.by_s: float | None = None
        """Until when the leader may answer; None: it is not being asked."""
        self._context = context
        self._nonces = count(1)
        self._nonce = 0
        self._askers: dict[NodeId, Canvass] = {}

    def reset(self) -> None:
        """Nobody wants to know any more."""
        self.by_s = None
        self._askers.clear()

    def ask(self, now_s: float, sender: NodeId, question: Canvass) -> list[Effect]:
        if self.by_s is None:
            self._nonce = next(self._nonces)
            self.by_s = now_s + self._context.config.election_timeout_s / 2
        self._askers[sender] = question
        return [Send(self._context.view.leader, Ping(self._nonce))]

    def answered(self, sender: NodeId, nonce: int) -> list[Effect]:
        """A pong has come."""
        ours = sender == self._context.view.leader and nonce == self._nonce
        return self.conclude(silent=False) if ours else []

    def unreachable(self, node: NodeId) -> list[Effect]:
        """A ping could not be delivered."""
        return self.conclude(silent=True) if node == self._context.view.leader else []

    def conclude(self, *, silent: bool) -> list[Effect]:
        """Tell all who have asked, once."""
        askers = dict(self._askers)
        self.reset()
        return [_answer(node, question, silent=silent) for node, question in askers.items()]


class Election:
    """One member's part in elections.

    Inputs: `adopt` (an opening), `heard`, `doubt`, `canvassed` and the other messages, `persisted`,
    `overdue`. Effects: `Send`, `PersistVote`, `Note`. `take` gives the outcome, once.

    Args:
        context: The node's.
        rng: For the length of waits.
        promise: What the node has kept of an earlier life in this run.
        hashes: Returns those of the vote that this node's subtree has cast for the context's round;
            none if it has not, or against it.
    """

    def __init__(
        self, context: Context, rng: Random, promise: Promise, hashes: Callable[[], Hashes]
    ) -> None:
        self.promise = promise
        self.state = ElectionState.FOLLOWING
        self.last: Commit | Abort | None = None
        """The decision that opened the context's round."""
        self._mend: Mend | None = None
        """The newest loss that this round has survived."""
        self.abstains = False
        """This node has asked to leave: from then on it has no vote."""
        self._context = context
        self._rng = rng
        self._hashes = hashes
        self._kept = promise
        """The last vote that is on disk."""
        self._forgotten_term = promise.term
        """What this node knew in an earlier life, in terms up to this, it has forgotten."""
        self._seen_term = promise.term
        """The highest that anybody has spoken of."""
        self._vacant = False
        """This node led, and has given up its term."""
        self._heard_s = 0.0
        """When the leader itself was last heard."""
        self._bound_s = 0.0
        """When this node last voted."""
        self._reminded_s = 0.0
        """When it last told the old leader so."""
        self._from_s = 0.0
        """Not to canvass before."""
        self._by_s = 0.0
        """When canvassing or standing ends."""
        self._silent: set[NodeId] = set()
        self._votes: dict[NodeId, Vote] = {}
        self._complete_by_s: float | None = None
        """Until when a candidate with a quorum waits for the other votes."""
        self._succession: Succession | None = None
        self.check = _Check(context)

    # --- what others may ask ------------------------------------------------------------------

    @property
    def term(self) -> int:
        """The highest term that this node is bound to."""
        return max(self.promise.term, self._context.view.term)

    @property
    def bound(self) -> bool:
        """Whether this node has voted for a leader that has not opened a round yet."""
        return self.promise.term > self._context.view.term

    @property
    def electing(self) -> bool:
        """Whether nobody is known to lead."""
        running = self.state in (ElectionState.CANVASSING, ElectionState.STANDING)
        return running or self.bound or self._vacant

    @property
    def deadline_s(self) -> float | None:
        if self._context.node_id not in self._context.view:
            return None
        return earliest(self.check.by_s, self._remind_s, self._act_s)

    @property
    def _act_s(self) -> float | None:
        match self.state:
            case ElectionState.WON:
                return None
            case ElectionState.FOLLOWING if not self.may_stand:
                return None
            case ElectionState.FOLLOWING:
                return max(self._heard_s + self._patience_s, self._from_s)
        return earliest(self._by_s, self._complete_by_s)

    @property
    def _remind_s(self) -> float | None:
        return self._reminded_s + self._timeout_s if self.bound else None

    @property
    def _timeout_s(self) -> float:
        return self._context.config.election_timeout_s

    @property
    def _leads(self) -> bool:
        return self._context.view.leader == self._context.node_id and not self._vacant

    @property
    def may_stand(self) -> bool:
        member = self._context.view.by_id.get(self._context.node_id)
        return (
            member is not None and member.role is Role.DATA and not (self._leads or self.abstains)
        )

    @property
    def _patience_s(self) -> float:
        """How long this node lets the leader be silent; in turn, so that one stands at a time."""
        if self._vacant:
            return 0.0
        view, config = self._context.view, self._context.config
        others = [m.node_id for m in view.data_nodes if m.node_id != view.leader]
        rank = others.index(self._context.node_id)
        far_s = 0.0 if rank < DEPUTIES_MAX else config.heartbeat_timeout_s
        return self._timeout_s * (1 + rank / 4) + far_s

    @property
    def _place(self) -> Place:
        view = self._context.view
        return view.term, self._context.round, view.version

    @property
    def _words(self) -> tuple[Commit | Abort | Mend, ...]:
        """What has brought this node to its place, for those who are behind."""
        return tuple(word for word in (self.last, self._mend) if word is not None)

    # --- what happens -------------------------------------------------------------------------

    def adopt(self, now_s: float, decision: Commit | Abort) -> list[Effect]:
        """The context has a new round."""
        self.last, self._mend, view = decision, None, decision.opening.view
        self._seen_term = max(self._seen_term, view.term)
        leads = view.leader == self._context.node_id
        self.state = ElectionState.WON if leads else ElectionState.FOLLOWING
        self._vacant, self._complete_by_s, self._succession = False, None, None
        self._heard_s = self._from_s = now_s
        self.check.reset()
        if view.term <= max(self.promise.term, 1):
            return []
        # Whoever follows a leader has as good as voted for it, and must not forget that either.
        self.promise = Promise(view.term, view.leader)
        return [PersistVote(view.term, view.leader)]

    def mended(self, now_s: float, mend: Mend) -> None:
        """The context has a new view in the same round: the leader lives."""
        self._mend = mend
        self._heard_s = now_s
        self.check.reset()
        if self.state in (ElectionState.CANVASSING, ElectionState.STANDING):
            self._follow(now_s)

    def heard(self, now_s: float, sender: NodeId, *, announced: bool = False) -> None:
        """The leader lives: it has sent something, or (`announced`) had it passed on."""
        direct = sender == self._context.view.leader
        if not (direct or announced) or self.bound or self._vacant:
            return
        if direct or self.state is ElectionState.FOLLOWING:
            self._heard_s = now_s
        if direct and self.state is ElectionState.CANVASSING:
            self._follow(now_s)

    def doubt(self, now_s: float) -> None:
        """The leader can't be reached from here: ask the others now rather than later."""
        if self.state is ElectionState.FOLLOWING:
            self._heard_s = min(self._heard_s, now_s - self._timeout_s)

    def overdue(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.check.by_s is not None and self.check.by_s <= now_s:
            effects += self.check.conclude(silent=True)
        if self._remind_s is not None and self._remind_s <= now_s:
            effects += self._remind(now_s)
        act_s = self._act_s
        if act_s is None or now_s < act_s:
            return effects
        match self.state:
            case ElectionState.FOLLOWING:
                return effects + self._canvass(now_s)
            case ElectionState.STANDING if self._complete_by_s is not None:
                return effects + self._conclude(now_s)
        self._follow(now_s)
        return effects

    def _follow(self, now_s: float) -> None:
        """Stop trying; after a random while another try may be made."""
        self.state, self._complete_by_s = ElectionState.FOLLOWING, None
        self._from_s = now_s + self._timeout_s * self._rng.uniform(0.125, 0.625)

    def _remind(self, now_s: float) -> list[Effect]:
        """The election that this node has voted in came to nothing: its leader must know."""
        self._reminded_s = now_s
        return [self.told(self._context.view.leader)]

    def told(self, node: NodeId) -> Effect:
        """Tell a node of the highest term that this one knows."""
        view = self._context.view
        if self.bound or self._vacant:
            return Send(node, LeaderIs(self.term, None))
        leader = view.by_id.get(view.leader)
        return Send(node, LeaderIs(view.term, view.leader, leader.address if leader else None))

    def superseded(self, now_s: float, term: int) -> bool:
        """A member knows a higher term. Returns whether this node led, and must stop."""
        self._seen_term = max(self._seen_term, term)
        if not self._leads or term <= self._context.view.term:
            return False
        self._vacant = True
        self._follow(now_s)
        return True

    def resign(self, now_s: float) -> None:
        """This node gives its office up: others may stand first."""
        self._vacant = True
        self._follow(now_s)
        self._from_s += 2 * self._timeout_s

    # --- canvassing ---------------------------------------------------------------------------

    def _others(self) -> list[NodeId]:
        return [n for n in ids_of(self._context.view) if n != self._context.node_id]

    def _chosen_by(self, nodes: set[NodeId]) -> bool:
        view = self._context.view
        electors = ids_of(view) if self.last is None else electors_of(self.last.opening)
        return is_quorum(nodes, electors) and is_quorum(nodes, ids_of(view))

    def _canvass(self, now_s: float) -> list[Effect]:
        self.state = ElectionState.CANVASSING
        # Half of it is the leader's to answer the others; the rest is for the way.
        self._by_s = now_s + 0.75 * self._timeout_s
        self._silent = {self._context.node_id}
        fields = (("peer", self._context.view.leader), ("term", self._context.view.term))
        question = Canvass(*self._place)
        effects: list[Effect] = [Note("leader.doubted", fields)]
        effects += [Send(node, question) for node in self._others()]
        return effects + self._count_silent(now_s)

    def canvassed(self, now_s: float, sender: NodeId, message: Canvass) -> list[Effect]:
        """Somebody wants to know whether the leader answers this node."""
        view = self._context.view
        if sender not in view:
            return [self.told(sender)]
        if self.abstains:
            return []
        if _place_in(message) < self._place:
            return [Send(sender, word) for word in self._words]
        if self._leads:
            return [Send(sender, Heartbeat(self._context.round))]
        if self.bound or self._vacant or sender == view.leader:
            # Of a leader that was voted out nothing more is expected; its successor gets its time.
            silent = sender == view.leader or now_s - self._bound_s > self._timeout_s / 2
            return [_answer(sender, message, silent=silent or sender == self.promise.candidate)]
        self._give_way(now_s, sender)
        return self.check.ask(now_s, sender, message)

    def _give_way(self, now_s: float, sender: NodeId) -> None:
        """Let a data node that comes first try first, or the two would share the votes."""
        order = [m.node_id for m in self._context.view.data_nodes]
        me = self._context.node_id
        if me not in order or sender not in order or order.index(me) < order.index(sender):
            return
        if self.state is ElectionState.CANVASSING:
            self._follow(now_s)
        self._from_s = max(self._from_s, now_s + self._timeout_s)

    def canvass_answered(
        self, now_s: float, sender: NodeId, message: CanvassAnswer
    ) -> list[Effect]:
        """A member has looked for the leader."""
        current = _place_in(message) == self._place
        if self.state is not ElectionState.CANVASSING or not current or not message.silent:
            return []
        self._silent.add(sender)
        return self._count_silent(now_s)

    def _count_silent(self, now_s: float) -> list[Effect]:
        return self.stand(now_s) if self._chosen_by(self._silent) else []

    # --- standing -----------------------------------------------------------------------------

    def stand(self, now_s: float) -> list[Effect]:
        self.state = ElectionState.STANDING
        self._by_s, self._complete_by_s = now_s + self._timeout_s, None
        self._votes = {}
        return self._bind(
            now_s, Promise(max(self.term, self._seen_term) + 1, self._context.node_id)
        )

    def _bind(self, now_s: float, promise: Promise) -> list[Effect]:
        assert promise.term > self.promise.term, (promise, self.promise)
        assert promise.candidate is not None
        self.promise = promise
        self._seen_term = max(self._seen_term, promise.term)
        self._bound_s = self._reminded_s = now_s
        return [PersistVote(promise.term, promise.candidate)]

    def persisted(self, now_s: float, promise: Promise) -> list[Effect]:
        """A vote is on disk: send it, if it still is the last."""
        if promise.term > self._kept.term:
            self._kept = promise
        if promise != self.promise or promise.candidate is None or not self.bound:
            return []
        me = self._context.node_id
        if promise.candidate != me:
            return [Send(promise.candidate, self._vote())]
        if self.state is not ElectionState.STANDING:
            return []
        note = Note("leader.standing", (("term", promise.term), ("round", str(self._place[1]))))
        candidacy = Candidacy(promise.term, *self._place)
        effects: list[Effect] = [note, *(Send(node, candidacy) for node in self._others())]
        return effects + self.voted(now_s, me, self._vote())

    def _vote(self) -> Vote:
        return Vote(self.promise.term, True, *self._place, self._hashes())  # noqa: FBT003

    def stood(self, now_s: float, sender: NodeId, message: Candidacy) -> list[Effect]:
        """A member stands for leader."""
        if sender not in self._context.view or self._leads or self.abstains:
            # A leader that hears this lives; it is told when another has won.
            return []
        refusal = Send(sender, Vote(self.term, False, *self._place))  # noqa: FBT003
        if _place_in(message) < self._place:
            return [*(Send(sender, word) for word in self._words), refusal]
        promise = Promise(message.term, sender)
        if promise == self.promise and self.bound:
            return [Send(sender, self._vote())] if self._kept == promise else []
        if message.term <= self.term or message.view_term < self._forgotten_term:
            return [refusal]
        if self.state is not ElectionState.FOLLOWING:
            self._follow(now_s)
        # The new leader gets its time to open a round.
        self._heard_s = now_s
        return self._bind(now_s, promise)

    def voted(self, now_s: float, sender: NodeId, message: Vote) -> list[Effect]:
        """A member's answer to this node's candidacy."""
        self._seen_term = max(self._seen_term, message.term)
        ours = self.state is ElectionState.STANDING and message.term == self.promise.term
        if not ours or not message.granted:
            return []
        self._votes[sender] = message
        if not self._chosen_by({*self._votes}):
            return []
        view = self._context.view
        missing = {*ids_of(view)} - self._votes.keys() - {view.leader}
        if not missing or not self._hashes_agreed():
            return self._conclude(now_s)
        if self._complete_by_s is None:
            self._complete_by_s = self._by_s = now_s + self._timeout_s / 2
        return []

    def _hashes_agreed(self) -> Hashes:
        """Return the hashes of all stages if all who voted are ready to commit the round."""
        hashes: dict[int, str] = {}
        for vote in self._votes.values():
            if _place_in(vote) != self._place or not vote.hashes:
                return ()
            for stage, parameter_hash in vote.hashes:
                if hashes.setdefault(stage, parameter_hash) != parameter_hash:
                    return ()
        return tuple(sorted(hashes.items()))

    def _conclude(self, now_s: float) -> list[Effect]:
        """This node leads the term."""
        view = self._context.view
        self.state, self._complete_by_s, self._vacant = ElectionState.WON, None, False
        self._heard_s = now_s
        assert self.last is not None, "nobody is elected before the first round"
        self._succession = Succession(
            self.promise.term, view.leader, self.last.opening, view, self._hashes_agreed()
        )
        fields = (("term", self.promise.term), ("num_votes", len(self._votes)))
        return [Note("leader.elected", fields)]

    def take(self) -> Succession | None:
        """Return what this node has won, once."""
        succession, self._succession = self._succession, None
        return succession

    # --- those who are behind -----------------------------------------------------------------

    def catch_up(self, sender: NodeId, round_: Round, *, view_term: int) -> list[Effect]:
        """A member asks for the decision that it may have missed; anybody may know it."""
        if (view_term, round_) > self._place[:2]:
            return []
        return [Send(sender, word) for word in self._words]

    def leader_is(self, now_s: float, message: LeaderIs) -> tuple[bool, list[Effect]]:
        """A node knows of a higher term. Returns whether this node led, and must stop."""
        if message.term <= self._context.view.term:
            return False, []
        stopped = self.superseded(now_s, message.term)
        if message.leader is None or message.leader == self._context.node_id:
            return stopped, []
        return stopped, [Send(message.leader, CatchUp(self._context.round))]


def _answer(to: NodeId, question: Canvass, *, silent: bool) -> Effect:
    return Send(to, CanvassAnswer(*_place_in(question), silent))


def _place_in(message: Canvass | CanvassAnswer | Candidacy | Vote) -> Place:
    return message.view_term, message.round, message.view_version
