"""A data node judges between the only two of a stage, with the parameters that they have."""

from dataclasses import replace

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.averaging.averager import Averaging
from decod.protocol.core.effects import Effect, FetchState, StartJob
from decod.protocol.core.events import JobFailed, JobFinished, StateFetched, StateFetchFailed
from decod.protocol.core.fingerprints import NUM_SUMS, Sketch, digest_of
from decod.protocol.core.jobs import Built, JobResult
from decod.protocol.core.messages.audit_messages import (
    Audit,
    AuditCase,
    AuditedPart,
    AuditedTensor,
    AuditedWork,
    AuditResult,
)
from decod.protocol.core.messages.scopes import Message
from decod.protocol.strategy.microbatch import HeldMicrobatch
from decod.protocol.strategy.witnessing import Audits, WitnessedAverage
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R1B,
    R2A,
    Heard,
    context_of,
    flow,
    freed,
    received,
    reopen,
    sent,
    tensor,
    told_end,
    view_of,
)
from tests.unit.protocol.test_witnessing import DIGEST, MB, OTHER, Signed, proof

VIEW = view_of("d0", "r1a", "r1b", "r2a")
AVERAGING = AveragingId(ITERATION, 1)
HASH, SEED = "a" * 64, bytes(range(16))


class Injected:
    """The only microbatch of d0: it gave r1a the activation."""

    folded = (MB,)

    def __init__(self) -> None:
        self.held = HeldMicrobatch(MB, flow(0), (R1A, R2A), 0, 0)
        self.held.proofs[True] = proof(R1A, is_gradient=True)

    def dealt_with(self, relay: NodeId) -> list[HeldMicrobatch]:
        return [self.held] if relay == R1A else []


class Judging:
    """d0, which leads, judges r1a: r1b says that it lies."""

    def __init__(self, node: NodeId = D0) -> None:
        self.context = context_of(node, VIEW)
        self.context.proofs = Signed()
        self.injected = Injected()
        self.injected.held.forward = self.context.tensors.add(tensor(1))
        alone = WitnessedAverage(self.context, Averaging(AVERAGING, (node,)), user=None)
        self.asked: set[tuple[int, int]] = set()
        self.of = (self.context, self.injected, alone, (), {1: HASH}, self.asked)
        self.begun = self.again()

    def again(self) -> list[Effect]:
        """Begin the step again, and judge."""
        self.audits = Heard(Audits(*self.of))
        case = AuditCase(R1A, (self.context.node_id,), 3, SEED)
        return self.hear(D0, Audit(AVERAGING, (case,)))

    def hear(
        self, sender: NodeId, message: Message, number: int | None = None, digest: bytes = DIGEST
    ) -> list[Effect]:
        of = None if number is None else replace(tensor(number), digest=digest)
        return self.audits.received(received(sender, message, of))

    def fetched(self) -> list[Effect]:
        event = StateFetched(1, self.context.opening.anchor.number, "{}", tensor(9))
        assert self.audits.takes(event)
        return self.audits.fetched(event)

    def tell(self, digest: bytes = DIGEST) -> list[Effect]:
        """Let r2a and r1a tell what they have sent of r1a's passes, and r1b what it contributed."""
        about = (AVERAGING, R1A, 3, MB)
        sketch = Sketch(SEED, (1.0,) * NUM_SUMS).to_bytes()
        part = AuditedPart(AVERAGING, R1A, 3, 1, 1, digest_of([MB]), sketch)
        effects = self.hear(R1B, part)
        shown = proof(R1A, is_gradient=False)
        effects += self.hear(R2A, AuditedTensor(*about, True, shown), 2)
        effects += self.hear(R1A, AuditedTensor(*about, False, proof(R2A, is_gradient=True)), 3)
        mine = AuditedTensor(*about, True, proof(D0, is_gradient=False))
        return effects + self.hear(R1A, mine, 4, digest)

    def done(self, effects: list[Effect], result: JobResult) -> list[Effect]:
        """End the only job that effects start, and hear what this node tells itself."""
        (start,) = (e for e in effects if isinstance(e, StartJob))
        finished = JobFinished(start.job_id, result, (), duration_s=1.0)
        return self.heard(told_end(self.context, finished))

    def heard(self, effects: list[Effect]) -> list[Effect]:
        """Take in what this node tells itself."""
        found = list(effects)
        for to, message in sent(effects):
            if to == D0 and not isinstance(message, AuditResult):
                found += self.audits.received(received(D0, message, None))
        return found


def result_of(effects: list[Effect]) -> AuditResult:
    (found,) = (m for _, m in sent(effects) if isinstance(m, AuditResult))
    return found


def test_a_false_word_needs_no_replay() -> None:
    judging = Judging()
    judging.tell(OTHER)
    found = result_of(judging.done(judging.fetched(), Built(HASH)))
    assert [each.work for each in found.findings] == [AuditedWork.WORD]


def test_without_the_parameters_nothing_is_settled() -> None:
    judging = Judging()
    event = StateFetchFailed(1, 0, "nobody gives it")
    assert judging.audits.takes(event)
    assert result_of(judging.audits.fetch_failed(event)).failure == "nobody gives it"
    assert not judging.audits.takes(event)


def test_a_stage_that_can_not_be_built_is_not_judged() -> None:
    judging = Judging()
    (start,) = (e for e in judging.fetched() if isinstance(e, StartJob))
    failed = JobFailed(start.job_id, "no room", fatal=False)
    assert result_of(told_end(judging.context, failed)).failure == "no room"


def test_a_state_that_is_late_keeps_later_ones_from_being_asked_for() -> None:
    """It may be larger than a link carries in an iteration."""
    judging = Judging()
    reopen(judging.context, committed=Iteration(judging.context.opening.anchor.number + 1, 1))
    judging.audits.abandon()
    later = judging.again()
    assert not [e for e in later if isinstance(e, FetchState)]
    assert "still on its way" in result_of(later).failure
    late = StateFetched(1, judging.context.opening.anchor.number - 1, "{}", tensor(9))
    assert judging.audits.takes(late)
    assert freed(judging.audits.fetched(late)) == [9]
    assert [e for e in judging.again() if isinstance(e, FetchState)]
