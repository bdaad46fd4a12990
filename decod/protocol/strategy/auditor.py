"""A member does the work of another member of its stage again, and compares.

Both hold the same parameters. So from the same activations and gradients, the auditor gets the same
results, but for what their devices do differently. What the relay has worked with and what it has
made of it is proven (`Evidence`).

A relay is audited for a whole iteration, since a sum of gradients can only be checked as a whole.
Several auditors share its microbatches. The first of them adds up the sketches of all gradients,
and compares the sum with what the relay has contributed.

The relay has also reduced a part of the average (`ReductionCheck`). The audit is over when passes,
contribution and that part have been compared.

Of a stage with two members, a data node judges between the two (`StageJudge`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.averaging.averager import Averager
from decod.protocol.core.context import Context
from decod.protocol.core.effects import FetchState
from decod.protocol.core.events import JobFinished, Received, StateFetched, StateFetchFailed, Tensor
from decod.protocol.core.fingerprints import (
    ERROR_MAX,
    NUM_SUMS,
    Sketch,
    add_digests,
    added,
    digest_of,
    error_of,
)
from decod.protocol.core.jobs import (
    Built,
    Job,
    Replayed,
    ReplayPasses,
    Sketched,
    SketchPart,
    StandIn,
)
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
from decod.protocol.core.proofs import Subject, digest_in
from decod.protocol.core.view import Role

_OWN_PER_MICROBATCH = 3
"""Tensors of a microbatch that a relay keeps at most."""

_LIES = Finding(AuditedWork.WORD, ERROR_MAX)


@dataclass(frozen=True, slots=True)
class Told:
    """What one end of a link has told of a microbatch."""

    tensor: Tensor | None
    """What this end has sent to the other. None: it has not kept that."""
    proof: bytes
    """Of what came from there."""

    @property
    def digest(self) -> bytes:
        """Of the tensor."""
        return self.tensor.digest if self.tensor is not None else b""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known for sure of a relay's passes of a microbatch.

    Each end of a link of the relay's tells the auditor what it has sent, and shows the other's
    proof of what came (`decod.protocol.core.proofs`). So it is known for sure what the relay has
    worked with, and what it has made of it:

        a neighbour has told other bytes than it has signed      -> it lies
        the relay has no proof of what came                      -> the relay lies
        the relay has told other bytes than it has signed        -> the relay lies
        the neighbour shows no proof of what the relay has sent  -> nobody has used it

    If a member is lost, another of its stage tells what it has in its stead. That is about the
    same, but not to the bit. So then nobody is found to lie because of it.
    """

    findings: tuple[Finding, ...] = ()
    """Somebody lies. Then nothing else is known."""
    failure: str = ""
    """Why nothing is known; empty if something is."""
    given: tuple[Tensor, ...] = ()
    """What the relay has worked with: an activation and a gradient."""
    activation: Tensor | None = None
    """What the relay has made of the input, if somebody has used that."""
    gradient: Tensor | None = None
    doubted: bool = False
    """A member that is gone gave the relay something else."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that is to be computed with."""
        made = (self.activation, self.gradient)
        return [*self.given, *(each for each in made if each is not None)]


_SILENT = Evidence((Finding(AuditedWork.SILENCE, ERROR_MAX),))


