"""A stage's state: fetched from members, handed to others."""

import pytest

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import FetchState, Note, RefuseState, ServeState, Stop, StopReason
from decod.protocol.core.events import StateFetched, StateFetchFailed, StateRequested
from decod.protocol.core.jobs import Load, ReturnToAnchor, Snapshot, SnapshotTaken
from decod.protocol.core.messages import Differs, Leave
from decod.protocol.state.stage_state import EARLY_MAX, StageState
from tests.unit.protocol.cast import (
    D0,
    LOCALLY,
    R1A,
    R1B,
    R1C,
    context_of,
    end_job,
    freed,
    jobs_of,
    member,
    not_called,
    sent,
    settle,
    tensor,
    view_of,
)

NEW = [member(f"r1{letter}", since_iteration=4) for letter in "xyz"]
VIEW = view_of("d0", "r1a", "r1b", *NEW)
X, Y, Z = (m.node_id for m in NEW)


def fetch_of(effects: object) -> list[NodeId]:
    """Return the donors that are to be asked, best first; nothing if none are."""
    assert isinstance(effects, list)
    return [donor for e in effects if isinstance(e, FetchState) for donor in e.donors]


# --- loading --------------------------------------------------------------------------------------


def test_at_the_start_of_the_run_everybody_holds_the_state_already() -> None:
    state = StageState(context_of(R1A, VIEW), not_called)
    assert not state.loaded
    assert state.enter(0) == []
    assert state.loaded


def test_at_the_start_of_a_resumed_run_everybody_holds_the_state_already() -> None:
    context = context_of(R1A, VIEW)
    context.start_iteration = 40
    state = StageState(context, not_called)
    assert state.iteration == 40
    assert state.enter(40) == []
    assert state.loaded


def test_newcomers_spread_over_the_older_members() -> None:
    asked = [
        fetch_of(StageState(context_of(node, VIEW), not_called).enter(4)) for node in (X, Y, Z)
    ]
    assert asked == [[R1A, R1B], [R1B, R1A], [R1A, R1B]]


def test_other_donors_come_first_when_a_state_does_not_load_and_then_the_node_leaves() -> None:
    state = StageState(context_of(Y, VIEW), not_called)
    effects = state.enter(4)
    assert effects[-1] == FetchState((R1B, R1A), 1, 4)
    assert fetch_of(state.load_failed("not finite")) == [R1A, R1B]
    effects = state.load_failed("hash of blocks.0 differs")
    reason = "no member could give this node its stage's state"
    assert sent(effects) == [(D0, Leave(reason, at_once=True))]
    assert effects[-1] == Stop(StopReason.REMOVED, reason)


def test_a_node_leaves_when_no_donor_gives_what_it_wants_now() -> None:
    state = StageState(context_of(Y, VIEW), not_called)
    state.enter(4)
    for stage, iteration in ((1, 3), (2, 4)):
        assert state.fetch_failed(StateFetchFailed(stage, iteration, "reset")) == []
    assert isinstance(state.fetch_failed(StateFetchFailed(1, 4, "reset"))[-1], Stop)


def test_a_member_that_differs_fetches_the_state_of_the_others_when_an_iteration_is_opened() -> (
    None
):
    state, context = holder()
    told = Differs(4, (R1A, X))
    for sender, message in ((R1B, told), (R1A, Differs(3, (R1A,))), (R1A, Differs(4, (R1B,)))):
        state.differs(sender, message)
        assert state.opened() == []
    state.differs(R1A, told)
    effects = state.opened()
    assert effects[-1] == FetchState((R1B, Y, Z), 1, 4, alike=True)
    assert not state.loaded
    assert "differed" in context.why
    state.loaded = True
    assert state.opened() == []
    state.differs(R1A, told)
    assert isinstance(state.opened()[-1], Stop), "its device does other arithmetic"


