"""Which hosts keep which states, and when they are copied."""

from decod.ids import Iteration, JobId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, MirrorState
from decod.protocol.core.era import Mark
from decod.protocol.core.events import JobFinished, StateKept
from decod.protocol.core.jobs import SnapshotTaken
from decod.protocol.core.view import Opening, View
from decod.protocol.state.rollback import Mirrors, mirrors_of
from tests.unit.protocol.cast import R1A, context_of, freed, jobs_of, notes_of, tensor, view_of

MARK = Mark(10, tuple((stage, f"h{stage}") for stage in range(3)))
VIEW = view_of("d0", "r1a", "r1b", "r2a", "r2b")


def opening(iteration: int = 10, view: View = VIEW) -> Opening:
    return Opening(Iteration(iteration + 1, 1), Iteration(iteration, 1), view, marks=(MARK,))


def machine(node: NodeId, view: View = VIEW) -> tuple[Mirrors, Context]:
    context = context_of(node, view)
    return Mirrors(context), context


def opened(keeping: Mirrors) -> list[Effect]:
    keeping.opened(opening(), stepped=True)
    return keeping._out.taken()


def test_what_is_there_is_not_copied_again() -> None:
    node = mirrors_of(VIEW, 2)[0]
    keeping, _ = machine(node)
    keeping.told(StateKept(2, 10, "h2"))
    mirrored = [e for e in opened(keeping) if isinstance(e, MirrorState)]
    assert 2 not in [e.stage_index for e in mirrored]


def copied(iteration: int) -> JobFinished:
    return JobFinished(JobId(1), SnapshotTaken(iteration, "manifest"), (tensor(1),), 1.0)


def test_a_copy_of_another_iteration_is_let_go() -> None:
    keeping, context = machine(R1A)
    job = jobs_of(opened(keeping))[0]
    context.tensors.add(tensor(1))
    keeping.job_done(0.0, job, copied(11))
    assert freed(context.out.taken()) == [1]


def test_a_copy_that_fails_is_told() -> None:
    keeping, context = machine(R1A)
    job = jobs_of(opened(keeping))[0]
    keeping.job_failed(0.0, job, "no room")
    assert notes_of(context.out.taken()) == ["state.unkept"]
