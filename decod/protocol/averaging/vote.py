"""What all stages agree on before a step: the norm of the gradient, and the vote (I3).

All members of a stage come to the same parameters, or nobody steps. Each member says which
parameters it would have after the step, by their hash. The votes go up the tree: those of a stage
meet at its first member, and those of all stages at the leader. The norm takes the same way first
if gradients are clipped.

If members of a stage differ, its first member tells those who differ from most of it (at a tie,
from the earliest in the roster). The iteration is repeated, and they fetch the state anew that all
started from: one of its bits was another one there.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median_high

from decod.ids import AveragingId, NodeId
from decod.planner.partition import SHARE_FULL
from decod.protocol.averaging.averager import Weight
from decod.protocol.core.context import Context
from decod.protocol.core.fingerprints import add_digests
from decod.protocol.core.messages import GradientNorm, GradientSquares
from decod.protocol.core.messages.averaging_messages import Differs, Ready, StageAverages
from decod.protocol.core.view import TreePlace

_SQUARES_MAX = 1e300
"""Sums end here, so that they are finite. A gradient that long is scaled to nothing anyway."""


class Clipping:
    """One node's part in finding the norm, for one iteration and view.

    A member squares the part that it averages, and sends the sum of the squares along with the
    average. The first member of the stage adds up the parts. It sends the stage's sum up the tree,
    with the sums that have come from below. The root adds up all stages and sends the norm down to
    everybody:

        parts' sums -> stages' sums -> (up, first members only) -> norm -> (down) -> step

    Each sum is computed once, by one node and in one order, so all members scale by the same
    number. Followers get the norm with the averages. A run that does not clip says none of this:
    its norm counts as known from the start.

    Args:
        context: The node's.
        roster: Of its stage.
        place: Its place in the tree.
    """

    def __init__(self, context: Context, roster: Sequence[NodeId], place: TreePlace) -> None:
        self.norm: float | None = None if context.run.clips else 0.0
        """None: not known yet. 0 where nothing is clipped."""
        self._context = context
        self._out = context.out
        self._place = place
        self._is_first = roster[0] == context.node_id
        self._below = {child for child in place.children if child not in roster}
        """First members of other stages whose sums come by this node."""
        self._sums: dict[int, float] = {}
        """Sums of the squares of whole stages' averages, by stage index."""

    @property
    def awaited(self) -> set[NodeId]:
        """From whom something is to come before the step can be taken."""
        if self.norm is not None:
            return set()
        parent = self._place.parent
        return set(self._below) or ({parent} if parent is not None else set())

    def add_parts(self, square_sums: Mapping[int, float]) -> None:
        """This stage's average is there. The sums of the squares of its parts are known."""
        if self.norm is not None or not self._is_first:
            return
        self._sums[self._context.member.stage_index] = _sum(square_sums)
        self._pass_on()

    def add_stages(self, sender: NodeId, message: GradientSquares) -> None:
        """The sums of some stages have come up the tree."""
        if self.norm is not None or sender not in self._below:
            return
        self._below.remove(sender)
        self._sums.update(message.square_sums)
        self._pass_on()

    def _pass_on(self) -> None:
        """Say what all stages below sum to, this one too, once that is known."""
        if self._below or self._context.member.stage_index not in self._sums:
            return
        context = self._context
        parent = self._place.parent
        if parent is not None:
            sums = tuple(sorted(self._sums.items()))
            self._out.send(parent, GradientSquares(context.averaging, sums))
        else:
            norm = math.sqrt(_sum(self._sums))
            self._out.send(context.node_id, GradientNorm(context.averaging, norm))

    def found(self, message: GradientNorm) -> None:
        """The norm has come down the tree: pass it on, once."""
        if self.norm is None:
            self.norm = message.gradient_norm
            self._out.send_all(self._place.children, message)


def _sum(numbers: Mapping[int, float]) -> float:
    # Not `sum`, which rounds otherwise in some releases of Python; and always in the same
    # order.
    total = 0.0
    for _, number in sorted(numbers.items()):
        total += number
    return min(total, _SQUARES_MAX)


_SLOW_RATIO = 2.0
"""A member that sends so many times as slowly as others gets a smaller share."""


