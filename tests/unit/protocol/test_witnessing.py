"""What a member keeps for audits, and what an auditor finds out from proofs."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from decod.ids import AveragingId, MicrobatchId, NodeId
from decod.limits import DIGEST_BYTES
from decod.protocol.averaging.averager import Averaging, Weight
from decod.protocol.core.effects import StartJob
from decod.protocol.core.events import JobFinished
from decod.protocol.core.fingerprints import ERROR_MAX
from decod.protocol.core.jobs import Replayed
from decod.protocol.core.messages.audit_messages import (
    Audit,
    AuditCase,
    AuditedPass,
    AuditedShares,
    AuditedTensor,
    AuditedWork,
    Finding,
)
from decod.protocol.core.messages.microbatch_messages import ForwardActivation
from decod.protocol.core.proofs import Subject
from decod.protocol.strategy.witnessing import _EARLY_MAX, Audits, WitnessedAverage, unproven
from decod.run.protocol_config import AuditConfig, ProtocolConfig
from tests.unit.protocol.cast import (
    CONFIG,
    D0,
    ITERATION,
    R1A,
    R1B,
    R1C,
    R2A,
    R2B,
    Heard,
    configured,
    context_of,
    flow,
    freed,
    jobs_of,
    notes_of,
    received,
    sent,
    settle,
    tensor,
    view_of,
)

VIEW = view_of("d0", "r1a", "r1b", "r1c", "r2a", "r2b", "r2c")
R2C = NodeId("r2c")
AVERAGING = AveragingId(ITERATION, 1)
NUM_MICROBATCHES = 3
MB = MicrobatchId(ITERATION.number, 0, 0)


DIGEST, OTHER = b"d" * DIGEST_BYTES, b"o" * DIGEST_BYTES


class Signed:
    """Proofs that nobody forges: what was signed stands in them."""

    @staticmethod
    def signer_of(proof: bytes, subject: Subject) -> NodeId | None:
        node, _, about = proof[DIGEST_BYTES:].decode().partition("/")
        return NodeId(node) if about == str(subject) else None


def proof(node: NodeId, *, is_gradient: bool, digest: bytes = DIGEST) -> bytes:
    """Return a node's proof of an activation or gradient of the microbatch."""
    return digest + f"{node}/{Subject(ITERATION, MB, is_gradient)}".encode()


class Nothing:
    """The microbatches of a member that has dealt with nobody."""

    @staticmethod
    def dealt_with(relay: NodeId) -> list[object]:
        return []


class Auditing:
    """r2a, the only auditor of r2b. Both are of the last stage."""

    def __init__(self, *lost: NodeId, config: ProtocolConfig = CONFIG) -> None:
        self.context = context_of(R2A, VIEW, config=config)
        self.context.proofs = Signed()
        averaging = Averaging(AVERAGING, (R2A, R2B, R2C))
        average = WitnessedAverage(self.context, averaging, user=None)
        average.averager.begin(Weight(0, 0), Weight(NUM_MICROBATCHES, 0))
        self.audits = Heard(Audits(self.context, Nothing(), average, lost, {}, set()))

    def begin(self) -> None:
        case = AuditCase(R2B, (R2A,))
        self.audits.received(received(D0, Audit(AVERAGING, (case,)), None))

    def hear(
        self, sender: NodeId, message: object, number: int | None = None, digest: bytes = DIGEST
    ) -> list[object]:
        of = None if number is None else replace(tensor(number), digest=digest)
        return self.audits.received(received(sender, message, of))

    def close(self) -> list[object]:
        closing = Audit(AVERAGING, (AuditCase(R2B, (R2A,), closes=True),))
        return self.hear(D0, closing)


def about(
    mb: MicrobatchId = MB, *, is_gradient: bool = False, relay: NodeId = R2B, shows: bytes = b""
) -> AuditedTensor:
    return AuditedTensor(AVERAGING, relay, 1, mb, is_gradient, shows)


# What is told of the only microbatch where all is well: by r1a, d0 and r2b.
GIVEN = (R1A, about(shows=proof(R2B, is_gradient=True)))
GIVEN_BACK = (D0, about(is_gradient=True, shows=proof(R2B, is_gradient=False)))
SENT_ON = (R2B, about(shows=proof(D0, is_gradient=True)))
SENT_BACK = (R2B, about(is_gradient=True, shows=proof(R1A, is_gradient=False)))
ALL = (GIVEN, GIVEN_BACK, SENT_ON, SENT_BACK)


def told(
    member: Auditing, *words: tuple[NodeId, AuditedTensor], others: Collection[int] = ()
) -> list[object]:
    """Tell an auditor something; return the last answer. Of `others`, the bytes are others."""
    effects = list[object]()
    for number, (sender, message) in enumerate(words):
        effects = member.hear(sender, message, number + 1, OTHER if number in others else DIGEST)
    return effects


def found_in(effects: list[object]) -> AuditedPass:
    (found,) = (m for _, m in sent(effects) if isinstance(m, AuditedPass))
    return found


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
    """Two of each that tells, and not more than four of all but the relay."""
    member = Auditing()
    member.begin()
    for sender in (R1A, R1B, R1C, R2B):
        for number in range(500):
            member.hear(sender, about(MicrobatchId(10**6, 0, number)), hash((sender, number)))
    assert len(member.context.tensors) == 6 * NUM_MICROBATCHES
    member.audits.abandon()
    assert not len(member.context.tensors)


