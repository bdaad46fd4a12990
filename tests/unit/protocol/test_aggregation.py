"""One stage's reduction: every member ends with the same bits, or the iteration fails."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.ids import AveragingId, JobId, MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.events import JobFinished
from decod.protocol.core.fingerprints import digest_of
from decod.protocol.core.jobs import Propose, Proposed, Reduce
from decod.protocol.core.messages.audit_messages import StandOut
from decod.protocol.core.messages.averaging_messages import BeginAggregation, Ready, ReducePart
from decod.protocol.state.replay_sources import ReplaySource
from decod.protocol.state.stage_state import StageState
from decod.protocol.strategy.step import Step, StepPolicy, StepState
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R1B,
    R1C,
    Heard,
    context_of,
    end_job,
    jobs_of,
    mb,
    not_called,
    received,
    sent,
    tensor,
    view_of,
)

BATCH = [mb(k) for k in range(4)]
BEGIN = BeginAggregation(AveragingId(ITERATION, 1), 4, digest_of(BATCH))
VIEW = view_of("d0", "r1a", "r1b", "r1c")
"""Tree: d0 -> r1a -> r1b, r1c."""


def contribution(part: int, folded: list[MicrobatchId]) -> ReducePart:
    return ReducePart(AveragingId(ITERATION, 1), part, len(folded), digest_of(folded))


def ready(failure: str = "", **hashes: str) -> Ready:
    stages = tuple(sorted((int(stage[1:]), value) for stage, value in hashes.items()))
    return Ready(AveragingId(ITERATION, 1), stages, failure)


def machine_of(context: Context, *, loaded: bool = True) -> Step:
    replay_source = ReplaySource(context, StageState(context, not_called))
    return Heard(Step(context, StepPolicy(), replay_source, loaded=loaded))


class Member:
    """One member; r1b unless told otherwise, in a roster of r1a, r1b, r1c."""

    def __init__(self, node: NodeId = R1B, *, alone: bool = False, loaded: bool = True) -> None:
        self.context: Context = context_of(node, view_of("d0", "r1a") if alone else VIEW)
        self.machine = machine_of(self.context, loaded=loaded)

    def begin(self, folded: list[MicrobatchId]) -> list[Effect]:
        return self.machine.begin(BEGIN) + self.machine.contribute(folded)

    def gather(self, folded: list[MicrobatchId]) -> list[Effect]:
        """Begin, and end the job that cuts the gradient sum into tensors 10, 11, 12."""
        parts = [tensor(10 + k) for k in range(3)]
        end_job(self.context, self.begin(folded), *parts)
        return self.machine.averager._send([each.id for each in parts])


# --- alone ----------------------------------------------------------------------------------------


def test_a_member_that_is_alone_steps_by_its_own_sum() -> None:
    alone = Member(R1A, alone=True)
    assert alone.machine.vote.result is None
    effects = alone.begin(BATCH)
    assert jobs_of(effects) == [Propose(1, 0, 4)]
    assert alone.machine.state is StepState.PROPOSING
    end_job(alone.context, effects)
    assert alone.machine.vote.propose("h") == [Send(D0, ready(s1="h"))]
    assert alone.machine.vote.result == ready(s1="h")


@pytest.mark.parametrize("folded", [BATCH[:3], [*BATCH[:3], BATCH[0]], [*BATCH, mb(9)], []])
def test_a_sum_that_is_not_the_committed_set_fails_the_iteration(
    folded: list[MicrobatchId],
) -> None:
    """A gradient that lacks or repeats a microbatch must not enter the model (I2)."""
    alone = Member(R1A, alone=True)
    reason = f"stage 1 folded {len(folded)} microbatches, not the 4 committed"
    assert alone.begin(folded) == [Send(D0, ready(reason))]
    assert alone.machine.state is StepState.READY


# --- together -------------------------------------------------------------------------------------


def test_a_mean_that_stands_out_is_told_before_the_vote() -> None:
    member = Member()
    member.begin(BATCH)
    proposed = JobFinished(JobId(1), Proposed("h", standing_out=(2,)), (), duration_s=0.1)
    told = member.machine.job_done(0.0, Propose(1, 3, 4), proposed)
    stand_out = StandOut(AveragingId(ITERATION, 1), (R1C,))
    assert told == [Send(D0, stand_out), Send(R1A, ready(s1="h"))]


@given(st.permutations(["begin", "gathered", R1A, R1C]))
def test_parts_may_come_in_any_order_around_the_word(order: list[str]) -> None:
    """`gathered` can only follow `begin`; everything else may overtake."""
    member, mine = Member(), BATCH[2:]
    others = {R1A: BATCH[:1], R1C: BATCH[1:2]}
    jobs, begun = [], False
    parts = [tensor(10), tensor(11), tensor(12)]
    for step in sorted(order, key=lambda s: (s == "gathered" and not begun, 0)):
        if step == "begin":
            effects = member.begin(mine)
            end_job(member.context, effects, *parts)
            begun = True
            effects = []
        elif step == "gathered":
            effects = member.machine.averager._send([each.id for each in parts])
        else:
            node = NodeId(step)
            message = contribution(1, others[node])
            effects = member.machine.received(
                received(node, message, tensor(1 if node == R1A else 2))
            )
        jobs += jobs_of(effects)
    assert jobs == [Reduce(1, 3, (1, 2, 1))]


def test_parts_that_do_not_add_up_fail_the_iteration() -> None:
    member = Member()
    member.gather(BATCH[1:])
    member.machine.received(received(R1A, contribution(1, BATCH[1:2]), tensor(1)))
    effects = member.machine.received(received(R1C, contribution(1, []), None))
    reason = "stage 1 folded 4 microbatches, not the 4 committed"
    assert sent(effects) == [(R1A, ready(reason))]
    assert jobs_of(effects) == []


# --- the vote -------------------------------------------------------------------------------------


def test_one_failure_is_enough() -> None:
    head = Member(R1A)
    head.begin(BATCH)
    assert head.machine.vote.received(R1B, ready("no memory")) == [Send(D0, ready("no memory"))]
    assert head.machine.vote.received(R1C, ready("later")) == []
    assert head.machine.averaging_failed("mine too") == []


def test_a_member_whose_job_fails_votes_against_once() -> None:
    member = Member()
    member.begin(BATCH)
    assert member.machine.averaging_failed("x" * 999) == [Send(R1A, ready("x" * 200))]
    assert member.machine.averaging_failed("again") == []
    silent = Member()
    assert silent.machine.averaging_failed("") == [Send(R1A, ready("failed"))]
