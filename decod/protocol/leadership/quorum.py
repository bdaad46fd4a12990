"""Votes: whose consent a leader needs, what a member has promised, what a candidate may decide.

A *quorum* of some members is more than half of them, or half with the first among them (a view's
first member is its leader). Any two quorums of the same members have a member in common.

Views change without a vote on them, by many members at a time, so a quorum of one view and one of
the next need not meet. Therefore a view counts as *committed* once an iteration has been committed
in it: all its members have voted in that iteration, so all of them know the view. Until then the
last committed view goes on to count beside it:

- to be elected takes a quorum of the committed view and one of the candidate's own view;
- a leader opens no view that holds less than a quorum of the committed one. (Who has asked to leave
  has no vote from then on, and is not counted.)

So whoever is elected has asked somebody who knows the newest view that can still commit. There is
one exception: a leader beside whom there has been no other data node since the last committed view
may lose as many members as it likes, for nobody else could stand.
"""

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context, Promise
from decod.protocol.core.effects import Effect, EffectSink, PersistVote
from decod.protocol.core.era import Hashes
from decod.protocol.core.messages import Mend, Open
from decod.protocol.core.messages.decision_messages import (
    Candidacy,
    Canvass,
    CanvassAnswer,
    Confirm,
    Vote,
)
from decod.protocol.core.view import Opening, View


def is_quorum(nodes: Container[NodeId], members: Sequence[NodeId]) -> bool:
    """Whether `nodes` hold more than half of `members`, or half of them with the first."""
    num = sum(member in nodes for member in members)
    if 2 * num == len(members):
        return not members or members[0] in nodes
    return 2 * num > len(members)


def ids_of(view: View) -> tuple[NodeId, ...]:
    """Return the members of a view that have a vote, in its order: its leader first.

    Clients have none. They come and go, and a run must not wait for them.
    """
    return view.keepers


def electors_of(opening: Opening) -> tuple[NodeId, ...]:
    """Return the members of the last committed view, as an opening tells them."""
    return opening.electors or ids_of(opening.view)


class Quorum:
    """Which views a leader may open. Kept by the leader of a term.

    Args:
        leader: The node that leads.
        out: That node's.
    """

    def __init__(self, leader: NodeId, out: EffectSink[Effect]) -> None:
        self.electors: tuple[NodeId, ...] = ()
        """Members of the last committed view. The first view that is opened counts as committed."""
        self.lacking: tuple[NodeId, ...] = ()
        """Members that are gone, but without whom no quorum would be left."""
        self._leader = leader
        self._out = out
        self._rivals: set[NodeId] = set()
        """Other data nodes of the committed view, and of those opened since."""
        self._left: set[NodeId] = set()
        """Members that have asked to leave."""

    def committed(self, view: View, electors: Sequence[NodeId] | None = None) -> None:
        """An iteration has been committed in `view`; or, at a new leader, this is what it begins
        with.

        Args:
            view: The newest.
            electors: The members of the last committed view, if that is an earlier one.
        """
        members = ids_of(view) if electors is None else electors
        self._left &= {*members}
        self.electors = tuple(node for node in members if node not in self._left)
        self._rivals.clear()
        self._compete(view)

    def opened(self, view: View) -> None:
        """The leader announces a view."""
        self.electors = self.electors or ids_of(view)
        self.lacking = ()
        self._compete(view)

    def wait_for(self, gone: Sequence[NodeId], view: View) -> None:
        """Too many members of `view` are gone: by now somebody else could lead the others."""
        if not {*gone} <= {*self.lacking}:
            self.lacking = tuple(gone)
            self._out.note("quorum.lost", num_gone=len(gone), num_total=len(view.members))

    def returned(self, node: NodeId) -> bool:
        """A member lives. Returns whether it was one of those that are gone."""
        if node not in self.lacking:
            return False
        self.lacking = tuple(other for other in self.lacking if other != node)
        return True

    def dismiss(self, node: NodeId) -> None:
        """A member leaves: it gives no vote any more, so nobody needs one of it."""
        self._left.add(node)
        self._rivals.discard(node)
        self.electors = tuple(member for member in self.electors if member != node)

    def readmit(self, node: NodeId) -> None:
        """A node that may have left wants to join."""
        self._left.discard(node)

    def allows(self, view: Container[NodeId]) -> bool:
        """Whether the leader may open `view`: nobody else can be elected without its members."""
        return not self._rivals or is_quorum(view, self.electors)

    def chosen_by(self, nodes: Container[NodeId], view: View) -> bool:
        """Whether these nodes could elect another leader in this node's view."""
        return is_quorum(nodes, self.electors) and is_quorum(nodes, ids_of(view))

    def told_with(self, view: View) -> tuple[NodeId, ...]:
        """Return what an opening with `view` tells of the electors: nothing if they are its own."""
        return () if self.electors in ((), ids_of(view)) else self.electors

    def _compete(self, view: View) -> None:
        data_nodes = {member.node_id for member in view.data_nodes}
        self._rivals |= data_nodes - {self._leader} - self._left


