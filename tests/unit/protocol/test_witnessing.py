"""What a member keeps for audits, and whom an auditor suspects."""

import pytest

from decod.ids import AveragingId, MicrobatchId, NodeId
from decod.protocol.averaging.averager import Averager, Averaging, Weight, port_of
from decod.protocol.core.effects import StartJob
from decod.protocol.core.events import JobFinished
from decod.protocol.core.jobs import Replayed, ReplayPasses
from decod.protocol.core.messages import (
    Audit,
    AuditedInput,
    AuditedPass,
    AuditedShares,
    AuditedTensor,
)
from decod.protocol.core.messages.audits import AuditCase
from decod.protocol.strategy.witnessing import _EARLY_MAX, Audits
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R2A,
    R2B,
    context_of,
    freed,
    jobs_of,
    received,
    sent,
    tensor,
    view_of,
)

VIEW = view_of("d0", "r1a", "r1b", "r1c", "r2a", "r2b", "r2c")
R2C = NodeId("r2c")
AVERAGING = AveragingId(ITERATION, 1)
NUM_MICROBATCHES = 3
MB = MicrobatchId(ITERATION.number, 0, 0)


class Nothing:
    """The microbatches of a member that has dealt with nobody."""

    folded = ()

    @staticmethod
    def dealt_with(relay: NodeId) -> list[object]:
        return []


class Auditing:
    """r2a, the only auditor of r2b. Both are of the last stage."""

    def __init__(self) -> None:
        self.context = context_of(R2A, VIEW)
        averaging = Averaging(AVERAGING, (R2A, R2B, R2C))
        averager = Averager(R2A, averaging, port_of(self.context), user=None)
        averager.begin(Weight(0, 0), Weight(NUM_MICROBATCHES, 0))
        self.audits = Audits(self.context, Nothing(), averager)

    def begin(self) -> None:
        case = AuditCase(R2B, (R2A,))
        self.audits.received(received(D0, Audit(AVERAGING, (case,)), None))

    def hear(self, sender: NodeId, message: object, number: int | None = None) -> list[object]:
        of = None if number is None else tensor(number)
        return self.audits.received(received(sender, message, of))


def about(
    mb: MicrobatchId = MB, *, is_gradient: bool = False, relay: NodeId = R2B
) -> AuditedTensor:
    return AuditedTensor(AVERAGING, relay, 1, mb, is_gradient, b"")


def got(*, is_gradient: bool = False) -> AuditedInput:
    return AuditedInput(AVERAGING, R2B, 1, MB, is_gradient, b"")


def test_a_sender_has_few_messages_kept_before_the_audit_and_takes_no_room_of_others() -> None:
    member = Auditing()
    room = _EARLY_MAX + 2 * NUM_MICROBATCHES
    for number in range(500):
        member.hear(R1A, about(MicrobatchId(2, 0, number), relay=D0), number)
        member.hear(R1A, AuditedShares(AVERAGING, R2B, number, ()))
    assert len(member.context.tensors) == room / 2
    assert len(member.audits._early) == room
    member.hear(R2C, AuditedShares(AVERAGING, R2B, 1, ((R2C, b""),)))
    assert member.audits._early[-1].sender == R2C
    assert len(freed(member.audits.abandon())) == room / 2
    assert not len(member.context.tensors)


def test_an_auditor_keeps_no_more_tensors_than_there_are_microbatches() -> None:
    member = Auditing()
    member.begin()
    for number in range(500):
        member.hear(R1A, about(MicrobatchId(10**6, 0, number)), number)
    assert len(member.context.tensors) == 2 * NUM_MICROBATCHES
    member.audits.abandon()
    assert not len(member.context.tensors)


@pytest.mark.parametrize(
    ("off", "suspects", "doubted"),
    [
        ((0.0, 0.0), [{D0}, {R1A}], set()),
        ((1.0, 0.0), [{D0, R1A}, {R1A}], {R1A}),
        ((0.0, 1.0), [{D0}, {R1A, D0}], {D0}),
    ],
    ids=["the relay agrees", "it got another activation", "it got another gradient"],
)
def test_who_got_a_result_is_suspected_and_who_gave_what_the_relay_doubts(
    off: tuple[float, float], suspects: list[set[NodeId]], doubted: set[NodeId]
) -> None:
    member = Auditing()
    member.begin()
    told = [*member.hear(R1A, about(), 1), *member.hear(D0, about(is_gradient=True), 2)]
    assert not jobs_of(told), "the relay has not said what it got"
    told = [*member.hear(R2B, got()), *member.hear(R2B, got(is_gradient=True))]
    (job,) = jobs_of(told)
    assert isinstance(job, ReplayPasses)
    (start,) = (e for e in told if isinstance(e, StartJob))
    replayed = Replayed(0.5, 0.7, *off, (b"",) * 3)
    auditor = member.audits._auditors[R2B, 1]
    done = auditor.job_done(0.0, job, JobFinished(start.job_id, replayed, (), duration_s=1.0))
    ((_, found),) = sent(done)
    assert isinstance(found, AuditedPass)
    assert [{*each.suspects} for each in found.findings] == suspects
    assert [each.error for each in found.findings] == [0.5, 0.7]
    assert {*found.doubted} == doubted


def test_a_relay_that_does_not_say_what_it_got_is_waited_for_until_the_leader_closes() -> None:
    member = Auditing()
    member.begin()
    assert not jobs_of(member.hear(R1A, about(), 1) + member.hear(D0, about(is_gradient=True), 2))
    closing = Audit(AVERAGING, (AuditCase(R2B, (R2A,), closes=True),))
    (job,) = jobs_of(member.hear(D0, closing))
    assert isinstance(job, ReplayPasses)
    assert (job.got_activation, job.got_gradient) == (b"", b"")