class PassProofs:
    """Weighs what is told of a relay's passes.

    Args:
        context: Of an auditor, which is of the relay's stage.
        relay: The relay.
        lost: Who was a member when the iteration was opened, and is gone.
    """

    def __init__(self, context: Context, relay: NodeId, lost: Collection[NodeId]) -> None:
        self._context = context
        self._relay = relay
        self._lost = lost

    def is_neighbour(self, node: NodeId | None, *, is_gradient: bool) -> bool:
        """Whether a member is of the stage that has given the relay what it worked with."""
        view = self._context.view
        member = view.by_id.get(node) if node is not None else None
        there = view.by_id[self._relay].stage_index + (1 if is_gradient else -1)
        return member is not None and member.stage_index == there % view.num_stages

    def weigh(
        self,
        microbatch: MicrobatchId,
        told: Mapping[tuple[bool, NodeId], Told],
        *,
        num_microbatches: int,
        closes: bool,
    ) -> Evidence | None:
        """Return what is known of a microbatch; None: more is awaited.

        Args:
            microbatch: It.
            told: By whether it is a gradient that was sent, and who tells.
            num_microbatches: The most that a relay can have worked on.
            closes: The relay is not waited for any longer.
        """
        on, back = (told.get((is_gradient, self._relay)) for is_gradient in (False, True))
        if on is None or back is None:
            # A neighbour on either side must say that the relay has worked on it.
            sides = {is_gradient for is_gradient, node in told if node != self._relay}
            return _SILENT if closes and len(sides) == 2 else None
        # Who has sent an activation has got a gradient, and the other way round.
        signers = [
            self._giver(back.proof, microbatch, is_gradient=False),
            self._giver(on.proof, microbatch, is_gradient=True),
        ]
        given = [self._told_by(signer, told, g) for g, signer in enumerate(signers)]
        if None in signers:
            return Evidence((_LIES,))
        before, behind = given
        if before is None or behind is None:
            return None
        if None in (before.tensor, behind.tensor):
            return Evidence(failure="a neighbour has not kept what it gave the relay")
        if on.tensor is None or back.tensor is None:
            return self._not_kept(before, num_microbatches)
        return self._compared(microbatch, signers, (before, behind), (on, back))

    def _not_kept(self, before: Told, num_microbatches: int) -> Evidence:
        """Return what follows if the relay says that it has not kept what it has sent."""
        size_bytes = before.tensor.size_bytes if before.tensor is not None else 0
        room_bytes = self._context.run.protocol.keep_max_bytes
        if _OWN_PER_MICROBATCH * num_microbatches * size_bytes <= room_bytes:
            return _SILENT
        return Evidence(failure="the relay had no room to keep what it has sent")

    def _compared(
        self,
        microbatch: MicrobatchId,
        signers: Sequence[NodeId | None],
        given: tuple[Told, Told],
        own: tuple[Told, Told],
    ) -> Evidence:
        """Compare tensors with their proofs: activations, and then gradients."""
        findings = list[Finding]()
        doubted = False
        used = list[Tensor | None]()
        for giver, told, shown in zip(signers, given, own[::-1], strict=True):
            if giver == self._context.node_id or told.digest == digest_in(shown.proof):
                continue  # What this node gives itself has not travelled, and has no hash.
            if giver in self._lost:
                doubted = True
                continue
            assert giver is not None
            if self._context.view.by_id[giver].role is Role.DATA:
                return Evidence(failure="a data node has told something else than it has signed")
            findings.append(Finding(AuditedWork.GIFT, ERROR_MAX, (giver,)))
        for is_gradient, (told, shown) in enumerate(zip(own, given[::-1], strict=True)):
            subject = Subject(self._context.iteration, microbatch, bool(is_gradient))
            signed = self._context.proofs.signer_of(shown.proof, subject) == self._relay
            used.append(told.tensor if signed else None)
            if signed and told.digest != digest_in(shown.proof):
                findings.append(_LIES)
        if findings:
            return Evidence(tuple(dict.fromkeys(findings)))
        tensors = tuple(told.tensor for told in given if told.tensor is not None)
        on, back = used
        return Evidence(given=tensors, activation=on, gradient=back, doubted=doubted)

    def _giver(self, proof: bytes, microbatch: MicrobatchId, *, is_gradient: bool) -> NodeId | None:
        """Return who has signed what the relay has worked with; None if nobody could have."""
        subject = Subject(self._context.iteration, microbatch, is_gradient)
        signer = self._context.proofs.signer_of(proof, subject)
        known = signer in self._lost or self.is_neighbour(signer, is_gradient=is_gradient)
        return signer if known else None

    def _told_by(
        self, giver: NodeId | None, told: Mapping[tuple[bool, NodeId], Told], is_gradient: int
    ) -> Told | None:
        """Return what a giver tells, or another of its stage in its stead."""
        if giver in self._lost:
            others = (told[g, n] for g, n in told if g == is_gradient and n != self._relay)
            return next(others, None)
        return None if giver is None else told.get((bool(is_gradient), giver))


