"""Microbatches that are trained on again, because relays that had learnt from them are gone."""

from dataclasses import replace

import pytest

from decod.ids import FlowId, MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.view import View
from decod.protocol.strategy.data_share import Learners
from decod.protocol.strategy.microbatch import HeldMicrobatch
from decod.run.training_config import SyncConfig
from tests.unit.protocol.cast import (
    D0,
    LOCALLY,
    R1A,
    R1B,
    R2A,
    R2B,
    context_of,
    member,
    reopen,
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


def test_what_is_trained_on_again_is_not_lost_with_the_average_of_who_had_learnt_from_it() -> None:
    context = data_node(replace(REREADS, overlap=True))
    learners = Learners(context)
    commit(learners, mb(1), averaged=0)
    reopen(context, travelled=((1, 5), (2, 6)))
    change(context, "d0", "r1b", "r2b")
    assert learners.take_lost() == set()
    reopen(context, travelled=((1, 5),))
    change(context, "d0", "r1b", "r2b", "r2a'")
    assert learners.take_lost() == {mb(1)}
    commit(learners, mb(1), path=NEW)
    reopen(context, travelled=())
    change(context, "d0", "r1b", "r2b", "r1a'", "r2a'")
    assert learners.take_lost() == set()
    change(context, "d0", "r2b", "r1a'", "r2a'")
    assert learners.take_lost() == {mb(1)}, "r1b has learnt from it"


def test_the_oldest_are_forgotten_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decod.protocol.strategy.data_share.WAITING_MAX", 2)
    context = data_node()
    learners = Learners(context)
    for iteration in (1, 2, 3):
        commit(learners, mb(iteration))
    change(context, "d0", "r1b", "r2b")
    assert learners.take_lost() == {mb(2), mb(3)}
