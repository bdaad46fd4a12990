"""A member does the work of another member of its stage again, and compares.

Both hold the same parameters. So from the same activations and gradients, the auditor gets the same
results, but for what their devices do differently. What the relay has worked with and what it has
made of it is proven (`decod.protocol.strategy.evidence`).

A relay is audited for a whole iteration, since a sum of gradients can only be checked as a whole.
Several auditors share its microbatches. The first of them adds up the sketches of all gradients,
and compares the sum with what the relay has contributed.

The relay has also reduced a part of the average (`decod.protocol.strategy.reduction_check`). The
audit is over when passes, contribution and that part have been compared.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from decod.ids import MicrobatchId, NodeId
from decod.protocol.averaging.averager import Averager
from decod.protocol.core.context import Context
from decod.protocol.core.digest import add_digests, digest_of
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.events import JobFinished, Received, Tensor
from decod.protocol.core.jobs import Job, Replayed, ReplayPasses, Sketched, SketchPart
from decod.protocol.core.messages import (
    AuditedPart,
    AuditedPass,
    AuditedShares,
    AuditedTensor,
    AuditResult,
)
from decod.protocol.core.messages.audit_messages import (
    FINDINGS_MAX,
    AuditCase,
    AuditedWork,
    Finding,
)
from decod.protocol.core.sketch import ERROR_MAX, Sketch, added, error_of
from decod.protocol.strategy.evidence import PassProofs, Told
from decod.protocol.strategy.reduction_check import ReductionCheck

_NONE: Mapping[NodeId, float] = {}

_SUMS = (AuditedWork.CONTRIBUTION, AuditedWork.MEAN)
"""Work to which each microbatch adds."""

_GONE = "what a member gave the relay that is gone is not known"


class Auditor:
    """One member's part in the audit of a relay's work of one iteration.

    `beside`: it is of another stage, and has that of the relay beside its own.

    Args:
        context: The node's.
        case: The relay, and its auditors. This node is one of them.
        lost: Who was a member when the iteration was opened, and is gone.
    """

    beside = False

    def __init__(self, context: Context, case: AuditCase, lost: Collection[NodeId] = ()) -> None:
        self._context, self.case = context, case
        stage = context.view.by_id[case.relay].stage_index
        self._roster = [member.node_id for member in context.view.roster(stage)]
        self._parts: dict[NodeId, AuditedPart] = {}
        """What the relay has contributed, by the member that has reduced the part."""
        self._reduction = ReductionCheck(case, self._roster)
        self._num_averaged = 0
        self._closes = False
        """Nothing that the relay says itself is waited for any longer."""
        self._proofs = PassProofs(context, case.relay, lost)
        self._told: dict[MicrobatchId, dict[tuple[bool, NodeId], Told]] = {}
        """By microbatch; then by whether the tensor is a gradient, and who tells."""
        self._seen: set[tuple[MicrobatchId, bool, NodeId]] = set()
        self._doubted: set[MicrobatchId] = set()
        self._passes: dict[MicrobatchId, AuditedPass] = {}
        """At the first auditor: what all of them have found."""
        self._over = False

    @property
    def _leads(self) -> bool:
        return self.case.auditors[0] == self._context.node_id

    def begin(self, averager: Averager) -> list[Effect]:
        """Have the part of the average sketched that the relay has reduced."""
        part, context = self._roster.index(self.case.relay), self._context
        mean = averager.mean_of(part)
        self._num_averaged = averager.found.num
        if not self._leads or mean is None:
            return []
        job = SketchPart(part, averager.num_parts, self.case.seed, is_mean=True)
        return context.compute.submit(job, self, [context.tensors.retain(mean)])

    def close(self) -> list[Effect]:
        """The leader's patience is over: what the relay has not said yet counts against it."""
        self._closes = True
        begun = [effect for each in sorted(self._told) for effect in self._replay(each)]
        return begun + self._compare()

    def abandon(self) -> list[Effect]:
        """Release what is held."""
        self._over = True
        told = [each for of_one in self._told.values() for each in of_one.values()]
        self._told.clear()
        return self._released(told)

    def _released(self, told: Collection[Told], but: Collection[Tensor] = ()) -> list[Effect]:
        tensors = [each.tensor for each in told if each.tensor not in (None, *but)]
        return self._context.tensors.release(*(tensor.id for tensor in tensors if tensor))

    # --- what others tell ---------------------------------------------------------------------

    def received(self, received: Received) -> list[Effect]:
        """Take in what a member knows of the relay's work. Its tensor is held already."""
        message, sender = received.message, received.sender
        match message:
            case AuditedPart():
                return self._part(sender, message)
            case AuditedShares():
                self._reduction.told(sender, message)
                return self._compare()
            case AuditedPass():
                return self._found(sender, message)
        assert isinstance(message, AuditedTensor), message
        key, tensor = (message.microbatch, message.is_gradient, sender), received.tensor
        if self._over or key in self._seen or not self._has_room(sender, message):
            return [] if tensor is None else self._context.tensors.release(tensor.id)
        self._seen.add(key)
        told = self._told.setdefault(message.microbatch, {})
        told[message.is_gradient, sender] = Told(tensor, message.proof)
        return self._replay(message.microbatch)

    def _has_room(self, sender: NodeId, message: AuditedTensor) -> bool:
        """Whether a member may tell, and has not told of more microbatches than there are.

        Who tells what nobody asked for takes no room of the relay's, and not all of the others'.
        """
        most, relay = 2 * self._num_averaged, self.case.relay
        if sum(teller == sender for *_, teller in self._seen) >= most:
            return False
        if sender == relay:
            return True
        few = sum(teller != relay for *_, teller in self._seen) < 2 * most
        return few and self._proofs.is_neighbour(sender, is_gradient=message.is_gradient)

    def _part(self, sender: NodeId, message: AuditedPart) -> list[Effect]:
        is_owner = message.part < len(self._roster) and self._roster[message.part] == sender
        if self._over or not is_owner or sender in self._parts:
            return []
        self._parts[sender] = message
        return self._compare()

    @property
    def _all_parts(self) -> bool:
        return self._parts.keys() == {*self._roster} - {self.case.relay}

    @property
    def _may_replay(self) -> bool:
        """Whether the stage's parameters are here."""
        return True

    @property
    def _all_sketched(self) -> bool:
        """Whether all gradients are known. A sum of which a term is not known says nothing."""
        return all(message.sketches for message in self._passes.values())

    @property
    def _claim(self) -> tuple[int, int] | None:
        """What most owners of parts say that the relay has contributed: microbatches and digest."""
        claims = Counter((part.num_microbatches, part.digest) for part in self._parts.values())
        ((claim, num_alike),) = claims.most_common(1)
        return claim if num_alike * 2 > len(self._parts) else None

    # --- passes -------------------------------------------------------------------------------

    def _replay(self, microbatch: MicrobatchId) -> list[Effect]:
        """Repeat both passes of a microbatch, if all that is needed is here."""
        told = self._told.get(microbatch)
        if told is None or self._over or not self._may_replay:
            return []
        num = self._num_averaged
        evidence = self._proofs.weigh(microbatch, told, num_microbatches=num, closes=self._closes)
        if evidence is None:
            return []
        del self._told[microbatch]
        effects = self._released(told.values(), but=evidence.tensors)
        if evidence.findings or evidence.failure:
            found, failure = evidence.findings, evidence.failure
            return effects + self._tell(microbatch, findings=found, failure=failure)
        if evidence.doubted:
            self._doubted.add(microbatch)
        made = (evidence.activation is not None, evidence.gradient is not None)
        job = ReplayPasses(microbatch, *made, len(self._roster), self.case.seed, self.beside)
        inputs = [tensor.id for tensor in evidence.tensors]
        return effects + self._context.compute.submit(job, self, inputs)

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """Passes were replayed, or a mean was sketched."""
        result = event.result
        if isinstance(result, Sketched):
            self._reduction.averaged(result.sketches[0], self._num_averaged)
            return self._compare()
        assert isinstance(job, ReplayPasses), job
        assert isinstance(result, Replayed), event
        error = max(result.activation_error, result.gradient_error)
        wrong = error > self._context.run.audits.tolerance
        if wrong and job.microbatch in self._doubted:
            return self._tell(job.microbatch, failure=_GONE)
        findings = (Finding(AuditedWork.PASSES, error),) if wrong else ()
        return self._tell(job.microbatch, findings=findings, sketches=result.sketches)

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """The device can't work with what others have told."""
        if isinstance(job, SketchPart):
            return self._end(failure=reason)
        assert isinstance(job, ReplayPasses), job
        return self._tell(job.microbatch, failure=reason)

    def _tell(
        self,
        microbatch: MicrobatchId,
        *,
        findings: tuple[Finding, ...] = (),
        sketches: tuple[bytes, ...] = (),
        failure: str = "",
    ) -> list[Effect]:
        """Tell the first auditor what was found of a microbatch."""
        about = (self._context.averaging, self.case.relay, self.case.opinion, microbatch)
        doubted = microbatch in self._doubted
        found = AuditedPass(*about, findings, doubted, sketches, failure[:200])
        return [] if self._over else [Send(self.case.auditors[0], found)]

    # --- the whole ----------------------------------------------------------------------------

    def _found(self, sender: NodeId, message: AuditedPass) -> list[Effect]:
        """One of the auditors has replayed a microbatch."""
        expected = self.case.auditor_of(message.microbatch) == sender and self._leads
        if self._over or not expected or message.microbatch in self._passes:
            return []
        if message.failure:
            return self._end(failure=message.failure)
        self._passes[message.microbatch] = message
        return self._compare()

    def _compare(self) -> list[Effect]:
        """Compare the relay's contribution, when all that should be in it was replayed."""
        if self._over or not self._leads or not self._all_parts or not self._reduction.complete:
            return []
        if self._claim is None:
            return self._end(failure="members differ in what the relay has contributed")
        if any(part.num_microbatches and not part.sketch for part in self._parts.values()):
            return self._end(failure="a member does not know what the relay has contributed")
        digest = add_digests(digest_of([microbatch]) for microbatch in self._passes)
        if self._claim != (len(self._passes), digest):
            return []  # More is to come. If it does not, the leader ends the audit.
        if not self._all_sketched:
            return self._end()
        errors = self._reduction_errors()
        if errors and not (self._reduction.answered or self._closes):
            return []  # The relay may say who else lies.
        return self._end(errors)

    def _end(self, errors: Mapping[NodeId, float] = _NONE, failure: str = "") -> list[Effect]:
        """Tell the leader what was found, once.

        Args:
            errors: In the part of the average that the relay has reduced.
            failure: Why the audit could not be finished; empty if it was.
        """
        found = [] if failure else self._found_wrong(errors)
        doubted = any(message.doubted for message in self._passes.values())
        if found and doubted and all(each.work in _SUMS for each in found):
            found, failure = [], _GONE
        about = (self._context.averaging, self.case.relay, self.case.opinion, len(self._passes))
        told = tuple(sorted(found, key=lambda each: -each.error)[:FINDINGS_MAX])
        result = AuditResult(*about, failure[:200], told)
        return [*self.abandon(), Send(self._context.view.leader, result)]

    def _found_wrong(self, errors: Mapping[NodeId, float]) -> list[Finding]:
        """Return what is wrong, and who else may have made it look so."""
        worst, relay = dict[tuple[AuditedWork, frozenset[NodeId]], float](), self.case.relay

        def note(work: AuditedWork, suspects: Collection[NodeId], error: float) -> None:
            if error > self._context.run.audits.tolerance:
                key = work, frozenset(suspects)
                worst[key] = max(error, worst.get(key, 0.0))

        for found in (each for message in self._passes.values() for each in message.findings):
            note(found.work, found.suspects, found.error)
        if self._all_sketched:
            for owner, part in self._parts.items():
                note(AuditedWork.CONTRIBUTION, (owner,), self._error_of(part))
            for node, error in errors.items():
                note(AuditedWork.MEAN, {node} - {relay}, error)
        return [Finding(work, error, tuple(sorted(who))) for (work, who), error in worst.items()]

    def _replayed(self, part: int) -> list[Sketch]:
        """Return the sketches of one part of all gradients.

        Raises:
            ValueError: An auditor has sent others.
            IndexError: An auditor has sent too few.
        """
        found = [message.sketches[part] for message in self._passes.values()]
        return [Sketch.from_bytes(each) for each in found]

    def _error_of(self, part: AuditedPart) -> float:
        """Return how far a part of the relay's contribution is from the sum of its gradients."""
        if (part.num_microbatches, part.digest) != self._claim:
            return ERROR_MAX  # Most owners say something else.
        if not self._passes:
            return 0.0
        try:
            return error_of(Sketch.from_bytes(part.sketch), added(self._replayed(part.part)))
        except (ValueError, IndexError):
            return ERROR_MAX

    def _reduction_errors(self) -> dict[NodeId, float]:
        """Return with whom the relay differs about the part that it has reduced, and how much."""
        relay, tolerance = self.case.relay, self._context.run.audits.tolerance
        try:
            return self._reduction.found(self._replayed(self._roster.index(relay)), tolerance)
        except (ValueError, IndexError):
            return {relay: ERROR_MAX}
