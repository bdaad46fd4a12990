"""One member's part in audits: it passes them on, tells auditors what it knows, and audits others.

After the vote on a step, and before its commit, the leader may have the work of some relays done
again. By then each relay has sent all that it sends in the iteration, so it can't behave better
because it is watched. Both ends of each link of such a relay tell its auditors two things: what
they have sent over it, which they have kept in case a relay is lost, and the proof of what has come
(`decod.protocol.core.proofs`). Members of its stage tell them sketches of what they and the relay
gave each other for the average.

Nothing is audited where members step by themselves: no two of them have the same parameters then.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from decod.ids import NodeId, TensorId
from decod.protocol.averaging.averager import Averager, Averaging, AveragingUser, Weight, port_of
from decod.protocol.core.context import Context
from decod.protocol.core.effects import SendTensor
from decod.protocol.core.events import JobFinished, Received, StateFetched, StateFetchFailed, Tensor
from decod.protocol.core.jobs import Job, Sketched, SketchPart
from decod.protocol.core.messages import (
    Audit,
    AuditedPart,
    AuditedShares,
    AuditedTensor,
    Message,
    StandOut,
)
from decod.protocol.core.messages.audit_messages import AuditCase, OfOpinion
from decod.protocol.core.messages.microbatch_messages import Travelling
from decod.protocol.core.proofs import digest_in, subject_of
from decod.protocol.core.view import Role, tree_place
from decod.protocol.strategy.auditor import Auditor, StageJudge
from decod.protocol.strategy.microbatch import Microbatches, origin_of

_EARLY_MAX = 64
"""So many messages of one sender about audits of which this node has not heard yet are kept, and
two for each microbatch of the iteration."""


def unproven(context: Context, received: Received) -> bool:
    """Let go of an activation or a gradient if nobody can be held to it. Return whether that is so.

    It is not if its sender can, or nothing is audited.
    """
    message = received.message
    tensor = received.tensor
    if not context.run.audited or not isinstance(message, Travelling) or tensor is None:
        return False
    sender = origin_of(message, received.sender, context.node_id, context.view)
    signer = context.proofs.signer_of(message.proof, subject_of(message))
    if signer == sender and digest_in(message.proof) == tensor.digest:
        return False
    context.out.free(received.tensor)
    fields = {"peer": received.sender, "microbatch": str(message.microbatch)}
    context.out.note("tensor.unproven", **fields)
    return True


class Contributed(NamedTuple):
    """What a member has contributed to a part of an average."""

    part: int
    owner: NodeId
    """Who reduces the part."""
    contributor: NodeId
    weight: Weight
    tensor: TensorId | None
    """None: there was none of this member, or it was not kept."""


class WitnessedAverage:
    """One average, and what this member knows of it.

    A relay whose work may be audited keeps contributions and means until `abandon`.

    Args:
        context: The node's.
        averaging: The average.
        user: Told how it ends.
    """

    def __init__(self, context: Context, averaging: Averaging, user: AveragingUser) -> None:
        self.averager = Averager(context.node_id, averaging, port_of(context), user, self)
        self._context = context
        self._out = context.out
        self._averaging = averaging
        self._keeps = context.run.audited and context.member.role is Role.RELAY
        self._contributed: dict[int, tuple[Contributed, ...]] = {}
        self.means: dict[int, TensorId] = {}
        """Of parts, as far as they are kept."""

    @property
    def contributed(self) -> list[Contributed]:
        """What this node knows of contributions: its own to all parts, and those of all members to
        the parts that it has reduced.
        """
        return [each for _, part in sorted(self._contributed.items()) for each in part]

    def abandon(self) -> None:
        """Release all tensors that are held for the average."""
        given = [each.tensor for each in self.contributed if each.tensor is not None]
        means = self.means.values()
        self._context.tensors.release(*given, *means)
        self._contributed.clear()
        self.means.clear()
        self.averager.abandon()

    # --- what the averager does -------------------------------------------------------------------

    def contributed_to(
        self,
        part: int,
        owner: NodeId,
        weights: Mapping[NodeId, Weight],
        tensors: Mapping[NodeId, TensorId],
    ) -> None:
        """Members have contributed to a part: this node, or all of them if it is the owner."""
        kept = tensors if self._keeps else {}
        self._contributed[part] = tuple(
            Contributed(part, owner, node, weights[node], kept.get(node))
            for node in self._averaging.roster
            if node in weights
        )
        for tensor in kept.values():
            self._context.tensors.retain(tensor)

    def reduced(self, part: int, mean: TensorId) -> None:
        """The mean of a part is here."""
        if self._keeps:
            self.means[part] = self._context.tensors.retain(mean)

    def stand_out(self, nodes: tuple[NodeId, ...]) -> None:
        """Some members' contributions or means stand out: the leader has their work audited."""
        self._out.send(self._context.view.leader, StandOut(self._averaging.id, nodes))


