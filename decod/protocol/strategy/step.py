"""One member's optimizer step of one iteration: the average, the norm, the proposal, the vote.

    WAITING -> AVERAGING -> PROPOSING -> READY -> (committed, or repeated)

After BEGIN AGGREGATION each member has its sum averaged over its stage (`Averager`). Where
gradients are clipped it waits for the norm over all stages (`Clipping`). Then it takes the
optimizer's step, undoably, and votes with the hash of the result (`StepVote`). An opening makes the
step final or undoes it.

A member that serves its stage alone needs no average, unless candidates replay its steps. A member
that has not loaded its stage's state yet averages like the others, and proposes when it has.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from typing_extensions import override

from decod.ids import MicrobatchId, NodeId
from decod.protocol.averaging.averager import Averaging, AveragingState, Weight
from decod.protocol.averaging.overlap import Overlap
from decod.protocol.averaging.vote import Clipping, StepVote
from decod.protocol.core.average_spec import WHOLE
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Note
from decod.protocol.core.events import JobFinished, Received
from decod.protocol.core.fingerprints import add_digests, digest_of
from decod.protocol.core.jobs import Job, Propose, Proposed, Square, Squared, StepLocally
from decod.protocol.core.messages import (
    BeginAggregation,
    GradientNorm,
    GradientSquares,
    Open,
    Ready,
    ReducedPart,
    ReducePart,
)
from decod.protocol.core.messages.averaging_messages import StageAverages
from decod.protocol.core.view import Role, tree_place
from decod.protocol.state.replay_sources import ReplaySource
from decod.protocol.strategy.witnessing import WitnessedAverage


class StepPolicy:
    """What a member's sums stand for. It sees every iteration of that member, in order.

    As it stands here, the gradients of each iteration are averaged, and every microbatch of the
    batch must be in the average (I2).
    """

    def weigh(self, folded: Sequence[MicrobatchId], fragment: int) -> Weight:  # noqa: ARG002
        """Return what this node's contribution to the average stands for.

        Args:
            folded: Microbatches of this iteration whose gradients this node has added up.
            fragment: That is averaged, from 1. 0: all parameters.
        """
        return weight_of(folded)

    def total(self, begun: BeginAggregation) -> Weight | None:
        """Return what all contributions must add up to. None: whatever the members still have."""
        return Weight(begun.num_committed, begun.digest)

    def closed(self, folded: Sequence[MicrobatchId], averaged: int | None) -> None:
        """The step of an iteration is final here.

        Args:
            folded: As for `weigh`.
            averaged: The fragment whose local phase it ends. None: none's.
        """

    def returned(self) -> None:
        """This node has given up its own steps: it holds what its stage has in common."""


class LocalSteps(StepPolicy):
    """Average what each member has learnt in several iterations.

    A member that was lost has taken along what it learnt. So nobody knows beforehand what the
    contributions add up to.

    Args:
        num_fragments: Parts of the parameters that are averaged in turn.
    """

    def __init__(self, num_fragments: int = 1) -> None:
        self._kept = [Weight(0, 0)] * num_fragments
        """Of the iterations since the last average of each fragment."""

    @override
    def weigh(self, folded: Sequence[MicrobatchId], fragment: int) -> Weight:
        """Return what this node has trained on since the fragment's last average.

        All parameters together count from the average that is longest ago.
        """
        kept = self._kept[fragment - 1] if fragment else max(self._kept, key=lambda w: w.num)
        return _sum(kept, weight_of(folded))

    @override
    def total(self, begun: BeginAggregation) -> Weight | None:
        return None

    @override
    def closed(self, folded: Sequence[MicrobatchId], averaged: int | None) -> None:
        own = weight_of(folded)
        self._kept = [
            Weight(0, 0) if averaged in (0, fragment) else _sum(kept, own)
            for fragment, kept in enumerate(self._kept, 1)
        ]

    @override
    def returned(self) -> None:
        self._kept = [Weight(0, 0)] * len(self._kept)


def _sum(one: Weight, other: Weight) -> Weight:
    return Weight(one.num + other.num, add_digests((one.digest, other.digest)))


def weight_of(folded: Sequence[MicrobatchId]) -> Weight:
    """Return how much the sum over some microbatches stands for."""
    return Weight(len(folded), digest_of(folded))


Account = tuple[tuple[str, object], ...]
"""What a vote rests on, as fields of a note."""


def account_of(
    context: Context, begun: BeginAggregation, folded: Weight, *, num_members: int
) -> Account:
    """Return what a node has put into an average.

    Args:
        context: The node's.
        begun: What the batch holds.
        folded: What the node's sum holds.
        num_members: All who contribute to the average.
    """
    return (
        ("term", context.view.term),
        ("view_version", begun.averaging.view_version),
        ("stage", context.member.stage_index),
        ("num_members", num_members),
        ("num_folded", folded.num),
        ("digest_folded", folded.digest),
        ("num_batch", begun.num_committed),
        ("digest_batch", begun.digest),
    )


def note_commit(
    decision: Open,
    begun: BeginAggregation | None,
    account: Account,
    context: Context,
    *,
    voted: bool,
) -> None:
    """Note that an iteration is committed.

    Args:
        decision: That opens the next.
        begun: What the batch held, if this node knows.
        account: What this node's vote rests on.
        context: The node's.
        voted: Whether it has voted for the iteration that is committed.
    """
    committed = decision.opening.committed
    if decision.committed:
        loss = decision.loss
        num_tokens = decision.num_tokens
    elif begun is not None and voted:
        loss = begun.loss_sum / begun.num_committed
        num_tokens = begun.num_tokens
    else:
        return
    fields = (
        ("iteration", str(committed)),
        ("loss", loss),
        ("num_tokens", num_tokens),
        *account,
        ("num_passes", context.compute.num_passes),
    )
    context.out.put(Note("step.committed", fields))


_NOTHING = Weight(0, 0)


class StepState(Enum):
    WAITING = "waiting"
    """No BEGIN AGGREGATION in this iteration yet, or this node's sum is not whole."""
    AVERAGING = "averaging"
    """The average or its norm is under way, or this node's state is."""
    PROPOSING = "proposing"
    """The device takes the step."""
    READY = "ready"
    """The vote of this node's subtree has been cast."""


