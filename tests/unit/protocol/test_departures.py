"""Members that want to leave a run in which each steps by itself."""

from dataclasses import replace

import pytest

from decod.protocol.core.view import View
from decod.protocol.leadership.availability import EVERYBODY, Partings
from decod.run.training_config import SyncConfig
from tests.unit.protocol.cast import LOCALLY, R1A, R1B, notes_of, view_of

VIEW = view_of("d0", "r1a", "r1b")
FULL = VIEW.by_id[R1A].capacity
OVERLAPPED = replace(LOCALLY, overlap=True)


def after(made: Partings, view: View, *, averaged: bool, last: bool = False) -> View:
    """Commit an iteration. Return the view of the next."""
    made.committed(view, averaged=averaged, last=last)
    return replace(view, members=tuple(made.apply(view.members)))


def test_who_averages_each_iteration_may_go_with_the_next_commit() -> None:
    made = Partings(SyncConfig())
    made.ask(R1A)
    assert made.free(R1A)
    assert not made.hurry(())
    assert after(made, VIEW, averaged=True) == VIEW


def test_who_steps_by_itself_stays_until_an_average() -> None:
    made = Partings(LOCALLY)
    made.ask(R1A)
    assert after(made, VIEW, averaged=False) == VIEW
    assert made.hurry(())
    assert not made.hurry((R1A,)), "it could not go anyway"
    made.average_travels = lambda: True
    assert not made.hurry(()), "all would wait for that"
    after(made, VIEW, averaged=True)
    assert made.free(R1A)
    after(made, VIEW, averaged=False)
    assert not made.free(R1A), "it could not go, and has learnt more since"


def test_while_its_contribution_travels_it_gets_no_work() -> None:
    made = Partings(OVERLAPPED)
    made.ask(R1A)
    view = after(made, VIEW, averaged=True)
    assert not view.by_id[R1A].capacity
    assert view.by_id[R1B].capacity
    assert not made.free(R1A)
    assert after(made, view, averaged=False) == view
    after(made, view, averaged=True)
    assert made.free(R1A)


def test_a_fragment_is_not_enough() -> None:
    for sync in (LOCALLY, OVERLAPPED):
        made = Partings(replace(sync, fragments=2))
        made.ask(R1A)
        made.committed(VIEW, averaged=True, whole=False, last=False)
        assert after(made, VIEW, averaged=False) == VIEW
        assert not made.free(R1A)
    view = after(made, VIEW, averaged=True)
    made.committed(view, averaged=True, whole=False, last=False)
    assert made.free(R1A), "the average of all is used with the next, whatever that is of"


def test_who_is_needed_goes_on_working() -> None:
    """The others are lost meanwhile."""
    made = Partings(OVERLAPPED)
    made.ask(R1A)
    view = after(made, VIEW, averaged=True)
    alone = [m for m in view.members if m.node_id != R1B]
    assert made.apply(alone)[-1].capacity == FULL
    view = replace(VIEW, members=tuple(made.apply(alone)))
    after(made, view, averaged=True)
    assert not made.free(R1A), "what it has learnt meanwhile travels now"


def test_one_of_a_stage_works_if_all_want_to_leave() -> None:
    made = Partings(OVERLAPPED)
    made.ask(R1A)
    made.ask(R1B)
    view = after(made, VIEW, averaged=True)
    assert [m.capacity for m in view.roster(1)] == [0, FULL]
    after(made, view, averaged=True)
    assert made.free(R1A)
    assert not made.free(R1B)


def test_who_stays_after_all_gets_its_work_back() -> None:
    made = Partings(OVERLAPPED)
    made.ask(R1A)
    view = after(made, VIEW, averaged=True)
    assert not made.pending(view)
    made.stay(R1A)
    assert made.pending(view)
    assert after(made, view, averaged=False) == VIEW


def test_the_last_average_of_a_run_holds_all() -> None:
    made = Partings(OVERLAPPED)
    made.ask(R1A)
    after(made, VIEW, averaged=True, last=True)
    assert made.free(R1A)


def test_a_run_that_goes_back_begins_anew() -> None:
    made = Partings(OVERLAPPED)
    made.ask(R1A)
    view = after(made, VIEW, averaged=True)
    made.begin_era()
    after(made, view, averaged=True)
    assert not made.free(R1A)


@pytest.mark.parametrize(("sync", "num"), [(LOCALLY, 1), (OVERLAPPED, 2)])
def test_a_run_ends_behind_its_last_average(sync: SyncConfig, num: int) -> None:
    made = Partings(sync)
    made.ask(EVERYBODY)
    found = [made.committed(VIEW, averaged=averaged, last=False) for averaged in [False, True] * 2]
    assert [notes_of(notes) for notes in found if notes] == [["learning.shared"]]
    assert found[2 * num - 1]
    assert not made.hurry(())
