"""What the leader agrees to, who may go, and what becomes of both when a view is made."""

from dataclasses import replace

import pytest

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.messages.membership_messages import Capacity, CapacityAnswer
from decod.protocol.core.view import View
from decod.protocol.leadership.seats import Seats
from decod.run.training_config import SyncConfig
from tests.unit.protocol.cast import D0, LOCALLY, R1A, R1B, R1C, Heard, notes_of, sent, view_of

ALL = view_of("d0", "r1a", "r1b", "r1c")
PAIR = view_of("d0", "r1a", "r1b")
OVERLAPPED = replace(LOCALLY, overlap=True)


def seats_of(sync: SyncConfig) -> Heard:
    return Heard(Seats(sync, EffectSink()))


def ask(seats: Heard, node: NodeId, capacity: int, *, view: View = ALL) -> str:
    """Ask for a capacity; returns why not, or nothing."""
    return refusal_of(seats.ask(view, view.by_id[node], Capacity(1, capacity)), node)


def refusal_of(effects: list[Effect], node: NodeId) -> str:
    ((to, answer),) = sent(effects)
    assert isinstance(answer, CapacityAnswer)
    assert (to, answer.request_id) == (node, 1)
    return answer.refusal


def capacities(seats: Heard) -> str:
    """Return the capacities of the next view's relays, in order."""
    members = seats.resized(ALL.members)
    assert [m.node_id for m in members] == [m.node_id for m in ALL.members]
    return " ".join(str(m.capacity) for m in members if m.stage_index)


def test_the_last_of_a_stage_is_refused_whoever_asks_first() -> None:
    seats = seats_of(SyncConfig())
    assert [ask(seats, node, 0) for node in (R1C, R1A)] == ["", ""]
    assert "stage 1 would stop" in ask(seats, R1B, 0)
    assert capacities(seats) == "0 2 0"


def test_a_data_node_is_not_paused() -> None:
    view = view_of("d0", "d1", "r1a", "r1b")
    assert "data node" in ask(seats_of(SyncConfig()), D0, 0, view=view)


def after(seats: Heard, view: View, *, averaged: bool) -> View:
    """Commit an iteration. Return the view of the next."""
    seats.committed(view, averaged=averaged, whole=True, last=False)
    return replace(view, members=tuple(seats.relieved(view.members)))


def test_who_stays_after_all_gets_its_work_back() -> None:
    seats = seats_of(OVERLAPPED)
    seats.wait_for_average(R1A)
    view = after(seats, PAIR, averaged=True)
    assert not seats.relieves(view)
    seats.stay(R1A)
    assert seats.relieves(view)
    assert after(seats, view, averaged=False) == PAIR


@pytest.mark.parametrize(("sync", "num"), [(LOCALLY, 1), (OVERLAPPED, 2)])
def test_a_run_ends_behind_its_last_average(sync: SyncConfig, num: int) -> None:
    seats = seats_of(sync)
    seats.wait_to_end()
    found = [
        seats.committed(PAIR, averaged=averaged, whole=True, last=False)
        for averaged in [False, True] * 2
    ]
    assert [notes_of(notes) for notes in found if notes] == [["learning.shared"]]
    assert found[2 * num - 1]
    assert not seats.hurry(PAIR)
