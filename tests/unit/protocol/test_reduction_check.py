"""Who is found to lie about a part of an average: who has reduced it, or who gave to it."""

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core.fingerprints import NUM_SUMS, Sketch
from decod.protocol.core.messages.audit_messages import AuditCase, AuditedShares
from decod.protocol.strategy.auditor import ReductionCheck
from tests.unit.protocol.cast import R1A, R1B

AVERAGING = AveragingId(Iteration(3, 1), 1)
SEED = b"nobody knows it."


def sketch(number: float, seed: bytes = SEED) -> Sketch:
    return Sketch(seed, (number,) * NUM_SUMS)


def told(
    check: ReductionCheck, sender: NodeId, contributor: NodeId, number: float, seed: bytes = SEED
) -> None:
    data = sketch(number, seed).to_bytes() if number else b""
    check.told(sender, AuditedShares(AVERAGING, R1A, 1, ((contributor, data),)))


def test_a_sketch_with_other_signs_is_none() -> None:
    check = ReductionCheck(AuditCase(R1A, (R1B,), seed=SEED), (R1A, R1B))
    check.averaged(sketch(1.0).to_bytes(), 3)
    told(check, R1B, R1B, 2.0, seed=bytes(len(SEED)))
    check.told(R1B, AuditedShares(AVERAGING, R1A, 1, ((R1B, b"too short"),)))
    assert not check.complete
    told(check, R1B, R1B, 2.0)
    assert check.complete
