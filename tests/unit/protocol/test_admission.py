"""Who may enter, and which stage each newcomer prepares."""

import dataclasses
from dataclasses import replace

import pytest

from decod.ids import Iteration, NodeId
from decod.protocol.core.effects import Send
from decod.protocol.core.era import Kept
from decod.protocol.core.messages import Assign, Join, NodeLoad, Prepared, Refuse
from decod.protocol.core.view import Role, View
from decod.protocol.leadership.admission import Admission
from decod.run.model_config import StagesConfig
from decod.run.training_config import BatchConfig
from tests.unit.protocol.cast import (
    D0,
    FACTS,
    MANIFEST,
    R1A,
    R1B,
    R2A,
    RUN,
    configured,
    member,
    notes_of,
    sent,
    view_of,
)

STAGED = replace(
    RUN,
    num_iterations=3,
    stages=StagesConfig(num_relay_stages=2),
    batch=BatchConfig(num_data_nodes=2),
)
PAIRS = replace(STAGED, protocol=configured(min_nodes_per_stage=2))
"""Each stage needs two relays."""
NOBODY = View(version=0, leader=D0, term=1, num_stages=3, members=())
RELAY = Join("r:1", Role.RELAY, 2, None, MANIFEST, incarnation=1)
DATA = Join("d:1", Role.DATA, 4, None, MANIFEST, incarnation=1)


def insisting(stage_index: int | None) -> Join:
    return dataclasses.replace(RELAY, stage_index=stage_index)


@pytest.fixture
def admission() -> Admission:
    return Admission(STAGED, FACTS)


def test_a_relay_without_wishes_waits_for_the_leader_to_place_it(admission: Admission) -> None:
    assert notes_of(admission.join(NOBODY, R1A, RELAY)) == ["candidate.joined"]
    assert admission.join(NOBODY, R1A, RELAY) == []
    assert admission.candidates[R1A].stage_index is None


def test_who_insists_on_a_stage_gets_it_and_a_repeat_the_same_answer(admission: Admission) -> None:
    first = admission.join(NOBODY, R1A, insisting(2))
    assert sent(first) == [(R1A, Assign(2, -1))]
    assert admission.join(NOBODY, R1A, insisting(2)) == [Send(R1A, Assign(2, -1))]


def test_data_nodes_get_the_free_ordinals(admission: Admission) -> None:
    view = view_of(member("d1"), num_stages=3)
    assert sent(admission.join(view, D0, DATA)) == [(D0, Assign(0, 0))]
    reason = "the run has all the data nodes that it takes (2)"
    refusal = Refuse(reason, again_s=2.0)
    assert sent(admission.join(view, NodeId("d2"), DATA)) == [(NodeId("d2"), refusal)]
    assert NodeId("d2") not in admission.candidates


@pytest.mark.parametrize("stage_index", [0, -1, 3, 10**6])
def test_a_stage_that_is_none_is_refused(admission: Admission, stage_index: int) -> None:
    ((_, refusal),) = sent(admission.join(NOBODY, R1A, insisting(stage_index)))
    reason = f"stage {stage_index} is not a relay stage: choose auto or 1 to 2"
    assert refusal == Refuse(reason)
    assert admission.candidates == {}


def test_another_manifest_is_refused_with_both_hashes(admission: Admission) -> None:
    foreign = dataclasses.replace(RELAY, manifest_sha256="f" * 64)
    ((_, refusal),) = sent(admission.join(NOBODY, R1A, foreign))
    assert isinstance(refusal, Refuse)
    assert "f" * 16 in refusal.reason
    assert "0" * 16 in refusal.reason


def test_a_restarted_candidate_begins_anew(admission: Admission) -> None:
    admission.join(NOBODY, R1A, insisting(1))
    admission.prepared(NOBODY, R1A, Prepared(1, "h"))
    assert admission.repeated(R1A, insisting(1))
    restarted = dataclasses.replace(insisting(2), incarnation=2)
    assert not admission.repeated(R1A, restarted)
    assert sent(admission.join(NOBODY, R1A, restarted)) == [(R1A, Assign(2, -1))]
    assert not admission.any_prepared