def averaging_of(context: Context) -> Averaging:
    """Return the average of the context's iteration, at this node's stage.

    A stage's clients contribute. Its other members reduce parts of the average, and get all of it.
    """
    view = context.view
    stage = context.member.stage_index
    roster = tuple(member.node_id for member in view.roster(stage))
    clients = tuple(member.node_id for member in view.clients[stage])
    owners = tuple(range(len(roster))) if clients else context.owners(roster)
    spec = context.opening.spec
    return Averaging(context.averaging, (*roster, *clients), owners, spec, readers=roster)


class Step:
    """One member's step of one iteration and roster. A new iteration or view gets a new one.

    Args:
        context: The node's.
        policy: Whether an average is made now, and what it holds.
        replay_source: Knows the candidates that need the average.
        overlap: The average that has travelled since the last outer step. None: none does.
        loaded: Whether this node holds the stage's committed parameters.
    """

    def __init__(
        self,
        context: Context,
        policy: StepPolicy,
        replay_source: ReplaySource,
        overlap: Overlap | None = None,
        *,
        loaded: bool,
    ) -> None:
        self._context = context
        self._out = context.out
        self._policy = policy
        self._replay_source = replay_source
        self._overlap = overlap
        self.loaded = loaded
        self.begun: BeginAggregation | None = None
        stage = context.member.stage_index
        view = context.view
        roster = tuple(member.node_id for member in view.roster(stage))
        place = tree_place(view, context.node_id, fanout=context.run.protocol.tree_fanout)
        self._children = place.children
        self._num_members = len(roster)
        self._id = context.averaging
        averaging = averaging_of(context)
        self._num_clients = len(averaging.roster) - len(roster)
        # Clients hear what comes down the tree, and have no vote.
        voters = (node for node in place.children if view.by_id[node].role is not Role.CLIENT)
        place = replace(place, children=tuple(voters))
        self.witnessed = WitnessedAverage(context, averaging, self)
        self.averager = self.witnessed.averager
        self._clipping = Clipping(context, roster, place)
        self.vote = StepVote(context, self._id, roster, place)
        self._averages = not context.opening.local
        self._arrives = context.opening.arrival
        self._uses_own = overlap is None or context.iteration.number == context.run.num_iterations
        """Whether the average of this iteration is used at once. The last of a run is."""
        self._shares = self._averages and self._uses_own and len(averaging.roster) > 1
        """Whether parts travel: members need the average, or candidates that replay it."""
        self._own: Weight | None = None
        """What this node's contribution stands for, once it is whole."""
        self._folded = Weight(0, 0)
        """What of that is of this iteration."""
        self._metrics: tuple[tuple[str, float], ...] = ()
        """Numbers of the proposed step for people."""
        self._proposing = False

    @property
    def state(self) -> StepState:
        if self.vote.cast:
            return StepState.READY
        if self._proposing:
            return StepState.PROPOSING
        return StepState.WAITING if self._own is None else StepState.AVERAGING

    @property
    def _uses_travelled(self) -> bool:
        """Whether the iteration ends with an average that has travelled, if there is one."""
        return self._averages or self._arrives

    @property
    def aggregating(self) -> bool:
        """Whether this node has added up its gradients."""
        return self.state is not StepState.WAITING

    @property
    def made(self) -> bool:
        """Whether the vote of this node's subtree is cast."""
        return self.vote.cast

    @property
    def result(self) -> Ready | None:
        """That vote."""
        return self.vote.result

    @property
    def proposal(self) -> str:
        """The hash of this node's parameters after the step; empty if it has proposed nothing."""
        return self.vote.proposal

    @property
    def awaited(self) -> set[NodeId]:
        """From whom something is to come now: parts, averages, the norm, votes or the decision."""
        if self.begun is None:
            return set()
        if self.vote.own is not None:
            return self.vote.awaited
        if self._own is None or (self._shares and self.averager.awaited):
            return self.averager.awaited
        if self._uses_travelled and self._overlap is not None and not self._overlap.settled:
            return self._overlap.awaited
        return self._clipping.awaited

    @property
    def account(self) -> Account:
        """What this node's vote rests on, as fields of a note: by them a run can be audited."""
        begun = self.begun
        own = self._own
        vote = self.vote.own
        if begun is None or own is None or vote is None or vote.failure:
            return ()
        ((_, parameter_hash),) = vote.hashes
        num = self._num_members + self._num_clients
        return (
            *account_of(self._context, begun, self._folded, num_members=num),
            ("parameter_hash", parameter_hash),
            *((("gradient_norm", self._clipping.norm),) if self._context.run.clips else ()),
            *self._metrics,
        )

    def contributions(self) -> None:
        """Note what each member of a stage with clients has put into this node's part of the
        average: by these notes it can be audited even after a client is gone.
        """
        if not self._num_clients:
            return
        for each in self.witnessed.contributed:
            if each.owner == self._context.node_id:
                self._out.note(
                    "contribution.averaged",
                    iteration=str(self._id.iteration),
                    part=each.part,
                    peer=each.contributor,
                    num_folded=each.weight.num,
                    digest_folded=each.weight.digest,
                )

    def abandon(self) -> None:
        """Release all that is held for the iteration."""
        self.witnessed.abandon()

    # --- messages -----------------------------------------------------------------------------

    def received(self, received: Received) -> None:
        """Take in a message of this step."""
        message = received.message
        sender = received.sender
        tensor = received.tensor
        match message:
            case BeginAggregation():
                self.begin(message)
            case ReducePart():
                self.averager.part(sender, message, tensor)
            case ReducedPart() if tensor is not None:
                self.averager.average(sender, message, tensor)
            case GradientSquares():
                self._clipping.add_stages(sender, message)
            case GradientNorm():
                self._clipping.found(message)
                self._propose()
            case Ready():
                self.vote.received(sender, message)
                self._look_at_vote()

    def begin(self, message: BeginAggregation) -> None:
        """Take in which microbatches count, once; pass the word on down the tree."""
        if self.begun is not None:
            return
        assert message.averaging == self._id, (message.averaging, self._id)
        self.begun = message
        self._out.send_all(self._children, message)

    def contribute(self, folded: Sequence[MicrobatchId]) -> None:
        """Take part in the average, once: this node's sum is whole.

        Args:
            folded: What is in it.
        """
        begun = self.begun
        # After a vote against the step, from here or below, nothing enters an average.
        if begun is None or self._own is not None or self.vote.cast:
            return
        self._own = own = self._policy.weigh(folded, self._context.opening.spec.fragment)
        self._folded = weight_of(folded)
        if not (self._averages and self._uses_own):
            self._propose()
            return
        total = self._policy.total(begun)
        self._shares = self._shares or self._replay_source.wants(self._id.iteration)
        if self._shares:
            self.averager.begin(own, total)
        elif total is not None and own != total:
            self.lacking(own)
        elif self._clipping.norm is None:
            job = Square(self._id.iteration.number, own.num)
            self._context.compute.submit(job, self)
        else:
            self._propose()

    def state_loaded(self) -> None:
        """This node now holds the committed parameters."""
        self.loaded = True
        self._propose()

    # --- the average --------------------------------------------------------------------------

    def averaged(self) -> None:
        """All of the average is here."""
        self._clipping.add_parts(self.averager.square_sums)
        self._propose()

    def average_settled(self) -> None:
        """The average that has travelled is here, or dropped."""
        if self._uses_travelled:
            self._propose()

    def lacking(self, found: Weight) -> None:
        """The members' sums lack or repeat something: such a gradient enters no model (I2)."""
        assert self.begun is not None
        stage = self._context.member.stage_index
        num = self.begun.num_committed
        self._oppose(f"stage {stage} folded {found.num} microbatches, not the {num} committed")

    def averaging_failed(self, reason: str) -> None:
        """The device has refused a part."""
        self._oppose(reason)

    # --- the step -----------------------------------------------------------------------------

    def _propose(self) -> None:
        """Take the step, once, when all that it needs is there."""
        begun = self.begun
        own = self._own
        norm = self._clipping.norm
        over = self._proposing or self.vote.own is not None
        if begun is None or own is None or not self.loaded or over:
            return
        number = self._id.iteration.number
        if not self._uses_travelled:
            self._proposing = True
            self._context.compute.submit(StepLocally(number), self)
            return
        if norm is None or (self._shares and self.averager.state is not AveragingState.AVERAGED):
            return
        if self._overlap is not None and not self._overlap.settled:
            return
        self._proposing = True
        ahead = self._overlap.take() if self._overlap is not None else []
        parts = self.averager.take() if self._shares else []
        weight = self.averager.found if self._shares else own
        if self._arrives or not self._uses_own:
            weight = _NOTHING
        steps_locally = self._context.run.sync.steps_locally
        opening = self._context.opening
        job = Propose(
            number,
            len(parts),
            weight.num,
            norm,
            len(ahead),
            opening.spec,
            opening.travelling or WHOLE,
            self._overlap.missed if self._overlap is not None else (),
            tuple(sorted(self.averager.missed)),
            # An average of steps, or one that has travelled, is of other batches.
            begun.num_tokens if self._overlap is None and not steps_locally else 0,
            ends_phase=self._averages,
        )
        inputs = ahead + parts
        if parts or self._overlap is not None:
            self._replay_source.share(self._id, job, inputs)
        self._context.compute.submit(job, self, inputs)

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        """The step has been proposed; or a lone member knows how long its gradient is."""
        match job, event.result:
            case Square(), Squared(square_sum):
                self._clipping.add_parts({0: square_sum})
            case Propose() | StepLocally(), Proposed(parameter_hash, effective_rank, odd, metrics):
                self._metrics = metrics
                folded = self._folded if self._context.run.sync.steps_locally else None
                averages = self._averages_of(job, effective_rank)
                rate = travelled = None
                if self._overlap is not None and self._averages:
                    rate = self._overlap.bytes_per_s
                elif self._overlap is not None and not self._arrives:
                    travelled = self._overlap.travelled
                if odd:
                    self.witnessed.stand_out(self.averager.owners_of(odd))
                self.vote.propose(parameter_hash, folded, averages, rate, travelled)
            case _:
                raise AssertionError(f"{job} ended with {event.result}")

    def _averages_of(self, job: Job, effective_rank: float) -> StageAverages | None:
        """Return what this stage's step comes from, if members step by themselves."""
        if not self._context.run.sync.steps_locally or not isinstance(job, Propose):
            return None
        stage = self._context.member.stage_index
        overlap = self._overlap
        num = job.weights_total
        num_late = self.averager.num_missed
        if overlap is None:
            return StageAverages(stage, num, effective_rank, num_late=num_late)
        num = num + overlap.found.num
        num_late = num_late + overlap.num_late
        return StageAverages(stage, num, effective_rank, overlap.travel_s, num_late)

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """The device has refused the step."""
        self._oppose(reason)

    def _oppose(self, reason: str) -> None:
        self.vote.oppose(reason)
        self._look_at_vote()

    def _look_at_vote(self) -> None:
        """Stop averaging if the iteration has failed here or below."""
        if self.vote.cast:
            self.averager.close()
