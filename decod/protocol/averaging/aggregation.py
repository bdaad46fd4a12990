"""One stage's reduction and the vote on it: all members end with the same bits, or none steps (I3).

After BEGIN AGGREGATION every member of the roster sends part k of its gradient sum to member k,
which adds the parts up *in roster order*, divides by the number of committed microbatches, and
sends the average back to all (a butterfly). Each member then proposes the optimizer's step and
reports the hash of what its parameters would be; hashes meet at the stage's head, and all stages'
reports at the leader. Commit makes the step final, Abort undoes it. Where gradients are clipped a
member waits for the norm over all stages before it proposes (`protocol.averaging.clipping`).

    WAITING -> GATHERING -> REDUCING -> PROPOSING -> READY -> (commit or abort)

With each part comes how many microbatches are in it and their digest. The reducer of a part checks
that they add up to the committed set: a gradient that lacks or repeats a microbatch fails the
round instead of entering the model (I2).

If members differ after the step, the first of the stage tells those who differ from most of it
(at a tie, from the earliest in the roster). The round is repeated, and they fetch the state anew
that all started from: one of its bits was another one there.

A member that has not loaded its stage's state yet reduces like the others and proposes when it
has. A part or report that arrives before BEGIN AGGREGATION is kept.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.averaging.clipping import Clipping
from decod.protocol.core.context import Context
from decod.protocol.core.digest import add_digests, digest_of
from decod.protocol.core.effects import Effect, Note, Send, SendTensor
from decod.protocol.core.era import Hashes
from decod.protocol.core.events import JobFinished, Tensor
from decod.protocol.core.jobs import Gather, Job, Propose, Proposed, Reduce, Square, Squared
from decod.protocol.core.messages import (
    BeginAggregation,
    Differs,
    GradientNorm,
    GradientSquares,
    Ready,
    ReducedPart,
    ReducePart,
)
from decod.protocol.core.view import tree_place
from decod.protocol.state.replay_sources import ReplaySource


class AggregationState(Enum):
    WAITING = "waiting"
    """No BEGIN AGGREGATION in this round yet."""
    GATHERING = "gathering"
    REDUCING = "reducing"
    PROPOSING = "proposing"
    READY = "ready"
    """The vote of this node's subtree has been cast."""


