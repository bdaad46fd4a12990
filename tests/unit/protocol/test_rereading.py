"""Microbatches that are trained on again, because relays that had learnt from them are gone."""

from dataclasses import replace

import pytest

from decod.ids import FlowId, Iteration, MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import noted
from decod.protocol.core.messages import Report
from decod.protocol.core.view import View
from decod.protocol.strategy.data_microbatches import DataMicrobatches
from decod.protocol.strategy.data_share import Deferrals, Learners
from decod.protocol.strategy.microbatch import HeldMicrobatch
from decod.run.training_config import SyncConfig
from tests.support.flows import data_flows
from tests.unit.protocol.cast import (
    D0,
    LOCALLY,
    R1A,
    R1B,
    R2A,
    R2B,
    context_of,
    member,
    sent,
    settle,
    view_of,
)

MEMBERS = ("d0", "r1a", "r1b", "r2a", "r2b")
REREADS = replace(LOCALLY, reread=True)
OLD, NEW = (R1A, R2A), (R1B, R2B)


def mb(iteration: int, index: int = 0) -> MicrobatchId:
    return MicrobatchId(iteration, 0, index)


def data_node(sync: SyncConfig = REREADS) -> Context:
    context = context_of(D0, view_of(*MEMBERS))
    settle(context, sync=sync)
    return context


def change(context: Context, *members: str) -> None:
    """Let the next view have some members. `r1a'` is a later life of r1a."""
    lives = [
        member(name[:3], since_iteration=7) if name.endswith("'") else name for name in members
    ]
    view: View = view_of(*lives)
    context.adopt(replace(view, version=context.view.version + 1))


def commit(
    learners: Learners,
    *microbatches: MicrobatchId,
    path: tuple[NodeId, ...] = OLD,
    averaged: int | None = None,
) -> None:
    done = {m: HeldMicrobatch(m, FlowId(D0, 0), path, 0, stage_index=0) for m in microbatches}
    learners.committed(done, averaged)


# --- who has learnt -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "later", [("d0", "r1b", "r2a", "r2b"), ("d0", "r1a'", "r1b", "r2a", "r2b")]
)
def test_what_a_lost_relay_had_learnt_from_is_lost(later: tuple[str, ...]) -> None:
    """Also if it is there again: it has started anew."""
    context = data_node()
    learners = Learners(context)
    commit(learners, mb(1))
    commit(learners, mb(2), path=NEW)
    assert learners.take_lost() == set()
    change(context, *later)
    assert learners.take_lost() == {mb(1)}
    assert learners.take_lost() == set()


def test_nothing_is_remembered_unless_the_run_says_so() -> None:
    context = data_node(replace(REREADS, reread=False))
    learners = Learners(context)
    commit(learners, mb(1))
    change(context, "d0", "r1b", "r2b")
    assert learners.take_lost() == set()


@pytest.mark.parametrize(("overlaps", "num"), [(False, 1), (True, 2)])
def test_what_is_in_an_average_is_safe(num: int, *, overlaps: bool) -> None:
    """One that travels is in use only after the next."""
    for num_averages in range(num + 1):
        context = data_node(replace(REREADS, overlap=overlaps))
        learners = Learners(context)
        commit(learners, mb(1))
        for k in range(num_averages):
            commit(learners, mb(2 + k), path=NEW, averaged=0)
        change(context, "d0", "r1b", "r2b")
        expected = {mb(1)} if num_averages < num else set()
        assert learners.take_lost() == expected, num_averages


def test_what_is_in_an_average_that_all_others_have_is_safe_until_they_average_anew() -> None:
    context = data_node(replace(REREADS, overlap=True))
    learners = Learners(context)
    commit(learners, mb(1), averaged=0)
    commit(learners, mb(2))
    context.travelled = {1: 5}
    change(context, "d0", "r1b", "r2a", "r2b")
    assert learners.take_lost() == {mb(2)}
    context.travelled = {}
    change(context, "d0", "r1b", "r2a", "r2b", "r1a'")
    assert learners.take_lost() == {mb(1)}


def test_what_is_trained_on_again_is_not_lost_with_the_average_of_who_had_learnt_from_it() -> None:
    context = data_node(replace(REREADS, overlap=True))
    learners = Learners(context)
    commit(learners, mb(1), averaged=0)
    context.travelled = {1: 5, 2: 6}
    change(context, "d0", "r1b", "r2b")
    assert learners.take_lost() == set()
    context.travelled = {1: 5}
    change(context, "d0", "r1b", "r2b", "r2a'")
    assert learners.take_lost() == {mb(1)}
    commit(learners, mb(1), path=NEW)
    context.travelled = {}
    change(context, "d0", "r1b", "r2b", "r1a'", "r2a'")
    assert learners.take_lost() == set()
    change(context, "d0", "r2b", "r1a'", "r2a'")
    assert learners.take_lost() == {mb(1)}, "r1b has learnt from it"