class ReductionCheck:
    """The check of one relay's part of the average, by its first auditor.

    The mean, times the microbatches in it, is the sum of all contributions. Each other member of
    the stage tells the auditor a sketch of what it gave. What the relay gave itself was done again.
    The signs of all these sketches were drawn when all members had the mean already.

    If the mean is not that sum, somebody lies: the relay, or a member about what it gave. Therefore
    the relay tells what it got of each member. If that does not add up to the mean either, or the
    relay has told nothing, it is the relay that lies. Otherwise it differs with some members about
    what they gave (`decod.protocol.leadership.relay_audits` says who is believed).

    Args:
        case: The relay, and the seed of all sketches.
        roster: The members of its stage.
    """

    def __init__(self, case: AuditCase, roster: Sequence[NodeId]) -> None:
        self._relay = case.relay
        self._seed = case.seed
        self._roster = frozenset(roster)
        self._sum: Sketch | None = None
        self._given: dict[NodeId, Sketch] = {}
        """What each other member says that it gave."""
        self._got: dict[NodeId, Sketch] = {}
        """What the relay says that it got of each member."""

    def averaged(self, mean: bytes, num_microbatches: int) -> None:
        """Take in the sketch of the mean that the relay has sent to all."""
        sums = Sketch.from_bytes(mean).sums
        self._sum = Sketch(self._seed, tuple(each * num_microbatches for each in sums))

    def told(self, sender: NodeId, message: AuditedShares) -> None:
        """Take in what a member says of contributions. What it says first of each counts."""
        for contributor, data in message.shares:
            try:
                sketch = Sketch.from_bytes(data) if data else self._zero
            except ValueError:
                continue
            known = contributor in self._roster and sketch.seed == self._seed
            if known and sender in (self._relay, contributor):
                told = self._got if sender == self._relay else self._given
                told.setdefault(contributor, sketch)

    @property
    def _zero(self) -> Sketch:
        return Sketch(self._seed, (0.0,) * NUM_SUMS)

    @property
    def complete(self) -> bool:
        """Whether all is known but what the relay itself says."""
        return self._sum is not None and self._given.keys() == self._roster - {self._relay}

    @property
    def answered(self) -> bool:
        """Whether the relay has said all that it got. It matters only if something is wrong."""
        return self._got.keys() == self._roster

    def found(self, replayed: Sequence[Sketch], tolerance: float) -> dict[NodeId, float]:
        """Return with whom the relay differs, and how much; with itself if it must be lying.

        Args:
            replayed: What the relay should have given itself, microbatch by microbatch.
            tolerance: What is less far off is right.
        """
        assert self._sum is not None
        relay = self._relay
        given = {**self._given, relay: added([*replayed, self._zero])}
        error = error_of(self._sum, added([*given.values()]))
        if error <= tolerance:
            return {}
        if not self.answered:
            return {relay: error}
        errors = {node: error_of(self._got[node], given[node]) for node in sorted(given)}
        own_error = error_of(self._sum, added([*self._got.values()]))
        errors[relay] = max(errors[relay], own_error)
        return {node: each for node, each in errors.items() if each > tolerance}


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
        self._context = context
        self._out = context.out
        self.case = case
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

    def begin(self, averager: Averager, means: Mapping[int, TensorId]) -> None:
        """Have the part of the average sketched that the relay has reduced.

        Args:
            averager: This node's.
            means: Of parts, as far as this node has kept them.
        """
        part = self._roster.index(self.case.relay)
        context = self._context
        mean = means.get(part)
        self._num_averaged = averager.found.num
        if self._leads and mean is not None:
            job = SketchPart(part, averager.num_parts, self.case.seed, is_mean=True)
            context.compute.submit(job, self, [context.tensors.retain(mean)])

    def close(self) -> None:
        """The leader's patience is over: what the relay has not said yet counts against it."""
        self._closes = True
        for each in sorted(self._told):
            self._replay(each)
        self._compare()

    def abandon(self) -> None:
        """Release what is held."""
        self._over = True
        told = [each for of_one in self._told.values() for each in of_one.values()]
        self._told.clear()
        self._released(told)

    def _released(self, told: Collection[Told], but: Collection[Tensor] = ()) -> None:
        tensors = [each.tensor for each in told if each.tensor not in (None, *but)]
        self._context.tensors.release(*(tensor.id for tensor in tensors if tensor))

    # --- what others tell ---------------------------------------------------------------------

    def received(self, received: Received) -> None:
        """Take in what a member knows of the relay's work. Its tensor is held already."""
        message = received.message
        sender = received.sender
        match message:
            case AuditedPart():
                self._part(sender, message)
            case AuditedShares():
                self._reduction.told(sender, message)
                self._compare()
            case AuditedPass():
                self._found(sender, message)
            case AuditedTensor():
                self._tensor(sender, message, received.tensor)

    def _tensor(self, sender: NodeId, message: AuditedTensor, tensor: Tensor | None) -> None:
        key = (message.microbatch, message.is_gradient, sender)
        if self._over or key in self._seen or not self._has_room(sender, message):
            if tensor is not None:
                self._context.tensors.release(tensor.id)
            return
        self._seen.add(key)
        told = self._told.setdefault(message.microbatch, {})
        told[message.is_gradient, sender] = Told(tensor, message.proof)
        self._replay(message.microbatch)

    def _has_room(self, sender: NodeId, message: AuditedTensor) -> bool:
        """Whether a member may tell, and has not told of more microbatches than there are.

        Who tells what nobody asked for takes no room of the relay's, and not all of the others'.
        """
        most = 2 * self._num_averaged
        relay = self.case.relay
        if sum(teller == sender for *_, teller in self._seen) >= most:
            return False
        if sender == relay:
            return True
        few = sum(teller != relay for *_, teller in self._seen) < 2 * most
        return few and self._proofs.is_neighbour(sender, is_gradient=message.is_gradient)

    def _part(self, sender: NodeId, message: AuditedPart) -> None:
        is_owner = message.part < len(self._roster) and self._roster[message.part] == sender
        if self._over or not is_owner or sender in self._parts:
            return
        self._parts[sender] = message
        self._compare()

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

    def _replay(self, microbatch: MicrobatchId) -> None:
        """Repeat both passes of a microbatch, if all that is needed is here."""
        told = self._told.get(microbatch)
        if told is None or self._over or not self._may_replay:
            return
        num = self._num_averaged
        evidence = self._proofs.weigh(microbatch, told, num_microbatches=num, closes=self._closes)
        if evidence is None:
            return
        del self._told[microbatch]
        self._released(told.values(), but=evidence.tensors)
        if evidence.findings or evidence.failure:
            found = evidence.findings
            self._tell(microbatch, findings=found, failure=evidence.failure)
            return
        if evidence.doubted:
            self._doubted.add(microbatch)
        made = (evidence.activation is not None, evidence.gradient is not None)
        job = ReplayPasses(microbatch, *made, len(self._roster), self.case.seed, self.beside)
        inputs = [tensor.id for tensor in evidence.tensors]
        self._context.compute.submit(job, self, inputs)

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        """Passes were replayed, or a mean was sketched."""
        result = event.result
        if isinstance(result, Sketched):
            self._reduction.averaged(result.sketches[0], self._num_averaged)
            self._compare()
            return
        assert isinstance(job, ReplayPasses), job
        assert isinstance(result, Replayed), event
        error = max(result.activation_error, result.gradient_error)
        wrong = error > self._context.run.audits.tolerance
        if wrong and job.microbatch in self._doubted:
            self._tell(job.microbatch, failure=_GONE)
        else:
            findings = (Finding(AuditedWork.PASSES, error),) if wrong else ()
            self._tell(job.microbatch, findings=findings, sketches=result.sketches)

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """The device can't work with what others have told."""
        if isinstance(job, SketchPart):
            self._end(failure=reason)
        else:
            assert isinstance(job, ReplayPasses), job
            self._tell(job.microbatch, failure=reason)

    def _tell(
        self,
        microbatch: MicrobatchId,
        *,
        findings: tuple[Finding, ...] = (),
        sketches: tuple[bytes, ...] = (),
        failure: str = "",
    ) -> None:
        """Tell the first auditor what was found of a microbatch."""
        about = (self._context.averaging, self.case.relay, self.case.opinion, microbatch)
        doubted = microbatch in self._doubted
        found = AuditedPass(*about, findings, doubted, sketches, failure[:200])
        if not self._over:
            self._out.send(self.case.auditors[0], found)

    # --- the whole ----------------------------------------------------------------------------

    def _found(self, sender: NodeId, message: AuditedPass) -> None:
        """One of the auditors has replayed a microbatch."""
        expected = self.case.auditor_of(message.microbatch) == sender and self._leads
        if self._over or not expected or message.microbatch in self._passes:
            return
        if message.failure:
            self._end(failure=message.failure)
        else:
            self._passes[message.microbatch] = message
            self._compare()

    def _compare(self) -> None:
        """Compare the relay's contribution, when all that should be in it was replayed."""
        if self._over or not self._leads or not self._all_parts or not self._reduction.complete:
            return
        digest = add_digests(digest_of([microbatch]) for microbatch in self._passes)
        if self._claim is None:
            self._end(failure="members differ in what the relay has contributed")
        elif any(part.num_microbatches and not part.sketch for part in self._parts.values()):
            self._end(failure="a member does not know what the relay has contributed")
        elif self._claim != (len(self._passes), digest):
            return  # More is to come. If it does not, the leader ends the audit.
        elif not self._all_sketched:
            self._end()
        else:
            errors = self._reduction_errors()
            # The relay may say who else lies.
            if not errors or self._reduction.answered or self._closes:
                self._end(errors)

    def _end(self, errors: Mapping[NodeId, float] = _NONE, failure: str = "") -> None:
        """Tell the leader what was found, once.

        Args:
            errors: In the part of the average that the relay has reduced.
            failure: Why the audit could not be finished; empty if it was.
        """
        found = [] if failure else self._found_wrong(errors)
        doubted = any(message.doubted for message in self._passes.values())
        if found and doubted and all(each.work in _SUMS for each in found):
            found = []
            failure = _GONE
        about = (self._context.averaging, self.case.relay, self.case.opinion, len(self._passes))
        told = tuple(sorted(found, key=lambda each: -each.error)[:FINDINGS_MAX])
        result = AuditResult(*about, failure[:200], told)
        self.abandon()
        self._out.send(self._context.view.leader, result)

    def _found_wrong(self, errors: Mapping[NodeId, float]) -> list[Finding]:
        """Return what is wrong, and who else may have made it look so."""
        worst = dict[tuple[AuditedWork, frozenset[NodeId]], float]()
        relay = self.case.relay

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
        relay = self.case.relay
        tolerance = self._context.run.audits.tolerance
        try:
            return self._reduction.found(self._replayed(self._roster.index(relay)), tolerance)
        except (ValueError, IndexError):
            return {relay: ERROR_MAX}


