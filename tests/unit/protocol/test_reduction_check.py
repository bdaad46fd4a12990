"""Who is found to lie about a part of an average: who has reduced it, or who gave to it."""

from collections.abc import Mapping

import pytest

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core.fingerprints import ERROR_MAX, NUM_SUMS, Sketch
from decod.protocol.core.messages.audit_messages import AuditCase, AuditedShares
from decod.protocol.strategy.auditor import ReductionCheck
from tests.unit.protocol.cast import R1A, R1B, R1C

AVERAGING = AveragingId(Iteration(3, 1), 1)
SEED = b"nobody knows it."
TOLERANCE = 0.05
GIVEN = {R1A: 1.0, R1B: 2.0, R1C: 3.0}
"""The audited relay is r1a. Six microbatches went into the average."""

Numbers = Mapping[NodeId, float]


def sketch(number: float, seed: bytes = SEED) -> Sketch:
    return Sketch(seed, (number,) * NUM_SUMS)


def told(
    check: ReductionCheck, sender: NodeId, contributor: NodeId, number: float, seed: bytes = SEED
) -> None:
    data = sketch(number, seed).to_bytes() if number else b""
    check.told(sender, AuditedShares(AVERAGING, R1A, 1, ((contributor, data),)))


def check_of(mean: float, *, given: Numbers = GIVEN, got: Numbers = GIVEN) -> ReductionCheck:
    """Return a check that knows everything but what the relay should have given itself."""
    check = ReductionCheck(AuditCase(R1A, (R1B, R1C), seed=SEED), (R1A, R1B, R1C))
    for node in (R1B, R1C):
        assert not check.complete
        told(check, node, node, given[node])
    assert not check.complete
    check.averaged(sketch(mean).to_bytes(), 6)
    assert check.complete
    for node, number in got.items():
        told(check, R1A, node, number)
    return check


def found(check: ReductionCheck, replayed: float = GIVEN[R1A]) -> dict[NodeId, float]:
    return check.found([sketch(replayed / 2)] * 2, TOLERANCE)


@pytest.mark.parametrize("got", [GIVEN, {}], ids=["it answers", "it is silent"])
def test_a_true_mean_is_right_whatever_the_relay_says(got: Numbers) -> None:
    assert found(check_of(1.0, got=got)) == {}


@pytest.mark.parametrize("mean", [-1.0, 0.0, 0.8, 10.0])
@pytest.mark.parametrize("got", [GIVEN, {}], ids=["it answers", "it is silent"])
def test_a_false_mean_is_the_relays_lie(mean: float, got: Numbers) -> None:
    errors = found(check_of(mean, got=got))
    assert errors.keys() == {R1A}
    assert errors[R1A] > TOLERANCE


def test_a_relay_that_explains_a_false_mean_differs_with_whom_it_names() -> None:
    """It makes the mean 2, and says that it got 9 of r1c instead of 3."""
    assert found(check_of(2.0, got={**GIVEN, R1C: 9.0})) == {R1C: pytest.approx(2 / 3)}


def test_an_explanation_that_does_not_add_up_is_the_relays_lie() -> None:
    errors = found(check_of(2.0, got={**GIVEN, R1C: 4.0}))
    assert errors.keys() == {R1A, R1C}


def test_small_differences_are_within_the_tolerance_also_if_little_is_left_of_the_sum() -> None:
    """r1c gives the opposite of the others' sum, and says a little less of it."""
    check = check_of(0.02, given={**GIVEN, R1C: -2.75}, got={**GIVEN, R1C: -2.88})
    assert found(check) == {}


def test_who_says_that_it_gave_something_else_differs_with_the_relay() -> None:
    assert found(check_of(1.0, given={**GIVEN, R1B: -2.0})) == {R1B: ERROR_MAX}
    assert found(check_of(1.0, given={**GIVEN, R1B: 0.0})) == {R1B: 1.0}


def test_a_relay_that_gives_itself_something_false_is_found() -> None:
    """The mean is that of what it got, and of what it gave itself."""
    assert found(check_of(0.5, got={**GIVEN, R1A: -2.0})).keys() == {R1A}


def test_only_the_relay_speaks_for_others() -> None:
    check = check_of(1.0, got={})
    told(check, R1B, R1C, 5.0)
    told(check, R1C, R1A, 5.0)
    told(check, R1C, R1C, 5.0)
    told(check, R1A, NodeId("stranger"), 5.0)
    assert found(check) == {}
    assert not check.answered


def test_a_sketch_with_other_signs_is_none() -> None:
    check = ReductionCheck(AuditCase(R1A, (R1B,), seed=SEED), (R1A, R1B))
    check.averaged(sketch(1.0).to_bytes(), 3)
    told(check, R1B, R1B, 2.0, seed=bytes(len(SEED)))
    check.told(R1B, AuditedShares(AVERAGING, R1A, 1, ((R1B, b"too short"),)))
    assert not check.complete
    told(check, R1B, R1B, 2.0)
    assert check.complete