def test_waiting_candidates_go_where_they_are_needed_most(admission: Admission) -> None:
    """Stage 2 is full, stage 1 half empty, though both have the same capacity."""
    view = view_of("d0", "r1a", "r2a")
    loads = {R1A: NodeLoad(R1A, 1, 2, 0, ""), R2A: NodeLoad(R2A, 2, 2, 0, "")}
    admission.join(view, R1B, RELAY)
    effects = admission.assign_waiting(view, loads)
    assert sent(effects) == [(R1B, Assign(2, -1))]
    assert notes_of(effects) == ["candidate.assigned"]
    assert admission.assign_waiting(view, loads) == []


def test_a_lost_stage_gets_the_candidate_whose_disk_holds_its_state(admission: Admission) -> None:
    """Stage 1 has nobody either, and the other candidate is larger."""
    view = view_of("d0", num_stages=3)
    holder = dataclasses.replace(RELAY, kept=(Kept(0, 20, "a"), Kept(2, 20, "b")))
    admission.join(view, R1A, dataclasses.replace(RELAY, capacity=9))
    admission.join(view, R1B, RELAY)
    assert admission.join(view, R1B, holder) == [], "it has found its states meanwhile"
    effects = admission.assign_waiting(view, {})
    assert sent(effects) == [(R1B, Assign(2, -1)), (R1A, Assign(1, -1))]


def test_members_that_leave_do_not_count_for_their_stage(admission: Admission) -> None:
    view = view_of("d0", "r1a", "r2a")
    loads = {R1A: NodeLoad(R1A, 0, 2, 0, ""), R2A: NodeLoad(R2A, 2, 2, 0, "")}
    admission.join(view, R1B, RELAY)
    assert sent(admission.assign_waiting(view, loads, {R1A})) == [(R1B, Assign(1, -1))]


def test_members_that_are_paused_do_not_count_for_their_stage(admission: Admission) -> None:
    view = view_of("d0", member("r1a", capacity=0), "r2a")
    assert not admission.enough(view, Iteration(0, 0), started=True)
    loads = {R1A: NodeLoad(R1A, 0, 0, 0, ""), R2A: NodeLoad(R2A, 2, 2, 0, "")}
    admission.join(view, R1B, RELAY)
    assert sent(admission.assign_waiting(view, loads)) == [(R1B, Assign(1, -1))]


def test_candidates_on_their_way_count_as_capacity() -> None:
    admission = Admission(PAIRS, FACTS)
    for name, stage in (("a", 1), ("b", 2), ("c", 1)):
        admission.join(NOBODY, NodeId(name), insisting(stage))
    admission.join(NOBODY, NodeId("x"), RELAY)
    assert sent(admission.assign_waiting(NOBODY, {})) == [(NodeId("x"), Assign(2, -1))]


def test_a_candidate_that_stands_ready_can_become_a_member(admission: Admission) -> None:
    join = dataclasses.replace(insisting(1), name="attic")
    admission.join(NOBODY, R1A, join)
    assert admission.members(Iteration(4, 0), Iteration(4, 0)) == []
    for _ in range(2):
        level = Prepared(1, "h", Iteration(3, 1))
        assert sent(admission.prepared(NOBODY, R1A, level)) == [(R1A, Assign(1, -1))]
    assert admission.any_prepared
    fourth = Iteration(4, 0)
    (new,) = admission.members(fourth, fourth)
    assert new == dataclasses.replace(member("r1a", since_iteration=4), address="r:1", name="attic")
    assert admission.members(fourth, fourth, [member("d0"), member("r1b")]) == [new]
    assert admission.members(fourth, fourth, [member("d0"), member("r2a")]) == [], (
        "nobody has its stage's state"
    )


def test_only_who_is_level_with_its_stage_enters_one_that_trains(admission: Admission) -> None:
    """One average may be on its way to it; the longer it keeps up, the more may be."""
    admission.join(NOBODY, R1A, insisting(1))
    staff = [member("d0"), member("r1b")]

    def enters(held: Iteration, committed: Iteration) -> bool:
        admission.prepared(NOBODY, R1A, Prepared(1, "h", held))
        return bool(admission.members(committed, committed, staff))

    assert enters(Iteration(0, 0), Iteration(0, 0)), "what was built is what all begin with"
    assert not enters(Iteration(0, 0), Iteration(1, 1)), "it follows nobody yet"
    assert enters(Iteration(7, 0), Iteration(8, 2))
    assert enters(Iteration(9, 1), Iteration(8, 2)), "it undoes a step that was not committed"
    assert not enters(Iteration(6, 1), Iteration(8, 2))
    assert not enters(Iteration(8, 1), Iteration(8, 0, 1)), "what it holds was given up"
    for _ in range(4):
        admission.committed(Iteration(8, 2), Iteration(8, 2), staff)
    assert enters(Iteration(6, 1), Iteration(8, 2))
    assert not enters(Iteration(5, 1), Iteration(8, 2))
    enters(Iteration(0, 0), Iteration(8, 2))
    admission.committed(Iteration(8, 2), Iteration(8, 2), staff)
    assert not enters(Iteration(6, 1), Iteration(8, 2)), "it has begun anew"