@pytest.mark.parametrize(("overlaps", "num"), [(False, 2), (True, 3)])
def test_fragments_are_safe_when_all_are_averaged(num: int, *, overlaps: bool) -> None:
    """Or when an average is of all parameters."""
    sync = replace(REREADS, overlap=overlaps, fragments=2)
    for num_averages in range(num + 1):
        context = data_node(sync)
        learners = Learners(context)
        for k in range(num_averages):
            commit(learners, mb(1 + k), path=NEW if k else OLD, averaged=1 + k % 2)
        if not num_averages:
            commit(learners, mb(1))
        change(context, "d0", "r1b", "r2b")
        assert learners.take_lost() == ({mb(1)} if num_averages < num else set()), num_averages
    context = data_node(sync)
    learners = Learners(context)
    commit(learners, mb(1), averaged=0)
    if overlaps:
        commit(learners, mb(2), path=NEW, averaged=1)
    change(context, "d0", "r1b", "r2b")
    assert learners.take_lost() == set()


def test_who_is_lost_in_an_iteration_is_not_in_its_average() -> None:
    context = data_node()
    learners = Learners(context)
    commit(learners, mb(1))
    change(context, "d0", "r1b", "r2a", "r2b")
    commit(learners, mb(2), path=(R1B, R2A), averaged=0)
    assert learners.take_lost() == {mb(1)}


def test_only_the_stage_that_lacked_it_needs_it_again() -> None:
    """The relay of the other stage learns from it a second time, which nobody misses."""
    context = data_node()
    learners = Learners(context)
    commit(learners, mb(1))
    change(context, "d0", "r1b", "r2a", "r2b")
    assert learners.take_lost() == {mb(1)}
    commit(learners, mb(1), path=NEW)
    change(context, "d0", "r1b", "r2a")
    assert learners.take_lost() == set(), "r2a has learnt from it before r2b"
    change(context, "d0", "r1a", "r2a")
    assert learners.take_lost() == {mb(1)}


def test_what_is_trained_on_again_as_a_second_relay_is_lost_is_not_read_a_third_time() -> None:
    context = data_node()
    learners = Learners(context)
    commit(learners, mb(1))
    change(context, "d0", "r1b", "r2a", "r2b")
    assert learners.take_lost() == {mb(1)}
    change(context, "d0", "r1b", "r2b")
    commit(learners, mb(1), path=NEW)
    assert learners.take_lost() == set()
    change(context, "d0", "r1b", "r2a")
    assert learners.take_lost() == {mb(1)}, "r2b did the part of both"


def test_a_run_that_goes_back_repeats_all_anyway() -> None:
    context = data_node()
    learners = Learners(context)
    commit(learners, mb(1))
    learners.clear()
    change(context, "d0", "r1b", "r2b")
    assert learners.take_lost() == set()


def test_the_oldest_are_forgotten_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decod.protocol.strategy.data_share.WAITING_MAX", 2)
    context = data_node()
    learners = Learners(context)
    for iteration in (1, 2, 3):
        commit(learners, mb(iteration))
    change(context, "d0", "r1b", "r2b")
    assert learners.take_lost() == {mb(2), mb(3)}


# --- when they are read ---------------------------------------------------------------------------


def due(deferrals: Deferrals, num_again: int) -> list[MicrobatchId]:
    found, _ = deferrals.due((0,), num_again=num_again)
    return found


def test_an_iteration_takes_some_of_them_and_none_is_given_up() -> None:
    context = data_node()
    context.iteration = Iteration(9, 1)
    deferrals = Deferrals(context)
    (note,) = deferrals.read_again({mb(1), mb(2), mb(3)})
    assert note == noted("learning.repeated", num_microbatches=3, num_waiting=3)
    assert deferrals.read_again({mb(2)}) == []
    assert not deferrals.microbatches, "they are not put off"
    assert due(deferrals, 2) == [mb(1), mb(2)]
    deferrals.committed([mb(1)], [mb(2)], marked=False)
    for _ in range(9):
        context.iteration = replace(context.iteration, number=context.iteration.number + 1)
        assert due(deferrals, 2) == [mb(2), mb(3)]
        deferrals.committed([], [mb(2), mb(3)], marked=False)
    context.iteration = replace(context.iteration, number=30)
    assert due(deferrals, 1) == [mb(2)]


def test_they_wait_as_they_did_when_the_run_goes_back_to_a_mark() -> None:
    context = data_node()
    context.iteration = Iteration(4, 1)
    deferrals = Deferrals(context)
    deferrals.read_again({mb(1)})
    deferrals.committed([], [], marked=True)
    context.iteration = Iteration(5, 1)
    deferrals.committed([mb(1)], [], marked=False)
    deferrals.read_again({mb(5)})
    deferrals.go_back(4)
    assert deferrals.again == {mb(1)}


def test_no_more_than_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decod.protocol.strategy.data_share.WAITING_MAX", 2)
    deferrals = Deferrals(data_node())
    deferrals.read_again({mb(1), mb(2), mb(3)})
    assert deferrals.again == {mb(1), mb(2)}


# --- a share --------------------------------------------------------------------------------------


def test_a_share_that_is_empty_is_reported_at_once() -> None:
    """Its data node is about to leave: others read it, and what it has put off stays put off."""
    context = data_node()
    context.adopt(view_of(member("d0", capacity=0), "d1", "r1a", "r2a"))
    flows = data_flows(context)
    microbatches = DataMicrobatches(context, lambda: flows, list, num_microbatches=2)
    microbatches.share.deferrals.put_off(mb(1))
    context.iteration = Iteration(2, 1)
    ((_, report),) = sent(microbatches.open(0.0))
    assert isinstance(report, Report)
    assert (report.num_committed, report.num_deferred, report.num_reread) == (0, 1, 0)