def test_a_state_that_can_not_be_amended_is_kept_rather_than_lost() -> None:
    state, _ = holder()
    failed = StateFetchFailed(1, 4, "they are gone")
    assert not state.keeps_own(failed)
    state.differs(R1A, Differs(4, (R1A,)))
    state.opened()
    assert state.keeps_own(failed)
    assert state.give_up_own_steps() == []


def test_who_keeps_its_state_gives_up_what_it_has_learnt_by_itself() -> None:
    """The others have counted that as lost already."""
    state, context = holder()
    settle(context, sync=LOCALLY)
    state.moved_on = True
    state.differs(R1A, Differs(4, (R1A,)))
    state.opened()
    assert jobs_of(state.give_up_own_steps()) == [ReturnToAnchor()]
    assert not state.moved_on


def test_a_state_that_nobody_is_left_to_amend_is_kept() -> None:
    state, context = holder()
    state.differs(R1A, Differs(4, (R1A,)))
    state.opened()
    assert not state.loaded
    assert state.opened() == []
    assert not state.loaded, "somebody may still give it"
    context.view = view_of("d0", "r1a")
    assert state.opened() == [Note("state.loaded", (("iteration", 4),))]
    assert state.loaded


def test_what_was_committed_meanwhile_needs_no_amendment() -> None:
    state, _ = holder()
    state.differs(R1A, Differs(4, (R1A,)))
    state.committed(5)
    assert state.opened() == []


def test_a_newcomer_among_newcomers_finds_no_donor() -> None:
    state = StageState(context_of(X, view_of("d0", *NEW)), not_called)
    assert isinstance(state.enter(4)[-1], Stop)


def test_who_leads_and_can_have_no_state_asks_nobody_to_let_it_go() -> None:
    """It would have to make a view without its leader: the others elect one."""
    state = StageState(context_of(D0, VIEW), not_called)
    (stop,) = state.give_up("its disk is broken")
    assert isinstance(stop, Stop)
    *left, stop = StageState(context_of(X, VIEW), not_called).give_up("its disk is broken")
    assert len(left) == 1


def test_what_was_fetched_is_loaded() -> None:
    context = context_of(X, VIEW)
    state = StageState(context, not_called)
    state.enter(4)
    effects = state.fetched(StateFetched(1, 4, "{}", tensor(1)))
    assert jobs_of(effects) == [Load(4, "{}")]
    assert freed(end_job(context, effects)) == [1]


@pytest.mark.parametrize(
    ("stage", "iteration", "loaded"), [(1, 3, False), (1, 4, True), (2, 4, False)]
)
def test_state_that_is_not_wanted_is_freed(stage: int, iteration: int, loaded: bool) -> None:
    state = StageState(context_of(X, VIEW), not_called)
    state.enter(4)
    state.loaded = loaded
    effects = state.fetched(StateFetched(stage, iteration, "{}", tensor(1)))
    assert freed(effects) == [1]
    assert jobs_of(effects) == []


# --- giving ---------------------------------------------------------------------------------------


def holder(iteration: int = 4) -> tuple[StageState, Context]:
    context = context_of(R1A, VIEW)
    state = StageState(context, not_called)
    state.enter(0)
    state.committed(iteration)
    return state, context


def ask(request_id: int, iteration: int = 4, *, with_optimizer: bool = True) -> StateRequested:
    return StateRequested(request_id, 1, iteration, with_optimizer)


def test_one_copy_serves_all_who_wait_for_the_same() -> None:
    """A donor's memory must not grow with the number of newcomers (I6)."""
    state, context = holder()
    effects = state.requested(ask(1))
    assert jobs_of(effects) == [Snapshot(with_optimizer=True)]
    assert state.requested(ask(2)) == []
    other = state.requested(ask(3, with_optimizer=False))
    assert jobs_of(other) == [Snapshot(with_optimizer=False)]
    # The second copy needs no question for its size, so it may end first.
    end_job(context, other, tensor(2))
    served = state.copied(jobs_of(other)[0], SnapshotTaken(4, "m"), tensor(2))
    assert served == [ServeState((3,), 4, "m", tensor(2).id)]
    assert len(context.tensors) == 0, "the driver owns it now"
    end_job(context, effects, tensor(1))
    assert state.copied(jobs_of(effects)[0], SnapshotTaken(4, "m"), tensor(1)) == [
        ServeState((1, 2), 4, "m", tensor(1).id)
    ]


