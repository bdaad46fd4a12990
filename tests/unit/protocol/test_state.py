"""A stage's state: fetched from members, handed to others."""

import pytest

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import FetchState, Note, RefuseState, Stop
from decod.protocol.core.events import StateFetched, StateFetchFailed, StateRequested
from decod.protocol.core.jobs import Load, SnapshotTaken
from decod.protocol.core.messages.averaging_messages import Differs
from decod.protocol.state.stage_state import EARLY_MAX, StageState
from tests.unit.protocol.cast import (
    D0,
    R1A,
    R1B,
    Heard,
    context_of,
    end_job,
    freed,
    jobs_of,
    member,
    not_called,
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


def test_who_leads_and_can_have_no_state_asks_nobody_to_let_it_go() -> None:
    """It would have to make a view without its leader: the others elect one."""
    state = Heard(StageState(context_of(D0, VIEW), not_called))
    (stop,) = state.give_up("its disk is broken")
    assert isinstance(stop, Stop)
    *left, stop = Heard(StageState(context_of(X, VIEW), not_called)).give_up("its disk is broken")
    assert len(left) == 1


# --- giving ---------------------------------------------------------------------------------------


def holder(iteration: int = 4) -> tuple[Heard, Context]:
    context = context_of(R1A, VIEW)
    state = Heard(StageState(context, not_called))
    state.enter(0)
    state.committed(iteration)
    return state, context


def ask(request_id: int, iteration: int = 4, *, with_optimizer: bool = True) -> StateRequested:
    return StateRequested(request_id, 1, iteration, with_optimizer)


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


def test_what_a_node_asked_for_as_a_candidate_is_not_loaded_over_its_proposal() -> None:
    """It entered on its way to the state: the last average is coming, and a state may come too."""
    context = context_of(X, VIEW)
    state = Heard(StageState(context, not_called))
    state.lacks(4, "")
    effects = state.fetched(StateFetched(1, 4, "{}", tensor(1)))
    assert (jobs_of(effects), freed(effects)) == ([], [1])
    assert state.fetch_failed(StateFetchFailed(1, 4, "gone")) == []
    assert fetch_of(state.fetch_entered())
    assert jobs_of(state.fetched(StateFetched(1, 4, "{}", tensor(2)))) == [Load(4, ("{}",))]


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