class Aggregation:
    """One node's part in the reduction of one round. A new round or view gets a new one."""

    def __init__(self, context: Context, replay_source: ReplaySource, *, loaded: bool) -> None:
        self._context = context
        self._replay_source = replay_source
        self.state = AggregationState.WAITING
        self.loaded = loaded
        """Whether this node holds the stage's committed parameters."""
        self.begun: BeginAggregation | None = None
        roster = context.view.roster(context.member.stage_index)
        self._roster = tuple(member.node_id for member in roster)
        self._index = self._roster.index(context.node_id)
        self._folded: Sequence[MicrobatchId] = ()
        """What is in this node's sum."""
        self._contributions: dict[NodeId, ReducePart] = {}
        self._parts: dict[NodeId, TensorId] = {}
        self._reduced: dict[int, TensorId] = {}
        place = tree_place(context.view, context.node_id, fanout=context.config.tree_fanout)
        self._parent, self._children = place.parent, place.children
        self._clipping = Clipping(context, self._roster, place)
        self._votes: dict[NodeId, Ready] = {}
        self._own_vote: Ready | None = None
        self._shares = len(self._roster) > 1
        """Whether an average is made: members need it, or followers."""

    @property
    def vote(self) -> Ready | None:
        """The subtree's vote, once it is cast. At the leader: the run's."""
        if self.state is not AggregationState.READY:
            return None
        return self._combined()

    @property
    def awaited(self) -> set[NodeId]:
        """From whom something is to come now: parts, averages, votes or the decision."""
        if self.begun is None:
            return set()
        if self._own_vote is not None:
            above = () if self._parent is None else (self._parent,)
            return {*above, *self._children} - self._votes.keys()
        if self.state is AggregationState.REDUCING:
            missing = {node for k, node in enumerate(self._roster) if k not in self._reduced}
            return missing if self._shares and missing else self._clipping.awaited
        return {*self._roster} - self._contributions.keys()

    @property
    def proposal(self) -> str:
        """The hash of what this node's parameters would be; empty if it has proposed nothing."""
        hashes = self._own_vote.hashes if self._own_vote is not None else ()
        return next((parameter_hash for _, parameter_hash in hashes), "")

    @property
    def account(self) -> tuple[tuple[str, object], ...]:
        """What this node's vote rests on, as fields of a note: by them a run can be audited."""
        begun, own = self.begun, self._contributions.get(self._context.node_id)
        if begun is None or own is None or self._own_vote is None or self._own_vote.failure:
            return ()
        ((stage, parameter_hash),) = self._own_vote.hashes
        return (
            ("term", self._context.view.term),
            ("view_version", begun.view_version),
            ("stage", stage),
            ("num_members", len(self._roster)),
            ("num_folded", own.num_microbatches),
            ("digest_folded", own.digest),
            ("num_batch", begun.num_committed),
            ("digest_batch", begun.digest),
            ("parameter_hash", parameter_hash),
            *((("gradient_norm", self._clipping.norm),) if self._context.clips else ()),
        )

    def abandon(self) -> list[Effect]:
        """Release all that is held for the round."""
        tensors = [*self._parts.values(), *self._reduced.values()]
        self._parts.clear()
        self._reduced.clear()
        return self._context.tensors.release(*tensors)

    def begin(self, message: BeginAggregation) -> list[Effect]:
        """Take in which microbatches count, once; pass the word on down the tree."""
        if self.begun is not None:
            return []
        self.begun = message
        return [Send(child, message) for child in self._children]

    def contribute(self, folded: Sequence[MicrobatchId]) -> list[Effect]:
        """Start the reduction, once: this node's sum is whole."""
        if self.begun is None or self._context.node_id in self._contributions:
            return []
        self._folded = folded
        own = self._own_part(self._index)
        self._contributions[self._context.node_id] = own
        self._shares = self._shares or self._replay_source.wants(self._context.round)
        if not self._shares:
            return self._check_and_reduce()
        self.state = AggregationState.GATHERING
        if folded:
            return self._context.compute.submit(Gather(len(self._roster)), self)
        effects: list[Effect] = [
            Send(node, self._own_part(k)) for k, node in enumerate(self._roster) if k != self._index
        ]
        return effects + self._check_and_reduce()

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """A job of the reduction has ended well."""
        match job, event.result:
            case Gather(), _:
                return self.gathered(event.outputs)
            case Reduce(), Squared(square_sum):
                return self.reduced_here(event.outputs[0].id, square_sum)
            case Square(), Squared(square_sum):
                return self.squared(square_sum)
            case Propose(), Proposed(parameter_hash):
                return self.proposed(parameter_hash)
        raise AssertionError(f"{job} ended with {event.result}")

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """Something in the reduction went wrong here."""
        return self.failed(reason)

    def gathered(self, outputs: Sequence[Tensor]) -> list[Effect]:
        """This node's sum has been cut into parts: send each to its reducer."""
        effects: list[Effect] = []
        for k, (node, tensor) in enumerate(zip(self._roster, outputs, strict=True)):
            if k == self._index:
                self._parts[node] = tensor.id
            else:
                effects.append(SendTensor(node, self._own_part(k), tensor.id))
        return effects + self._check_and_reduce()

    def part(self, sender: NodeId, message: ReducePart, tensor: Tensor | None) -> list[Effect]:
        """A member's contribution to the part that this node reduces."""
        tensors = self._context.tensors
        if tensor is not None:
            tensors.add(tensor)
        unwanted = (
            sender not in self._roster
            or sender in self._contributions
            or message.part != self._index
            or (tensor is None) != (message.num_microbatches == 0)
        )
        if unwanted:
            return tensors.release(tensor.id) if tensor is not None else []
        self._contributions[sender] = message
        if tensor is not None:
            self._parts[sender] = tensor.id
        return self._check_and_reduce()

    def reduced_here(self, output: TensorId, square_sum: float) -> list[Effect]:
        """The average of this node's part is there: share it."""
        round_, view_version = self._context.round, self._context.view.version
        message = ReducedPart(round_, self._index, view_version, square_sum)
        effects: list[Effect] = []
        for node in self._roster:
            if node != self._context.node_id:
                self._context.tensors.retain(output)
                effects.append(SendTensor(node, message, output))
        self._reduced[self._index] = output
        return effects + self._clipping.add_part(self._index, square_sum) + self._propose()

    def squared(self, square_sum: float) -> list[Effect]:
        """This node is alone in its stage, and knows how long its gradient is."""
        return self._clipping.add_part(self._index, square_sum)

    def reduced_part(self, sender: NodeId, message: ReducedPart, tensor: Tensor) -> list[Effect]:
        tensors = self._context.tensors
        tensors.add(tensor)
        expected = message.part < len(self._roster) and self._roster[message.part] == sender
        if not expected or message.part in self._reduced or self._own_vote is not None:
            return tensors.release(tensor.id)
        self._reduced[message.part] = tensor.id
        return self._clipping.add_part(message.part, message.square_sum) + self._propose()

    def squares(self, sender: NodeId, message: GradientSquares) -> list[Effect]:
        """How long the gradients of other stages are."""
        return self._clipping.add_stages(sender, message)

    def norm_found(self, message: GradientNorm) -> list[Effect]:
        """How long the gradient over all stages is."""
        return self._clipping.found(message) + self._propose()

    def state_loaded(self) -> list[Effect]:
        """This node now holds the committed parameters."""
        self.loaded = True
        return self._propose() if self.begun is not None else []

    def proposed(self, parameter_hash: str) -> list[Effect]:
        stage = self._context.member.stage_index
        self._own_vote = self._ready(((stage, parameter_hash),))
        return self._cast()

    def failed(self, reason: str) -> list[Effect]:
        """Something in the reduction went wrong here: vote against the round."""
        if self._own_vote is not None:
            return []
        self._own_vote = self._ready((), failure=reason[:200] or "failed")
        return self._cast()

    def voted(self, sender: NodeId, message: Ready) -> list[Effect]:
        """A child's subtree is ready, or has failed."""
        if sender in self._children:
            self._votes[sender] = message
        return self._cast()

    def _own_part(self, part: int) -> ReducePart:
        context, num, digest = self._context, len(self._folded), digest_of(self._folded)
        return ReducePart(context.round, part, num, digest, context.view.version)

    def _check_and_reduce(self) -> list[Effect]:
        """Reduce this node's part when all contributions are there and add up."""
        begun = self.begun
        own_missing = (
            self._contributions.get(self._context.node_id) is not None
            and self._contributions[self._context.node_id].num_microbatches > 0
            and self._context.node_id not in self._parts
            and self._shares
        )
        complete = len(self._contributions) == len(self._roster)
        if begun is None or not complete or own_missing:
            return []
        if self.state not in (AggregationState.WAITING, AggregationState.GATHERING):
            return []
        contributions = self._contributions.values()
        num = sum(c.num_microbatches for c in contributions)
        digest = add_digests(c.digest for c in contributions)
        if (num, digest) != (begun.num_committed, begun.digest):
            stage = self._context.member.stage_index
            return self.failed(
                f"stage {stage} folded {num} microbatches, not the {begun.num_committed} committed"
            )
        self.state = AggregationState.REDUCING
        if not self._shares:
            if self._clipping.norm is None:
                return self._context.compute.submit(Square(begun.num_committed), self)
            return self._propose()
        inputs = [self._parts.pop(node) for node in self._roster if node in self._parts]
        job = Reduce(self._index, len(self._roster), begun.num_committed)
        return self._context.compute.submit(job, self, inputs)

    def _propose(self) -> list[Effect]:
        begun, num_parts, norm = self.begun, len(self._roster), self._clipping.norm
        ready = self.state is AggregationState.REDUCING and self.loaded
        if begun is None or norm is None or not ready:
            return []
        if self._shares and len(self._reduced) < num_parts:
            return []
        self.state = AggregationState.PROPOSING
        inputs = [self._reduced.pop(k) for k in sorted(self._reduced)]
        shared = self._replay_source.share(begun, inputs, norm) if inputs else []
        job = Propose(begun.round.iteration, len(inputs), begun.num_committed, norm)
        return shared + self._context.compute.submit(job, self, inputs)

    def _cast(self) -> list[Effect]:
        """Vote for the subtree when all of it has; against it as soon as one does."""
        if self.state is AggregationState.READY:
            return []
        vote = self._combined()
        complete = self._own_vote is not None and len(self._votes) == len(self._children)
        if not complete and not vote.failure:
            return []
        self.state = AggregationState.READY
        told = self._tell_odd() if self._index == 0 else []
        return told + ([Send(self._parent, vote)] if self._parent is not None else [])

    def _tell_odd(self) -> list[Effect]:
        """Tell those who came to another result than most of the stage that they did."""
        found = self._stage_votes()
        odd = odd_ones(self._roster, found)
        if not odd or self.begun is None or len(found) < len(self._roster):
            return []
        stage = self._context.member.stage_index
        notes: list[Effect] = [
            Note("member.differs", (("peer", node), ("stage", stage))) for node in odd
        ]
        message = Differs(self.begun.round.iteration - 1, odd)
        return notes + [Send(node, message) for node in odd]

    def _stage_votes(self) -> dict[NodeId, str]:
        """Return what each member of this node's stage in its subtree proposes."""
        stage, found = self._context.member.stage_index, dict[NodeId, str]()
        if self._own_vote is not None:
            found.update((self._context.node_id, own) for _, own in self._own_vote.hashes)
        for child, vote in self._votes.items():
            if child in self._roster:
                common, named = dict(vote.hashes).get(stage), dict(vote.votes)
                for node in self._subtree(child):
                    parameter_hash = named.get(node, common)
                    if parameter_hash is not None:
                        found[node] = parameter_hash
        return found

    def _subtree(self, node: NodeId) -> list[NodeId]:
        """Return a member and all of its stage below it."""
        fanout, found = self._context.config.tree_fanout, [self._roster.index(node)]
        for index in found:
            first = index * fanout + 1
            found += range(first, min(first + fanout, len(self._roster)))
        return [self._roster[index] for index in found]

    def _combined(self) -> Ready:
        votes = [v for v in (self._own_vote, *self._votes.values()) if v is not None]
        failure = next((v.failure for v in votes if v.failure), "")
        stage, found = self._context.member.stage_index, self._stage_votes()
        hashes = {index: known for vote in votes for index, known in vote.hashes}
        hashes.update((stage, parameter_hash) for parameter_hash in found.values())
        differ = len(set(found.values())) > 1
        if differ and self._index == 0 and len(found) == len(self._roster):
            failure = failure or f"members of stage {stage} differ after the step"
        named = tuple(sorted(found.items())) if differ else ()
        return self._ready(tuple(sorted(hashes.items())), failure, named)

    def _ready(
        self,
        hashes: Hashes,
        failure: str = "",
        votes: tuple[tuple[NodeId, str], ...] = (),
    ) -> Ready:
        return Ready(self._context.round, hashes, self._context.view.version, failure, votes)


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