def test_a_request_after_the_copy_was_served_gets_its_own() -> None:
    state, context = holder()
    effects = state.requested(ask(1))
    end_job(context, effects, tensor(1))
    state.copied(jobs_of(effects)[0], SnapshotTaken(4, "m"), tensor(1))
    assert jobs_of(state.requested(ask(2))) == [Snapshot(with_optimizer=True)]


@pytest.mark.parametrize("iteration", [3, 4 + EARLY_MAX + 1, 0])
def test_state_that_is_not_held_is_refused(iteration: int) -> None:
    state, _ = holder()
    (refusal,) = state.requested(ask(1, iteration))
    expected = f"holds the state of iteration 4, asked was {iteration}"
    assert refusal == RefuseState(1, expected)


def test_another_stages_state_is_refused() -> None:
    state, _ = holder()
    asked = StateRequested(1, 2, 4, with_optimizer=True)
    assert state.requested(asked) == [RefuseState(1, "does not serve stage 2")]


def test_a_node_that_has_not_loaded_gives_nothing() -> None:
    state = StageState(context_of(X, VIEW), not_called)
    state.enter(4)
    assert isinstance(state.requested(ask(1))[0], RefuseState)


def test_what_a_node_asked_for_as_a_candidate_is_not_loaded_over_its_proposal() -> None:
    """It entered on its way to the state: the last average is coming, and a state may come too."""
    context = context_of(X, VIEW)
    state = StageState(context, not_called)
    state.lacks(4, "")
    effects = state.fetched(StateFetched(1, 4, "{}", tensor(1)))
    assert (jobs_of(effects), freed(effects)) == ([], [1])
    assert state.fetch_failed(StateFetchFailed(1, 4, "gone")) == []
    assert fetch_of(state.fetch_entered())
    assert jobs_of(state.fetched(StateFetched(1, 4, "{}", tensor(2)))) == [Load(4, "{}")]


def test_a_request_for_the_next_iteration_waits_for_its_commit() -> None:
    state, _ = holder()
    assert state.requested(ask(1, 5)) == []
    assert jobs_of(state.committed(5)) == [Snapshot(with_optimizer=True)]
    assert state.committed(6) == []


def test_no_more_than_64_requests_wait() -> None:
    state, _ = holder()
    for k in range(32):
        state.requested(ask(k, 5))
        state.requested(ask(100 + k, 4))
    assert state.requested(ask(999)) == [RefuseState(999, "too many requests wait")]


def test_a_copy_of_another_iteration_than_asked_for_is_refused_and_freed() -> None:
    state, context = holder()
    asked = state.requested(ask(1))
    end_job(context, asked, tensor(1))
    effects = state.copied(jobs_of(asked)[0], SnapshotTaken(5, "m"), tensor(1))
    assert effects[0] == RefuseState(1, "the state has moved on")
    assert freed(effects) == [1]


def test_a_copy_that_fails_is_refused_to_all_who_waited() -> None:
    state, _ = holder()
    (job,) = jobs_of(state.requested(ask(1)))
    state.requested(ask(2))
    assert state.job_failed(0.0, job, "no memory") == [RefuseState(k, "no memory") for k in (1, 2)]


def test_a_member_is_no_newcomer_of_a_later_iteration() -> None:
    """Whoever was admitted before the last commit can give state to who was admitted after it."""
    view = view_of("d0", member("r1b", since_iteration=3), member("r1c", since_iteration=4))
    assert fetch_of(StageState(context_of(R1C, view), not_called).enter(4)) == [R1B]