class StepVote:
    """One member's part in the vote on one step.

    Args:
        context: The node's.
        averaging_id: Names the average from which the step is taken.
        roster: The stage's members.
        place: This node's, in the tree.
    """

    def __init__(
        self,
        context: Context,
        averaging_id: AveragingId,
        roster: Sequence[NodeId],
        place: TreePlace,
    ) -> None:
        self._context = context
        self._out = context.out
        self._id = averaging_id
        self._roster = tuple(roster)
        self._index = tuple(roster).index(context.node_id)
        self._parent = place.parent
        self._children = place.children
        self._votes: dict[NodeId, Ready] = {}
        self.own: Ready | None = None
        """This node's own vote."""
        self.cast = False
        """Whether the vote of this node's subtree has been sent."""

    @property
    def result(self) -> Ready | None:
        """The subtree's vote, once it is cast. At the leader: the run's."""
        return self._combined() if self.cast else None

    @property
    def proposal(self) -> str:
        """The hash of this node's parameters after the step; empty if it has proposed nothing."""
        hashes = self.own.hashes if self.own is not None else ()
        return next((parameter_hash for _, parameter_hash in hashes), "")

    @property
    def awaited(self) -> set[NodeId]:
        """From whom votes, or the decision, are to come."""
        above = () if self._parent is None else (self._parent,)
        return {*above, *self._children} - self._votes.keys()

    def propose(
        self,
        parameter_hash: str,
        folded: Weight | None = None,
        averages: StageAverages | None = None,
        bytes_per_s: float | None = None,
        travelled: int | None = None,
    ) -> None:
        """Vote for the step.

        Args:
            parameter_hash: Of the parameters after it.
            folded: What this node has trained on in the iteration. None: the average shows it.
            averages: From which the step comes. None: they don't count.
            bytes_per_s: How fast this node sends. None: it is not known.
            travelled: Which average is here for the next outer step. 0: none. None: none can be.
        """
        stage = self._context.member.stage_index
        shares = () if folded is None else ((stage, folded.num, folded.digest),)
        told = () if averages is None else (averages,)
        hashes = ((stage, parameter_hash),)
        rates = () if bytes_per_s is None else ((self._context.node_id, bytes_per_s),)
        here = () if travelled is None else ((stage, travelled),)
        self.own = Ready(
            self._id, hashes, averages=told, folded=shares, rates=rates, travelled=here
        )
        self._cast()

    def oppose(self, reason: str) -> None:
        """Vote against the step: it can't be taken here. A later vote changes nothing."""
        if self.own is None:
            self.own = Ready(self._id, (), reason[:200] or "failed")
            self._cast()

    def received(self, sender: NodeId, message: Ready) -> None:
        """A child's subtree is ready, or has failed."""
        if sender in self._children:
            self._votes[sender] = message
        self._cast()

    def _cast(self) -> None:
        """Vote for the subtree when all of it has; against it as soon as one does."""
        if self.cast:
            return
        vote = self._combined()
        complete = self.own is not None and len(self._votes) == len(self._children)
        if not complete and not vote.failure:
            return
        self.cast = True
        if self._index == 0:
            self._tell_odd()
        if self._parent is not None:
            self._out.send(self._parent, vote)

    def _tell_odd(self) -> None:
        """Tell the members that came to another result than most of the stage."""
        found = self._stage_votes()
        odd = odd_ones(self._roster, found)
        if not odd or len(found) < len(self._roster):
            return
        stage = self._context.member.stage_index
        for node in odd:
            self._out.note("member.differs", peer=node, stage=stage)
        self._out.send_all(odd, Differs(self._context.opening.anchor.number, odd))

    def _stage_votes(self) -> dict[NodeId, str]:
        """Return what each member of this node's stage in its subtree proposes."""
        stage = self._context.member.stage_index
        found = dict[NodeId, str]()
        if self.own is not None:
            found.update((self._context.node_id, own) for _, own in self.own.hashes)
        for child, vote in self._votes.items():
            if child in self._roster:
                common = dict(vote.hashes).get(stage)
                named = dict(vote.votes)
                for node in self._subtree(child):
                    parameter_hash = named.get(node, common)
                    if parameter_hash is not None:
                        found[node] = parameter_hash
        return found

    def _subtree(self, node: NodeId) -> list[NodeId]:
        """Return a member and all of its stage below it."""
        fanout = self._context.run.protocol.tree_fanout
        found = [self._roster.index(node)]
        for index in found:
            first = index * fanout + 1
            found += range(first, min(first + fanout, len(self._roster)))
        return [self._roster[index] for index in found]

    def _combined(self) -> Ready:
        votes = [v for v in (self.own, *self._votes.values()) if v is not None]
        failure = next((v.failure for v in votes if v.failure), "")
        stage = self._context.member.stage_index
        found = self._stage_votes()
        hashes = {index: known for vote in votes for index, known in vote.hashes}
        hashes.update((stage, parameter_hash) for parameter_hash in found.values())
        differ = len(set(found.values())) > 1
        if differ and self._index == 0 and len(found) == len(self._roster):
            failure = failure or f"members of stage {stage} differ after the step"
        named = tuple(sorted(found.items())) if differ else ()
        of_stages = tuple(sorted(hashes.items()))
        slow = {each for vote in votes for each in vote.slow}
        rates = _rates(votes)
        if self._index == 0:
            # The rates of a stage meet at its first member.
            slow = slow | {*slow_members(rates)}
            rates = ()
        return Ready(
            self._id,
            of_stages,
            failure,
            named,
            _joined(votes),
            _added(votes),
            tuple(sorted(slow)),
            rates,
            in_common(votes),
        )