Place = tuple[int, Iteration, int]
"""How far a node has got: term of its view, iteration, version of its view."""


def place_in(message: Canvass | CanvassAnswer | Candidacy | Vote | Confirm) -> Place:
    """Return how far a message says that its sender has got."""
    return message.view_term, message.iteration, message.view_version


@dataclass(slots=True)
class Ballot:
    """One candidacy.

    A candidate asks twice. *Who votes for me, and how far are you?* From a quorum of answers it
    knows what may have been decided about the iteration in hand, though whoever decided it is gone:

    - If a voter has not cast its vote for the iteration, the old leader can't have committed it,
      and never will, for who has voted for another leader casts no vote for an iteration: it is
      repeated.
    - If all voters have cast it, the old leader may have committed it: it is to be committed.
    - If a voter has confirmed the commit of another candidate since, that one may have had a quorum
      for it, and so be a leader that has committed: the iteration is to be committed too. Unless so
      many voters have not confirmed it that no quorum can have.

    What is to be committed is proposed first: *do you confirm it?* Only when a quorum has may the
    candidate lead, and commit. For the votes are of one quorum, and the next candidate has another:
    in that there may be somebody who has not cast its vote for the iteration, or has learnt
    meanwhile that the old leader had aborted it, and so the next candidate would repeat what this
    one has committed. As it is, two quorums have a member in common, which tells the next candidate
    what it has confirmed. (The first question is phase 1 of Paxos, the second is phase 2; what the
    old leader does with the vote of *all* members is a fast iteration. Lamport: Fast Paxos, 2006.)

    One that has not cast its own vote for the iteration can't commit it, whoever has confirmed it:
    it repeats it. That takes a leader and the one elected after it that are both lost, within one
    iteration, before another data node that would know is back. Nodes that have taken the step then
    are not in step with the others, and load their state.

    Args:
        me: The candidate.
        place: Where it stands.
        members: All whose votes could count.
        is_quorum: Whether some nodes are enough to choose a leader.
    """

    me: NodeId
    place: Place
    members: Collection[NodeId]
    is_quorum: Callable[[set[NodeId]], bool]
    votes: dict[NodeId, Vote] = field(default_factory=dict)
    confirmed: set[NodeId] = field(default_factory=set)
    """Who has confirmed what is proposed."""
    proposed: Hashes = ()
    """What is to be committed; none before the votes are counted, or if the iteration is
    repeated."""

    @property
    def answered(self) -> Collection[NodeId]:
        """Who has answered the question that is being asked."""
        return self.confirmed if self.proposed else self.votes

    @property
    def confirmed_before(self) -> int:
        """The term in which the candidate had confirmed another's commit, before it stood."""
        own = self.votes.get(self.me)
        return own.confirmed_term if own is not None else 0

    @property
    def elected(self) -> bool:
        """Whether a quorum has voted for the candidate."""
        return self.is_quorum({*self.votes})

    @property
    def agreed(self) -> bool:
        """Whether a quorum has confirmed what it proposes."""
        return self.is_quorum(self.confirmed)

    @property
    def open(self) -> bool:
        """Whether the votes that have not come yet may change what is decided."""
        return bool(self.hashes or self._confirmers)

    @property
    def hashes(self) -> Hashes:
        """What the iteration's parameters hash to if it is to be committed; none if it is not."""
        hashes: dict[int, str] = {}
        ready = {n for n, v in self.votes.items() if v.hashes and place_in(v) == self.place}
        for node in ready:
            for stage, parameter_hash in self.votes[node].hashes:
                if hashes.setdefault(stage, parameter_hash) != parameter_hash:
                    return ()
        needed = ready == self.votes.keys() or self._decided_before
        return tuple(sorted(hashes.items())) if needed and self.me in ready else ()

    @property
    def _confirmers(self) -> set[NodeId]:
        """Voters that have confirmed the iteration's commit by an earlier candidate."""
        iteration = self.place[1]
        return {
            node
            for node, vote in self.votes.items()
            if vote.confirmed_term
            and (vote.iteration.era, vote.iteration.number) == (iteration.era, iteration.number)
        }

    @property
    def _decided_before(self) -> bool:
        """Whether an earlier candidate may have had a quorum that confirmed the iteration's
        commit.
        """
        confirmers = self._confirmers
        silent = {node for node in self.members if node not in self.votes}
        return bool(confirmers) and self.is_quorum(silent | confirmers)


