"""Who may enter, and which stage each newcomer prepares."""

import dataclasses
from dataclasses import replace

import pytest

from decod.protocol.core.effects import Effect, EffectSink, Send
from decod.protocol.core.era import Kept
from decod.protocol.core.messages.membership_messages import Assign, Join, Prepared, Refuse
from decod.protocol.core.view import Role, View
from decod.protocol.leadership.admission import Admission
from decod.protocol.leadership.seats import Seats
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from tests.unit.protocol.cast import D0, FACTS, MANIFEST, R1A, R1B, RUN, Heard, sent, view_of

STAGED = replace(
    RUN,
    num_iterations=3,
    stages=StagesConfig(num_relay_stages=2),
    batch=BatchConfig(num_data_nodes=2),
)
NOBODY = View(version=0, leader=D0, term=1, num_stages=3, members=())
RELAY = Join("r:1", Role.RELAY, 2, None, MANIFEST, incarnation=1)
DATA = Join("d:1", Role.DATA, 4, None, MANIFEST, incarnation=1)


def insisting(stage_index: int | None) -> Join:
    return dataclasses.replace(RELAY, stage_index=stage_index)


@pytest.fixture
def admission() -> Heard:
    out = EffectSink[Effect]()
    return Heard(Admission(STAGED, FACTS, Seats(STAGED.sync, out), out))


@pytest.mark.parametrize("stage_index", [0, -1, 3, 10**6])
def test_a_stage_that_is_none_is_refused(admission: Heard, stage_index: int) -> None:
    ((_, refusal),) = sent(admission.join(NOBODY, R1A, insisting(stage_index)))
    reason = f"stage {stage_index} is not a relay stage: choose auto or 1 to 2"
    assert refusal == Refuse(reason)
    assert admission.candidates == {}


def test_another_manifest_is_refused_with_both_hashes(admission: Heard) -> None:
    foreign = dataclasses.replace(RELAY, manifest_sha256="f" * 64)
    ((_, refusal),) = sent(admission.join(NOBODY, R1A, foreign))
    assert isinstance(refusal, Refuse)
    assert "f" * 16 in refusal.reason
    assert "0" * 16 in refusal.reason


def test_a_lost_stage_gets_the_candidate_whose_disk_holds_its_state(admission: Heard) -> None:
    """Stage 1 has nobody either, and the other candidate is larger."""
    view = view_of("d0", num_stages=3)
    holder = dataclasses.replace(RELAY, kept=(Kept(0, 20, "a"), Kept(2, 20, "b")))
    admission.join(view, R1A, dataclasses.replace(RELAY, capacity=9))
    admission.join(view, R1B, RELAY)
    assert admission.join(view, R1B, holder) == [], "it has found its states meanwhile"
    effects = admission.assign_waiting(view)
    assert sent(effects) == [(R1B, Assign(2, -1)), (R1A, Assign(1, -1))]


def test_who_builds_other_weights_than_its_stage_is_refused(admission: Heard) -> None:
    """Members of a stage must start from the same bits (I3)."""
    for node in (R1A, R1B):
        admission.join(NOBODY, node, insisting(1))
    admission.prepared(NOBODY, R1A, Prepared(1, "h"))
    effects = admission.prepared(NOBODY, R1B, Prepared(1, "other"))
    reason = "it builds other initial weights than the rest of its stage"
    assert effects == [Send(R1B, Refuse(reason))]
    assert R1B not in admission.candidates


def test_a_stranger_that_came_and_went_does_not_decide_what_others_must_build(
    admission: Heard,
) -> None:
    for node in (R1A, R1B):
        admission.join(NOBODY, node, insisting(1))
    admission.prepared(NOBODY, R1A, Prepared(1, "made up"))
    del admission.candidates[R1A]
    assert sent(admission.prepared(NOBODY, R1B, Prepared(1, "h"))) == [(R1B, Assign(1, -1))]
    # Nor does it by coming back.
    admission.join(NOBODY, R1A, insisting(1))
    ((_, refusal),) = sent(admission.prepared(NOBODY, R1A, Prepared(1, "made up")))
    assert isinstance(refusal, Refuse)


def test_members_decide_what_newcomers_to_their_stage_must_build(admission: Heard) -> None:
    admission.join(NOBODY, R1A, insisting(1))
    admission.prepared(NOBODY, R1A, Prepared(1, "h"))
    del admission.candidates[R1A]
    view = view_of("d0", "r1a", "r2a")
    admission.join(view, R1B, insisting(1))
    ((_, refusal),) = sent(admission.prepared(view, R1B, Prepared(1, "other")))
    assert isinstance(refusal, Refuse)
