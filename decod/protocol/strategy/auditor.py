"""A member does the work of another member of its stage again, and compares.

Both hold the same parameters. So from the same activations and gradients, the auditor gets the same
results, but for what their devices do differently. It gets the inputs from those who gave them to
the audited relay, and sketches of the relay's results from those who got them.

A relay is audited for a whole iteration, since a sum of gradients can only be checked as a whole.
Several auditors share its microbatches. The first of them adds up the sketches of all gradients,
and compares the sum with what the relay has contributed.

The relay has also reduced a part of the average (`decod.protocol.strategy.reduction_check`). The
audit is over when passes, contribution and that part have been compared.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.averaging.averager import Averager
from decod.protocol.core.context import Context
from decod.protocol.core.digest import add_digests, digest_of
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.events import JobFinished, Received
from decod.protocol.core.jobs import Job, Replayed, ReplayPasses, Sketched, SketchPart
from decod.protocol.core.messages import (
    AuditedInput,
    AuditedPart,
    AuditedPass,
    AuditedShares,
    AuditedTensor,
    AuditResult,
)
from decod.protocol.core.messages.audits import FINDINGS_MAX, AuditCase, AuditedWork, Finding
from decod.protocol.core.sketch import ERROR_MAX, Sketch, added, error_of
from decod.protocol.strategy.reduction_check import ReductionCheck

_NONE: Mapping[NodeId, float] = {}


@dataclass(frozen=True, slots=True)
class _Given:
    """What one neighbour of the relay has told of a microbatch."""

    witness: NodeId
    tensor: TensorId
    sketch: bytes


class Auditor:
    """One member's part in the audit of a relay's work of one iteration.

    Args:
        context: The node's.
        case: The relay, and its auditors. This node is one of them.
    """

    def __init__(self, context: Context, case: AuditCase) -> None:
        self._context, self.case = context, case
        stage = context.member.stage_index
        self._roster = [member.node_id for member in context.view.roster(stage)]
        self._parts: dict[NodeId, AuditedPart] = {}
        """What the relay has contributed, by the member that has reduced the part."""
        self._reduction = ReductionCheck(case, self._roster)
        self._num_averaged = 0
        self._closes = False
        """Nothing that the relay says itself is waited for any longer."""
        self._given: dict[tuple[MicrobatchId, bool], _Given] = {}
        self._seen: set[tuple[MicrobatchId, bool]] = set()
        self._got: dict[tuple[MicrobatchId, bool], bytes] = {}
        """What the relay says that it got."""
        self._witnesses: dict[MicrobatchId, tuple[NodeId, NodeId]] = {}
        """Of what is being replayed: who got the relay's activation, and who its gradient."""
        self._passes: dict[MicrobatchId, tuple[NodeId, AuditedPass]] = {}
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
        waiting = {microbatch for microbatch, _ in self._given}
        begun = [effect for each in sorted(waiting) for effect in self._replay(each)]
        return begun + self._compare()

    def abandon(self) -> list[Effect]:
        """Release what is held."""
        self._over = True
        tensors = [given.tensor for given in self._given.values()]
        self._given.clear()
        return self._context.tensors.release(*tensors)

    # --- what others tell ---------------------------------------------------------------------

    def received(self, received: Received) -> list[Effect]:
        """Take in what a member knows of the relay's work. Its tensor is held already."""
        message, sender = received.message, received.sender
        match message:
            case AuditedInput():
                return self._input(sender, message)
            case AuditedPart():
                return self._part(sender, message)
            case AuditedShares():
                self._reduction.told(sender, message)
                return self._compare()
            case AuditedPass():
                return self._found(sender, message)
        assert isinstance(message, AuditedTensor), message
        key, tensor = (message.microbatch, message.is_gradient), received.tensor
        full = len(self._seen) >= self._num_inputs_max
        if self._over or key in self._seen or full or not self._is_neighbour(sender, message):
            return [] if tensor is None else self._context.tensors.release(tensor.id)
        self._seen.add(key)
        if tensor is None:
            reason = f"{sender[:8]} has not kept microbatch {message.microbatch}"
            return self._tell(self._failed(message.microbatch, reason))
        self._given[key] = _Given(sender, tensor.id, message.sketch)
        return self._replay(message.microbatch)

    @property
    def _num_inputs_max(self) -> int:
        """Nobody has worked on more microbatches than there are. Each has two inputs."""
        return 2 * self._num_averaged

    def _input(self, sender: NodeId, message: AuditedInput) -> list[Effect]:
        if sender != self.case.relay or len(self._got) >= self._num_inputs_max:
            return []
        self._got.setdefault((message.microbatch, message.is_gradient), message.sketch)
        return self._replay(message.microbatch)

    def _is_neighbour(self, sender: NodeId, message: AuditedTensor) -> bool:
        """Whether a member is of the stage that has dealt with the relay in this way."""
        view, stage = self._context.view, self._context.member.stage_index
        there = stage + 1 if message.is_gradient else stage - 1
        return view.by_id[sender].stage_index == there % view.num_stages

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
    def _claim(self) -> tuple[int, int] | None:
        """What most owners of parts say that the relay has contributed: microbatches and digest."""
        claims = Counter((part.num_microbatches, part.digest) for part in self._parts.values())
        ((claim, num_alike),) = claims.most_common(1)
        return claim if num_alike * 2 > len(self._parts) else None

    # --- passes -------------------------------------------------------------------------------

    def _replay(self, microbatch: MicrobatchId) -> list[Effect]:
        """Repeat both passes of a microbatch, if all that is needed is here."""
        keys = [(microbatch, is_gradient) for is_gradient in (False, True)]
        before, behind = map(self._given.get, keys)
        answered = self._closes or all(key in self._got for key in keys)
        if before is None or behind is None or not answered or self._over:
            return []
        del self._given[microbatch, False], self._given[microbatch, True]
        self._witnesses[microbatch] = behind.witness, before.witness
        # Who sends a gradient has got the relay's activation, and the other way round.
        got, got_back = (self._got.get(key, b"") for key in keys)
        of_parts = len(self._roster), self.case.seed
        job = ReplayPasses(microbatch, behind.sketch, before.sketch, got, got_back, *of_parts)
        return self._context.compute.submit(job, self, [before.tensor, behind.tensor])

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """Passes were replayed, or a mean was sketched."""
        result = event.result
        if isinstance(result, Sketched):
            self._reduction.averaged(result.sketches[0], self._num_averaged)
            return self._compare()
        assert isinstance(job, ReplayPasses), job
        assert isinstance(result, Replayed), event
        behind, before = self._witnesses.pop(job.microbatch)
        tolerance = self._context.audits.tolerance
        got_errors = (before, result.got_activation_error), (behind, result.got_gradient_error)
        doubted = {giver for giver, error in got_errors if error > tolerance}
        # Who got a result may lie about it, and who gave what the relay doubts.
        findings = (
            Finding(AuditedWork.PASSES, result.activation_error, tuple(sorted({behind} | doubted))),
            Finding(AuditedWork.PASSES, result.gradient_error, tuple(sorted({before} | doubted))),
        )
        about = (self.case.relay, self.case.opinion, job.microbatch)
        found = AuditedPass(
            self._context.averaging, *about, findings, tuple(sorted(doubted)), result.sketches
        )
        return self._tell(found)

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """The device can't work with what others have told."""
        if isinstance(job, SketchPart):
            return self._end(failure=reason)
        assert isinstance(job, ReplayPasses), job
        return self._tell(self._failed(job.microbatch, reason))

    def _failed(self, microbatch: MicrobatchId, reason: str) -> AuditedPass:
        about = (self.case.relay, self.case.opinion, microbatch)
        return AuditedPass(self._context.averaging, *about, failure=reason[:200])

    def _tell(self, found: AuditedPass) -> list[Effect]:
        return [] if self._over else [Send(self.case.auditors[0], found)]

    # --- the whole ----------------------------------------------------------------------------

    def _found(self, sender: NodeId, message: AuditedPass) -> list[Effect]:
        """One of the auditors has replayed a microbatch."""
        expected = self.case.auditor_of(message.microbatch) == sender and self._leads
        if self._over or not expected or message.microbatch in self._passes:
            return []
        if message.failure:
            return self._end(failure=message.failure)
        self._passes[message.microbatch] = sender, message
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
        context, found = self._context, [] if failure else self._found_wrong(errors)
        about = (self.case.relay, self.case.opinion, len(self._passes))
        told = tuple(sorted(found, key=lambda each: -each.error)[:FINDINGS_MAX])
        result = AuditResult(context.averaging, *about, failure[:200], told)
        return [*self.abandon(), Send(context.view.leader, result)]

    def _found_wrong(self, errors: Mapping[NodeId, float]) -> list[Finding]:
        """Return what is wrong, and who else may have made it look so.

        Who got the result of a pass may lie about it. So may who gave the relay what it worked
        with, if the relay doubts that: then its gradient is not known either.
        """
        worst, relay = dict[tuple[AuditedWork, frozenset[NodeId]], float](), self.case.relay
        lead_astray = frozenset[NodeId]()

        def note(work: AuditedWork, suspects: frozenset[NodeId], error: float) -> None:
            if error > self._context.audits.tolerance:
                worst[work, suspects] = max(error, worst.get((work, suspects), 0.0))

        for _, message in self._passes.values():
            lead_astray |= {*message.doubted}
            for found in message.findings:
                note(AuditedWork.PASSES, frozenset(found.suspects), found.error)
        for owner, part in self._parts.items():
            note(AuditedWork.CONTRIBUTION, lead_astray | {owner}, self._error_of(part))
        for node, error in errors.items():
            note(AuditedWork.MEAN, lead_astray | ({node} - {relay}), error)
        return [Finding(work, error, tuple(sorted(who))) for (work, who), error in worst.items()]

    def _replayed(self, part: int) -> list[Sketch]:
        """Return the sketches of one part of all gradients.

        Raises:
            ValueError: An auditor has sent others.
            IndexError: An auditor has sent too few.
        """
        found = [message.sketches[part] for _, message in self._passes.values()]
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
        relay, tolerance = self.case.relay, self._context.audits.tolerance
        try:
            return self._reduction.found(self._replayed(self._roster.index(relay)), tolerance)
        except (ValueError, IndexError):
            return {relay: ERROR_MAX}