class Audits:
    """A member's part in the audits of one average.

    Args:
        context: The node's.
        microbatches: This node's, of the iteration.
        witnessed: The average.
        lost: Who was a member when the iteration was opened, and is gone.
        hashes: Of the committed parameters, by stage.
        fetching: Stage and iteration of states that judges have asked for, also earlier ones.
    """

    def __init__(
        self,
        context: Context,
        microbatches: Microbatches,
        witnessed: WitnessedAverage,
        lost: Collection[NodeId],
        hashes: Mapping[int, str],
        fetching: set[tuple[int, int]],
    ) -> None:
        self._context = context
        self._out = context.out
        self._microbatches = microbatches
        self._witnessed = witnessed
        self._averager = witnessed.averager
        self._lost = lost
        self._hashes = hashes
        self._seen: set[AuditCase] = set()
        self._auditors: dict[tuple[NodeId, int], Auditor] = {}
        """This node's audits, by relay and opinion."""
        self._judge: StageJudge | None = None
        self._fetching = fetching
        self._early: list[Received] = []
        self.over = False
        """Nobody waits for anything any more."""

    def abandon(self) -> None:
        """Release all that is held."""
        self.over = True
        for early in self._early:
            if early.tensor is not None:
                self._context.tensors.release(early.tensor.id)
        self._early.clear()
        for auditor in self._auditors.values():
            auditor.abandon()

    def received(self, received: Received) -> None:
        """Take in a message about an audit."""
        message = received.message
        tensor = received.tensor
        if isinstance(message, Audit):
            self._begin(message)
        else:
            if tensor is not None:
                self._context.tensors.add(tensor)
            self._taken(received)

    def _taken(self, received: Received) -> None:
        """Take in what an auditor is to know. This node holds the tensor."""
        message = received.message
        tensor = received.tensor
        assert isinstance(message, OfOpinion), message
        auditor = self._auditors.get((message.relay, message.opinion))
        if auditor is not None:
            auditor.received(received)
            return
        num_early = sum(early.sender == received.sender for early in self._early)
        if num_early < _EARLY_MAX + 2 * self._averager.found.num:
            self._early.append(received)
        elif tensor is not None:
            self._context.tensors.release(tensor.id)

    # --- the state of another stage, which a judge needs ---

    def takes(self, event: StateFetched | StateFetchFailed) -> bool:
        """Whether an event is about a state that this node has asked for as a judge."""
        return (event.stage_index, event.iteration) in self._fetching

    def fetched(self, event: StateFetched) -> None:
        """The state is here, perhaps too late."""
        self._fetching.discard((event.stage_index, event.iteration))
        if self._judge is not None and self._judge.takes(event):
            self._judge.fetched(event)
        else:
            self._context.tensors.release(self._context.tensors.add(event.tensor))

    def fetch_failed(self, event: StateFetchFailed) -> None:
        """Nobody gives it."""
        self._fetching.discard((event.stage_index, event.iteration))
        if self._judge is not None and self._judge.takes(event):
            self._judge.give_up(event.reason)

    def _begin(self, message: Audit) -> None:
        """Pass the word on, and do what it asks of this node, once."""
        context = self._context
        view = self._context.view
        new = [case for case in message.cases if case not in self._seen]
        if not new:
            return
        self._seen.update(new)
        place = tree_place(view, context.node_id, fanout=context.run.protocol.tree_fanout)
        self._out.send_all(place.children, message)
        for case in new:
            known = all(node in view for node in (case.relay, *case.auditors))
            if not known or case.relay in case.auditors:
                continue
            if case.closes:
                auditor = self._auditors.get((case.relay, case.opinion))
                if auditor is not None:
                    auditor.close()
                continue
            here = context.view.by_id[case.relay].stage_index == context.member.stage_index
            if context.node_id in case.auditors and (here or context.member.role is Role.DATA):
                self._audit(case, beside=not here)
            self._tell_of_passes(case)
            if context.node_id != case.relay:
                self._tell_of_parts(case)
            if here:
                self._tell_of_shares(case)

    def _audit(self, case: AuditCase, *, beside: bool) -> None:
        key = (case.relay, case.opinion)
        if beside:
            auditor: Auditor = (judge := StageJudge(self._context, case, self._lost))
            self._judged(judge)
        else:
            auditor = Auditor(self._context, case, self._lost)
            auditor.begin(self._averager, self._witnessed.means)
        self._auditors[key] = auditor
        early = self._early
        self._early = []
        for each in early:
            assert isinstance(each.message, OfOpinion)
            if (each.message.relay, each.message.opinion) == key:
                auditor.received(each)
            else:
                self._early.append(each)

    def _judged(self, judge: StageJudge) -> None:
        """Have a judge begin, unless it would have to wait for another state."""
        stage = self._context.view.by_id[judge.case.relay].stage_index
        place = (stage, self._context.opening.anchor.number)
        if self._fetching - {place}:
            # A link may be too slow for all of them. They would fill the memory of who gives them.
            judge.give_up("another stage's state, or an earlier one, is still on its way")
            return
        # Who is alone in its stage has no average.
        num = self._averager.found.num or len(self._microbatches.folded)
        judge.fetch(num, self._hashes.get(stage, ""), asks=place not in self._fetching)
        self._judge = judge
        self._fetching.add(place)

    def _tell_of_passes(self, case: AuditCase) -> None:
        """Tell auditors what this node has sent to a relay for its passes, and the proof of what it
        got; or, as the relay, the same of all its neighbours.
        """
        context = self._context
        relay = case.relay
        for held, is_gradient in product(self._microbatches.dealt_with(relay), (False, True)):
            end = held.upstream if is_gradient else held.downstream
            if relay not in (end, context.node_id):
                continue
            auditor = case.auditor_of(held.microbatch)
            got = held.proofs.get(not is_gradient, b"")
            about = (context.averaging, relay, case.opinion, held.microbatch, is_gradient, got)
            told = AuditedTensor(*about)
            tensor = held.backward if is_gradient else held.forward
            if tensor is None:
                self._out.send(auditor, told)
            elif auditor == context.node_id:
                kept = Tensor(context.tensors.retain(tensor), context.tensors.size_of(tensor))
                self._taken(Received(auditor, told, kept))
            else:
                self._out.put(SendTensor(auditor, told, context.tensors.retain(tensor)))

    def _tell_of_parts(self, case: AuditCase) -> None:
        """Tell auditors what a relay has contributed to the parts that this node has reduced."""
        relay = case.relay
        for given in self._witnessed.contributed:
            if given.contributor != relay:
                continue
            about = (self._context.averaging, relay, case.opinion, given.part)
            told = AuditedPart(*about, given.weight.num, given.weight.digest, b"")
            if given.tensor is None:
                self._out.send_all(case.auditors, told)
            else:
                self._sketch(case, [given], _Telling(self, case.auditors, told))

    def _tell_of_shares(self, case: AuditCase) -> None:
        """Tell the first auditor what went into the part of the average that a relay has reduced:
        what this node gave for it; or, of the relay itself, what it got of each member.
        """
        known = [each for each in self._witnessed.contributed if each.owner == case.relay]
        given = [each for each in known if each.tensor is not None]
        nothing = tuple((each.contributor, b"") for each in known if each.tensor is None)
        told = AuditedShares(self._context.averaging, case.relay, case.opinion, nothing)
        if not given:
            self._out.send(case.auditors[0], told)
        else:
            names = tuple(each.contributor for each in given)
            self._sketch(case, given, _Telling(self, case.auditors[:1], told, names))

    def _sketch(self, case: AuditCase, given: Sequence[Contributed], owner: "_Telling") -> None:
        """Have contributions to one part sketched."""
        job = SketchPart(given[0].part, self._averager.num_parts, case.seed)
        tensors = [each.tensor for each in given if each.tensor is not None]
        inputs = [self._context.tensors.retain(tensor) for tensor in tensors]
        self._context.compute.submit(job, owner, inputs)

    def tell(self, auditors: Sequence[NodeId], message: Message) -> None:
        """Tell auditors what they wait for, unless the average has ended."""
        if not self.over:
            self._out.send_all(auditors, message)


@dataclass(slots=True)
class _Telling:
    """What auditors are to be told, as soon as the device has made a sketch for it."""

    audits: Audits
    auditors: tuple[NodeId, ...]
    told: AuditedPart | AuditedShares
    contributors: tuple[NodeId, ...] = ()
    """Whose contributions are sketched, if they are shares."""

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        assert isinstance(event.result, Sketched), event
        self.audits.tell(self.auditors, self._with(event.result.sketches))

    def _with(self, sketches: Sequence[bytes]) -> Message:
        told = self.told
        if isinstance(told, AuditedShares):
            shares = tuple(zip(self.contributors, sketches, strict=True))
            return replace(told, shares=told.shares + shares)
        return replace(told, sketch=sketches[0])

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        # They are told that there is nothing.
        self.audits.tell(self.auditors, self.told)
