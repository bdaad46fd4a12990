"""Which hosts keep which states, and when they are copied."""

from dataclasses import replace

from decod.ids import Iteration, JobId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import KeepState, MirrorState
from decod.protocol.core.era import Kept, Mark
from decod.protocol.core.events import JobFinished, StateForgotten, StateKept
from decod.protocol.core.jobs import Snapshot, SnapshotTaken
from decod.protocol.core.view import Opening, View
from decod.protocol.state.rollback import NUM_MIRRORS, Mirrors, inventory, mirrors_of
from tests.unit.protocol.cast import (
    D0,
    R1A,
    context_of,
    freed,
    jobs_of,
    notes_of,
    tensor,
    view_of,
)

MARK = Mark(10, tuple((stage, f"h{stage}") for stage in range(3)))
VIEW = view_of("d0", "r1a", "r1b", "r2a", "r2b")


def opening(iteration: int = 10, view: View = VIEW) -> Opening:
    return Opening(Iteration(iteration + 1, 1), Iteration(iteration, 1), view, marks=(MARK,))


def machine(node: NodeId, view: View = VIEW) -> tuple[Mirrors, Context]:
    context = context_of(node, view)
    return Mirrors(context), context


def test_every_stage_is_mirrored_by_hosts_of_other_stages() -> None:
    for stage in range(3):
        mirrors = mirrors_of(VIEW, stage)
        assert len(mirrors) == NUM_MIRRORS
        stages = {VIEW.by_id[node].stage_index for node in mirrors}
        assert stage not in stages
        assert len(stages) == NUM_MIRRORS, "no one stage's end takes both"
    assert mirrors_of(view_of("d0", "r1a"), 1) == (D0,)


def test_few_mirrors_change_when_a_host_comes() -> None:
    names = [f"r{stage}{letter}" for stage in range(1, 9) for letter in "abcd"]
    before = view_of("d0", *names)
    after = view_of("d0", *names, "r5e")
    changed = sum(mirrors_of(before, stage) != mirrors_of(after, stage) for stage in range(9))
    assert changed <= 2


def test_a_marked_commit_is_copied_to_the_own_disk_and_mirrored() -> None:
    effects_of = {}
    for node in VIEW.by_id:
        keeping, context = machine(node)
        effects = keeping.opened(opening(), stepped=True)
        assert jobs_of(effects) == [Snapshot(with_optimizer=True)]
        effects_of[node] = [e for e in effects if isinstance(e, MirrorState)]
        stage = context.member.stage_index
        assert all(e.stage_index != stage for e in effects_of[node])
    mirrored = [effect for effects in effects_of.values() for effect in effects]
    assert sorted(e.stage_index for e in mirrored) == [0, 0, 1, 1, 2, 2]
    assert {(e.iteration, e.parameter_hash) for e in mirrored} == {(10, f"h{s}") for s in range(3)}
    first_donors = [e.donors[0] for e in mirrored if e.stage_index == 1]
    assert len(set(first_donors)) == 2, "they begin with different donors"


def test_other_commits_and_repeats_are_not_copied() -> None:
    keeping, _ = machine(R1A)
    assert keeping.opened(opening(iteration=11), stepped=True) == []
    assert keeping.opened(replace(opening(), paused=True), stepped=True) == []
    assert jobs_of(keeping.opened(opening(), stepped=False)) == []


def test_what_is_there_is_not_copied_again() -> None:
    node = mirrors_of(VIEW, 2)[0]
    keeping, _ = machine(node)
    keeping.told(StateKept(2, 10, "h2"))
    mirrored = [e for e in keeping.opened(opening(), stepped=True) if isinstance(e, MirrorState)]
    assert 2 not in [e.stage_index for e in mirrored]


def copied(iteration: int) -> JobFinished:
    return JobFinished(JobId(1), SnapshotTaken(iteration, "manifest"), (tensor(1),), 1.0)


def test_a_copy_is_handed_to_the_host() -> None:
    keeping, context = machine(R1A)
    job = jobs_of(keeping.opened(opening(), stepped=True))[0]
    context.tensors.add(tensor(1))
    (kept,) = keeping.job_done(0.0, job, copied(10))
    assert kept == KeepState(10, "h1", "manifest", tensor(1).id)


def test_a_copy_of_another_iteration_is_let_go() -> None:
    keeping, context = machine(R1A)
    job = jobs_of(keeping.opened(opening(), stepped=True))[0]
    context.tensors.add(tensor(1))
    assert freed(keeping.job_done(0.0, job, copied(11))) == [1]


def test_a_copy_that_fails_is_told() -> None:
    keeping, _ = machine(R1A)
    job = jobs_of(keeping.opened(opening(), stepped=True))[0]
    assert notes_of(keeping.job_failed(0.0, job, "no room")) == ["state.unkept"]


def test_the_inventory_follows_the_disk() -> None:
    keeping, context = machine(R1A)
    keeping.told(StateKept(1, 10, "a"))
    keeping.told(StateKept(2, 20, "b"))
    keeping.told(StateKept(1, 10, "c"))
    assert inventory(context) == (Kept(2, 20, "b"), Kept(1, 10, "c"))
    keeping.told(StateForgotten(1, 10))
    keeping.told(StateForgotten(1, 10))
    assert inventory(context) == (Kept(2, 20, "b"),)
