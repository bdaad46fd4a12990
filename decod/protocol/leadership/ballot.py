"""What a candidate is told in its term, and what it may decide from that.

A candidate asks twice. *Who votes for me, and how far are you?* From a quorum of answers it knows
what may have been decided about the iteration in hand, though whoever decided it is gone:

- If a voter has not cast its vote for the iteration, the old leader can't have committed it, and
  never will, for who has voted for another leader casts no vote for an iteration: it is repeated.
- If all voters have cast it, the old leader may have committed it: it is to be committed.
- If a voter has confirmed the commit of another candidate since, that one may have had a quorum
  for it, and so be a leader that has committed: the iteration is to be committed too. Unless so
  many voters have not confirmed it that no quorum can have.

What is to be committed is proposed first: *do you confirm it?* Only when a quorum has may the
candidate lead, and commit. For the votes are of one quorum, and the next candidate has another: in
that there may be somebody who has not cast its vote for the iteration, or has learnt meanwhile that
the old leader had aborted it, and so the next candidate would repeat what this one has committed.
As it is, two quorums have a member in common, which tells the next candidate what it has confirmed.
(The first question is phase 1 of Paxos, the second is phase 2; what the old leader does with the
vote of *all* members is a fast iteration. Lamport: Fast Paxos, 2006.)

One that has not cast its own vote for the iteration can't commit it, whoever has confirmed it: it
repeats it. That takes a leader and the one elected after it that are both lost, within one
iteration, before another data node that would know is back. Nodes that have taken the step then are
not in step with the others, and load their state.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from decod.ids import Iteration, NodeId
from decod.protocol.core.era import Hashes
from decod.protocol.core.messages.election_messages import (
    Candidacy,
    Canvass,
    CanvassAnswer,
    Confirm,
    Vote,
)

Place = tuple[int, Iteration, int]
"""How far a node has got: term of its view, iteration, version of its view."""


def place_in(message: Canvass | CanvassAnswer | Candidacy | Vote | Confirm) -> Place:
    """Return how far a message says that its sender has got."""
    return message.view_term, message.iteration, message.view_version


@dataclass(slots=True)
class Ballot:
    """One candidacy.

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