@pytest.mark.parametrize("message", [Prepared(2, "h"), Prepared(0, "h")])
def test_who_prepared_another_stage_is_not_ready(admission: Admission, message: Prepared) -> None:
    admission.join(NOBODY, R1A, insisting(1))
    assert admission.prepared(NOBODY, R1A, message) == []
    assert admission.prepared(NOBODY, R1B, Prepared(1, "h")) == []
    assert not admission.any_prepared


def test_who_builds_other_weights_than_its_stage_is_refused(admission: Admission) -> None:
    """Members of a stage must start from the same bits (I3)."""
    for node in (R1A, R1B):
        admission.join(NOBODY, node, insisting(1))
    admission.prepared(NOBODY, R1A, Prepared(1, "h"))
    effects = admission.prepared(NOBODY, R1B, Prepared(1, "other"))
    reason = "it builds other initial weights than the rest of its stage"
    assert effects == [Send(R1B, Refuse(reason))]
    assert R1B not in admission.candidates


def test_a_stranger_that_came_and_went_does_not_decide_what_others_must_build(
    admission: Admission,
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


def test_members_decide_what_newcomers_to_their_stage_must_build(admission: Admission) -> None:
    admission.join(NOBODY, R1A, insisting(1))
    admission.prepared(NOBODY, R1A, Prepared(1, "h"))
    del admission.candidates[R1A]
    view = view_of("d0", "r1a", "r2a")
    admission.join(view, R1B, insisting(1))
    ((_, refusal),) = sent(admission.prepared(view, R1B, Prepared(1, "other")))
    assert isinstance(refusal, Refuse)


def test_nothing_is_kept_of_nodes_that_have_gone(admission: Admission) -> None:
    for index in range(50):
        node = NodeId(f"made-up-{index}")
        admission.join(NOBODY, node, insisting(1))
        admission.prepared(NOBODY, node, Prepared(1, "h"))
        del admission.candidates[node]
    assert len(admission._incarnations) == len(admission._hashes) == 1


@pytest.mark.parametrize(
    ("present", "started", "enough"),
    [
        (["d0", "r1a", "r1b", "r2a", "r2b"], False, True),
        (["d0", "r1a", "r1b", "r2a"], False, False),
        (["d0", "r1a", "r2a"], True, True),
        (["d0", "r1a"], True, False),
        (["r1a", "r1b", "r2a", "r2b"], False, False),
    ],
)
def test_a_run_begins_with_the_least_number_and_goes_on_with_one(
    present: list[str], started: bool, enough: bool
) -> None:
    admission = Admission(PAIRS, FACTS)
    view = view_of(*present, num_stages=3)
    assert admission.enough(view, Iteration(0, 0), started=started) is enough


def test_prepared_candidates_count_towards_enough(admission: Admission) -> None:
    view = view_of("d0", "r1a", num_stages=3)
    admission.join(view, R2A, insisting(2))
    assert not admission.enough(view, Iteration(0, 0), started=False)
    admission.prepared(NOBODY, R2A, Prepared(2, "h"))
    assert admission.enough(view, Iteration(0, 0), started=False)


def test_once_the_run_has_begun_what_candidates_have_built_is_not_compared() -> None:
    """They load what members have; and not all of them have fetched what the run started from."""
    admission = Admission(STAGED, FACTS, lambda: True)
    (_, assign) = sent(admission.join(NOBODY, R1A, insisting(1)))[0]
    assert isinstance(assign, Assign)
    assert assign.begun
    admission.join(NOBODY, R1B, insisting(1))
    for node in (R1A, R1B):
        said = sent(admission.prepared(NOBODY, node, Prepared(1, f"built by {node}")))
        assert said == [(node, Assign(1, -1))]