class StageJudge(Auditor):
    """A data node's part in the audit of a relay's work of one iteration.

    The data node is of another stage. So it fetches the parameters that both have computed with,
    has its device build the stage beside its own, and repeats the relay's passes there. The
    parameters are those that all members have voted on, so neither of the two can give false ones.
    One pass that is proven wrong is enough.

    The data node has no part in the stage's average. Of what the relay has contributed it only
    knows what the other says.
    """

    beside = True
    _asked = _stands = False
    """Whether the parameters are on their way; whether the stage is built."""

    def fetch(self, num_microbatches: int, parameter_hash: str, *, asks: bool = True) -> None:
        """Get the stage's parameters.

        Args:
            num_microbatches: In the iteration.
            parameter_hash: Of the parameters. Empty: it is not known.
            asks: They are not on their way yet.
        """
        context = self._context
        relay = self.case.relay
        self._num_averaged = num_microbatches
        self._asked = True
        if asks:
            donors = (*(node for node in self._roster if node != relay), relay)
            stage = context.view.by_id[relay].stage_index
            iteration = context.opening.anchor.number
            # Rounded parameters have no hash that was voted on.
            whole = context.run.rounded
            state = FetchState(
                donors,
                stage,
                iteration,
                parameter_hash,
                with_optimizer=whole,
                cut=context.view.cut,
            )
            self._out.put(state)

    def takes(self, event: StateFetched | StateFetchFailed) -> bool:
        """Whether an event is about what this judge has asked for."""
        stage = self._context.view.by_id[self.case.relay].stage_index
        mine = (event.stage_index, event.iteration) == (stage, self._context.opening.anchor.number)
        return mine and self._asked and not self._over

    def fetched(self, event: StateFetched) -> None:
        """The parameters are here."""
        context = self._context
        self._asked = False
        tensor = context.tensors.add(event.tensor)
        of = (event.stage_index, event.iteration, event.manifest, context.run.rounded)
        context.compute.submit(StandIn(*of, context.view.cut), self, [tensor])

    def give_up(self, reason: str) -> None:
        """Tell the leader that this node can't judge."""
        self._asked = False
        self._end(failure=reason)

    @override
    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:
        if not isinstance(job, StandIn):
            super().job_done(now_s, job, event)
            return
        assert isinstance(event.result, Built), event
        self._stands = True
        for each in sorted(self._told):
            self._replay(each)

    @override
    def job_failed(self, now_s: float, job: Job, reason: str) -> None:
        if isinstance(job, StandIn):
            self._end(failure=reason)
        else:
            super().job_failed(now_s, job, reason)

    @property
    @override
    def _may_replay(self) -> bool:
        return self._stands

    @property
    def _complete(self) -> bool:
        """Whether all passes of the relay were repeated."""
        digest = add_digests(digest_of([microbatch]) for microbatch in self._passes)
        return self._all_parts and self._claim == (len(self._passes), digest)

    @property
    @override
    def _all_sketched(self) -> bool:
        return self._complete and super()._all_sketched

    @override
    def _compare(self) -> None:
        wrong = any(message.findings for message in self._passes.values())
        if not self._over and (wrong or self._complete):
            self._end()
