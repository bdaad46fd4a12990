"""Members that want to leave a run in which each steps by itself."""

from dataclasses import replace

import pytest

from decod.protocol.core.view import View
from decod.protocol.leadership.availability import EVERYBODY, Partings
from decod.run.training_config import SyncConfig
from tests.unit.protocol.cast import LOCALLY, R1A, notes_of, view_of

VIEW = view_of("d0", "r1a", "r1b")
OVERLAPPED = replace(LOCALLY, overlap=True)


def after(made: Partings, view: View, *, averaged: bool, last: bool = False) -> View:
    """Commit an iteration. Return the view of the next."""
    made.committed(view, averaged=averaged, last=last)
    return replace(view, members=tuple(made.apply(view.members)))


def test_who_stays_after_all_gets_its_work_back() -> None:
    made = Partings(OVERLAPPED)
    made.ask(R1A)
    view = after(made, VIEW, averaged=True)
    assert not made.pending(view)
    made.stay(R1A)
    assert made.pending(view)
    assert after(made, view, averaged=False) == VIEW


@pytest.mark.parametrize(("sync", "num"), [(LOCALLY, 1), (OVERLAPPED, 2)])
def test_a_run_ends_behind_its_last_average(sync: SyncConfig, num: int) -> None:
    made = Partings(sync)
    made.ask(EVERYBODY)
    found = [made.committed(VIEW, averaged=averaged, last=False) for averaged in [False, True] * 2]
    assert [notes_of(notes) for notes in found if notes] == [["learning.shared"]]
    assert found[2 * num - 1]
    assert not made.hurry(())