@dataclass(slots=True)
class LastDecisions:
    """What a member tells others who are behind it."""

    opened: Open | None = None
    """The decision that opened the context's iteration; None before the first."""
    mended: Mend | None = None
    """The newest loss that this iteration has survived."""

    def adopt(self, opened: Open) -> None:
        """An iteration has been opened."""
        self.opened = opened
        self.mended = None

    def send(self, to: NodeId, out: EffectSink[Effect]) -> None:
        """Bring another member to the same place."""
        for word in (self.opened, self.mended):
            if word is not None:
                out.send(to, word)


class Voter:
    """One member's votes.

    A vote is on disk before it is sent. What a node has confirmed is not: who restarts has
    forgotten its iteration too, and has no vote in what was decided about it.

    Args:
        context: The node's.
        promise: What the node has kept of an earlier life in this run.
        hashes: Returns those of the vote that this node's subtree has cast for the context's
        iteration;
            none if it has not, or against it.
    """

    def __init__(self, context: Context, promise: Promise, hashes: Callable[[], Hashes]) -> None:
        self.promise = promise
        self.kept = promise
        """The last vote that is on disk."""
        self.confirmed_term = 0
        """Of the candidate whose commit of the context's iteration this node has confirmed last."""
        self.bound_s = 0.0
        """When this node last voted."""
        self.reminded_s = 0.0
        """When this node last told the old leader so."""
        self._context = context
        self._out = context.out
        self._hashes = hashes
        self._forgotten_term = promise.term
        """What this node knew in an earlier life, in terms up to this, it has forgotten."""
        self._asked: Confirm | None = None
        """A commit that is to be confirmed when the vote for its candidate is on disk."""

    @property
    def term(self) -> int:
        """The highest term that this node is bound to."""
        return max(self.promise.term, self._context.view.term)

    @property
    def bound(self) -> bool:
        """Whether this node has voted for a leader that has not opened an iteration yet."""
        return self.promise.term > self._context.view.term

    @property
    def place(self) -> Place:
        """How far this node has got."""
        view = self._context.view
        return view.term, self._context.iteration, view.version

    @property
    def vote(self) -> Vote:
        """The vote that this node has promised."""
        term = self.promise.term
        confirmed = self.confirmed_term
        return Vote(term, True, *self.place, self._hashes(), confirmed)  # noqa: FBT003

    @property
    def refusal(self) -> Vote:
        """What another candidate is told."""
        return Vote(self.term, False, *self.place)  # noqa: FBT003

    def remembers(self, message: Candidacy | Confirm) -> bool:
        """Whether this node still knows what it knew in the term that a candidate comes from."""
        return message.view_term >= self._forgotten_term

    def moved(self) -> None:
        """The context has another iteration, or another view in it."""
        self._asked = None
        self.confirmed_term = 0

    def follow(self, view: View) -> None:
        """The view's leader has opened an iteration."""
        self.moved()
        if view.term > max(self.promise.term, 1):
            # Whoever follows a leader has as good as voted for it, and must not forget that either.
            self.promise = Promise(view.term, view.leader)
            self._out.put(PersistVote(view.term, view.leader))

    def bind(self, now_s: float, promise: Promise) -> None:
        assert promise.term > self.promise.term, (promise, self.promise)
        assert promise.candidate is not None
        self.promise = promise
        self.bound_s = self.reminded_s = now_s
        self._out.put(PersistVote(promise.term, promise.candidate))

    def persisted(self, promise: Promise) -> bool:
        """A vote is on disk. Returns whether it still is the last."""
        if promise.term > self.kept.term:
            self.kept = promise
        current = promise == self.promise and promise.candidate is not None and self.bound
        if current and self._asked is not None:
            self.confirm(self._asked, promise)
        return current

    def confirm(self, message: Confirm, promise: Promise) -> bool:
        """Confirm a commit, as soon as the vote for its candidate is on disk.

        Returns whether that is so now. The caller has this node vote for the candidate.
        """
        if place_in(message) != self.place:
            return False
        if self.kept != promise:
            self._asked = message
            return False
        self._asked = None
        self.confirmed_term = message.term
        return True

    def withstands(self, decision: Open | Mend) -> bool:
        """Whether a decision is of a lower term than the commit that this node has confirmed."""
        if not self.confirmed_term:
            return False
        if isinstance(decision, Open) and decision.committed:
            voted_in = (decision.view_term, decision.closed, decision.view_version)
            if voted_in == self.place:
                return False  # It is what was confirmed.
        view = decision.view if isinstance(decision, Mend) else decision.opening.view
        return view.term < self.confirmed_term