LIES = Finding(AuditedWork.WORD, ERROR_MAX)


@pytest.mark.parametrize("place", [0, 1])
def test_who_tells_something_else_than_it_has_signed_lies(place: int) -> None:
    """What it gave the relay is not known then, so nothing is computed."""
    member = Auditing()
    member.begin()
    effects = told(member, *ALL, others=[place])
    found = found_in(effects)
    if ALL[place][0] == D0:
        assert not found.findings, "a data node does not lie"
        assert "data node" in found.failure
    else:
        assert found.findings == (Finding(AuditedWork.GIFT, ERROR_MAX, (R1A,)),)
    assert sorted(freed(effects)) == [1, 2, 3, 4]
    assert not len(member.context.tensors)


@pytest.mark.parametrize("place", [2, 3])
def test_a_relay_that_tells_something_else_than_it_has_signed_lies(place: int) -> None:
    member = Auditing()
    member.begin()
    assert found_in(told(member, *ALL, others=[place])).findings == (LIES,)


@pytest.mark.parametrize(
    "shown",
    [
        b"",
        proof(R2B, is_gradient=False),
        proof(R2C, is_gradient=False),
        proof(NodeId("stranger"), is_gradient=False),
        proof(D0, is_gradient=False),
        proof(R1A, is_gradient=True),
    ],
    ids=["none", "its own", "of its stage", "a stranger's", "of the other side", "of another"],
)
def test_a_relay_without_a_proof_of_what_it_got_lies(shown: bytes) -> None:
    member = Auditing()
    member.begin()
    mine = (R2B, replace(SENT_BACK[1], proof=shown))
    assert found_in(told(member, GIVEN, GIVEN_BACK, SENT_ON, mine)).findings == (LIES,)


def test_what_a_lost_member_gave_is_told_by_another_and_proves_nothing() -> None:
    """r1a was lost, and r1b has computed the activation again: its bits are others."""
    lost = NodeId("r1x")
    member = Auditing(lost)
    member.begin()
    mine = (R2B, replace(SENT_BACK[1], proof=proof(lost, is_gradient=False)))
    words = ((R1B, GIVEN[1]), GIVEN_BACK, SENT_ON, mine)
    effects = told(member, *words, others=[0])
    (job,) = jobs_of(effects)
    (start,) = (e for e in effects if isinstance(e, StartJob))
    auditor = member.audits._auditors[R2B, 1]
    for error, failure in ((0.01, ""), (0.7, "gone")):
        replayed = Replayed(error, 0.0, (b"",) * 3)
        auditor.job_done(0.0, job, JobFinished(start.job_id, replayed, (), duration_s=1.0))
        done = member.context.out.taken()
        assert not found_in(done).findings
        assert failure in found_in(done).failure
        assert found_in(done).doubted


@pytest.mark.parametrize("room_bytes", [3 * 8 * NUM_MICROBATCHES, 3 * 8 * NUM_MICROBATCHES - 1])
def test_a_relay_that_has_room_keeps_what_it_sends(room_bytes: int) -> None:
    member = Auditing(config=configured(keep_max_bytes=room_bytes))
    member.begin()
    told(member, *ALL[:3])
    found = found_in(member.hear(*SENT_BACK))
    if room_bytes == 3 * 8 * NUM_MICROBATCHES:
        assert found.findings == (Finding(AuditedWork.SILENCE, ERROR_MAX),)
    else:
        assert "no room" in found.failure


def test_a_giver_that_has_kept_nothing_ends_the_audit() -> None:
    member = Auditing()
    member.begin()
    told(member, *ALL[1:])
    assert "not kept" in found_in(member.hear(*GIVEN)).failure


@pytest.mark.parametrize(
    ("sender", "shown", "digest"),
    [
        (R1A, proof(R1A, is_gradient=False), DIGEST),
        (R1A, proof(R1A, is_gradient=False), OTHER),
        (R1A, proof(R1B, is_gradient=False), DIGEST),
        (R1A, proof(R1A, is_gradient=True), DIGEST),
        (R1A, b"", DIGEST),
    ],
    ids=["fits", "other bytes", "another's", "of something else", "none"],
)
def test_only_what_fits_its_proof_is_used(sender: NodeId, shown: bytes, digest: bytes) -> None:
    context = context_of(R2A, VIEW)
    context.proofs = Signed()
    message = ForwardActivation(ITERATION, MB, flow(0), (R1A, R2A), 0, shown)
    came = received(sender, message, replace(tensor(7), digest=digest))
    assert not unproven(context, came), "nothing is audited"
    assert context.out.taken() == []
    settle(context, audits=AuditConfig())
    fits = (shown, digest) == (proof(R1A, is_gradient=False), DIGEST)
    assert unproven(context, came) is not fits
    doubts = context.out.taken()
    if fits:
        assert doubts == []
    else:
        assert freed(doubts) == [7]
        assert notes_of(doubts) == ["tensor.unproven"]