def _rates(votes: Sequence[Ready]) -> tuple[tuple[NodeId, float], ...]:
    return tuple(sorted({each for vote in votes for each in vote.rates}))


def slow_members(rates: Sequence[tuple[NodeId, float]]) -> list[tuple[NodeId, int]]:
    """Return the members of a stage that send slowly, and their shares of averages.

    Args:
        rates: Of all members that are known, in bytes a second.
    """
    if not rates:
        return []
    usual = median_high(rate for _, rate in rates)
    return [
        (node, int(SHARE_FULL * rate / usual)) for node, rate in rates if rate * _SLOW_RATIO < usual
    ]


def _joined(votes: Sequence[Ready]) -> tuple[StageAverages, ...]:
    """Return the averages that the subtrees of some votes step from, by stage.

    Members of a stage step from the same. The slowest of them counts.
    """
    found = dict[int, StageAverages]()
    for averages in (each for vote in votes for each in vote.averages):
        known = found.get(averages.stage_index)
        if known is not None:
            travel_s = max(known.travel_s, averages.travel_s)
            num_late = known.num_late + averages.num_late
            averages = replace(known, travel_s=travel_s, num_late=num_late)  # noqa: PLW2901
        found[averages.stage_index] = averages
    return tuple(found[stage] for stage in sorted(found))


def _added(votes: Sequence[Ready]) -> tuple[tuple[int, int, int], ...]:
    """Return what the subtrees of some votes have trained on together, by stage."""
    found = dict[int, Weight]()
    for stage, num, digest in (share for vote in votes for share in vote.folded):
        before = found.get(stage, Weight(0, 0))
        found[stage] = Weight(before.num + num, add_digests((before.digest, digest)))
    return tuple((stage, weight.num, weight.digest) for stage, weight in sorted(found.items()))


def in_common(votes: Sequence[Ready]) -> tuple[tuple[int, int], ...]:
    """Return the averages that all who say so in some votes have, by stage; 0 if they differ."""
    found = dict[int, int]()
    for stage, version in (each for vote in votes for each in vote.travelled):
        found[stage] = version if found.get(stage, version) == version else 0
    return tuple(sorted(found.items()))


def odd_ones(roster: Sequence[NodeId], found: Mapping[NodeId, str]) -> tuple[NodeId, ...]:
    """Return who proposes something else than most do; at a tie the earliest in the roster decide.

    Args:
        roster: The stage's members.
        found: What each of them proposes.
    """
    voters = [node for node in roster if node in found]
    counts = Counter(found[node] for node in voters)
    # Of equals, most_common gives the one that was counted first: the earliest in the roster.
    right = next((most for most, _ in counts.most_common(1)), "")
    return tuple(node for node in voters if found[node] != right)
