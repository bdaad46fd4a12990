"""What a member has promised: its vote, once in a term, and whose commit it has confirmed.

A vote is on disk before it is sent. What a node has confirmed is not: who restarts has forgotten
its iteration too, and has no vote in what was decided about it.
"""

from collections.abc import Callable

from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, PersistVote
from decod.protocol.core.era import Hashes
from decod.protocol.core.messages import Mend, Open
from decod.protocol.core.messages.election_messages import Candidacy, Confirm, Vote
from decod.protocol.core.node_identity import Promise
from decod.protocol.core.view import View
from decod.protocol.leadership.ballot import Place, place_in


class Voter:
    """One member's votes.

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
        """When it last told the old leader so."""
        self._context = context
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
        term, confirmed = self.promise.term, self.confirmed_term
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
        self._asked, self.confirmed_term = None, 0

    def follow(self, view: View) -> list[Effect]:
        """The view's leader has opened an iteration."""
        self.moved()
        if view.term <= max(self.promise.term, 1):
            return []
        # Whoever follows a leader has as good as voted for it, and must not forget that either.
        self.promise = Promise(view.term, view.leader)
        return [PersistVote(view.term, view.leader)]

    def bind(self, now_s: float, promise: Promise) -> list[Effect]:
        assert promise.term > self.promise.term, (promise, self.promise)
        assert promise.candidate is not None
        self.promise = promise
        self.bound_s = self.reminded_s = now_s
        return [PersistVote(promise.term, promise.candidate)]

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
        self._asked, self.confirmed_term = None, message.term
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
