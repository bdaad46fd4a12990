"""One stage's reduction: every member ends with the same bits, or the iteration fails."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.ids import AveragingId, Iteration, JobId, MicrobatchId, NodeId
from decod.protocol.averaging.vote import in_common, odd_ones
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Note, Send, SendTensor
from decod.protocol.core.events import JobFinished
from decod.protocol.core.fingerprints import digest_of
from decod.protocol.core.jobs import Gather, Propose, Proposed, Reduce, Squared
from decod.protocol.core.messages import (
    BeginAggregation,
    Differs,
    Ready,
    ReducedPart,
    ReducePart,
    StandOut,
)
from decod.protocol.state.replay_sources import ReplaySource
from decod.protocol.state.stage_state import StageState
from decod.protocol.strategy.step import EveryIteration, Step, StepState
from tests.unit.protocol.cast import (
    D0,
    D1,
    ITERATION,
    R1A,
    R1B,
    R1C,
    context_of,
    end_job,
    freed,
    jobs_of,
    mb,
    not_called,
    received,
    sent,
    settle,
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
    return Step(context, EveryIteration(), replay_source, loaded=loaded)


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


def test_the_word_goes_down_the_tree_and_a_repeat_changes_nothing() -> None:
    head = Member(R1A)
    assert sent(head.begin(BATCH)) == [(R1B, BEGIN), (R1C, BEGIN)]
    assert head.begin(BATCH) == []


@pytest.mark.parametrize("folded", [BATCH[:3], [*BATCH[:3], BATCH[0]], [*BATCH, mb(9)], []])
def test_a_sum_that_is_not_the_committed_set_fails_the_iteration(
    folded: list[MicrobatchId],
) -> None:
    """A gradient that lacks or repeats a microbatch must not enter the model (I2)."""
    alone = Member(R1A, alone=True)
    reason = f"stage 1 folded {len(folded)} microbatches, not the 4 committed"
    assert alone.begin(folded) == [Send(D0, ready(reason))]
    assert alone.machine.state is StepState.READY


def test_a_member_without_its_stages_state_proposes_when_it_has_it() -> None:
    late = Member(R1A, alone=True, loaded=False)
    assert late.machine.state_loaded() == [], "nothing has begun"
    late = Member(R1A, alone=True, loaded=False)
    assert jobs_of(late.begin(BATCH)) == []
    assert jobs_of(late.machine.state_loaded()) == [Propose(1, 0, 4)]
    assert late.machine.state_loaded() == []


# --- together -------------------------------------------------------------------------------------


def test_each_member_reduces_one_part_of_everybodys_sum() -> None:
    """r1c has folded nothing: it says so, and sends no tensor."""
    member = Member()
    first, mine = BATCH[:1], BATCH[1:]
    effects = member.begin(mine)
    assert jobs_of(effects) == [Gather(1, 3)]
    parts = [tensor(10), tensor(11), tensor(12)]
    end_job(member.context, effects, *parts)
    assert member.machine.averager._send([each.id for each in parts]) == [
        SendTensor(R1A, contribution(0, mine), tensor(10).id),
        SendTensor(R1C, contribution(2, mine), tensor(12).id),
    ]
    assert member.machine.received(received(R1C, contribution(1, []), None)) == []
    effects = member.machine.received(received(R1A, contribution(1, first), tensor(1)))
    assert jobs_of(effects) == [Reduce(1, 3, (1, 3))]
    (start,) = (e for e in effects if hasattr(e, "inputs"))
    assert start.inputs == (tensor(1).id, tensor(11).id), "in roster order"
    assert sorted(freed(end_job(member.context, effects, tensor(20)))) == [1, 11]

    effects = member.machine.averager._reduced(1, tensor(20).id, Squared(0.0))
    assert effects == [
        SendTensor(R1A, ReducedPart(AveragingId(ITERATION, 1), 1), tensor(20).id),
        SendTensor(R1C, ReducedPart(AveragingId(ITERATION, 1), 1), tensor(20).id),
    ]
    assert (
        member.machine.received(
            received(R1C, ReducedPart(AveragingId(ITERATION, 1), 2), tensor(22))
        )
        == []
    )
    effects = member.machine.received(
        received(R1A, ReducedPart(AveragingId(ITERATION, 1), 0), tensor(21))
    )
    assert jobs_of(effects) == [Propose(1, 3, 4)]
    (start,) = (e for e in effects if hasattr(e, "inputs"))
    assert start.inputs == (tensor(21).id, tensor(20).id, tensor(22).id), "in order of parts"
    end_job(member.context, effects)
    assert member.machine.vote.propose("h") == [Send(R1A, ready(s1="h"))]
    assert freed(member.context.tensors.release(tensor(20).id, tensor(20).id)) == [20]
    for number in (10, 12):
        member.context.tensors.release(tensor(number).id)
    assert len(member.context.tensors) == 0


def test_a_mean_that_stands_out_is_told_before_the_vote() -> None:
    member = Member()
    member.begin(BATCH)
    proposed = JobFinished(JobId(1), Proposed("h", standing_out=(2,)), (), duration_s=0.1)
    told = member.machine.job_done(0.0, Propose(1, 3, 4), proposed)
    stand_out = StandOut(AveragingId(ITERATION, 1), (R1C,))
    assert told == [Send(D0, stand_out), Send(R1A, ready(s1="h"))]


def test_a_member_that_folded_nothing_says_so_and_reduces_what_others_send() -> None:
    member = Member()
    effects = member.begin([])
    assert effects == [Send(R1A, contribution(0, [])), Send(R1C, contribution(2, []))]
    member.machine.received(received(R1A, contribution(1, BATCH[:2]), tensor(1)))
    effects = member.machine.received(received(R1C, contribution(1, BATCH[2:]), tensor(2)))
    assert jobs_of(effects) == [Reduce(1, 3, (2, 2))]


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


@pytest.mark.parametrize(
    ("sender", "message", "with_tensor"),
    [
        (D0, contribution(1, BATCH[:1]), True),
        (R1A, contribution(0, BATCH[:1]), True),
        (R1A, contribution(1, []), True),
        (R1A, contribution(1, BATCH[:1]), False),
    ],
)
def test_a_part_that_is_not_wanted_is_freed_and_does_not_count(
    sender: NodeId, message: ReducePart, with_tensor: bool
) -> None:
    member = Member()
    effects = member.machine.received(received(sender, message, tensor(1) if with_tensor else None))
    assert freed(effects) == ([1] if with_tensor else [])
    assert len(member.context.tensors) == 0
    assert (
        freed(member.machine.received(received(R1A, contribution(1, BATCH[:1]), tensor(2)))) == []
    )


def test_a_repeated_part_counts_once() -> None:
    member = Member()
    member.machine.received(received(R1A, contribution(1, BATCH[:1]), tensor(1)))
    assert freed(member.machine.received(received(R1A, contribution(1, BATCH[:1]), tensor(2)))) == [
        2
    ]


@pytest.mark.parametrize(("sender", "part"), [(R1C, 0), (R1A, 3), (R1A, 2), (D0, 0)])
def test_an_average_from_who_does_not_reduce_it_is_freed(sender: NodeId, part: int) -> None:
    member = Member()
    effects = member.machine.received(
        received(sender, ReducedPart(AveragingId(ITERATION, 1), part), tensor(1))
    )
    assert freed(effects) == [1]


def test_an_average_that_is_there_already_or_comes_after_the_vote_is_freed() -> None:
    member = Member()
    member.begin(BATCH)
    assert (
        member.machine.received(received(R1A, ReducedPart(AveragingId(ITERATION, 1), 0), tensor(1)))
        == []
    )
    assert freed(
        member.machine.received(received(R1A, ReducedPart(AveragingId(ITERATION, 1), 0), tensor(2)))
    ) == [2]
    member.machine.averaging_failed("no memory")
    assert freed(
        member.machine.received(received(R1C, ReducedPart(AveragingId(ITERATION, 1), 2), tensor(3)))
    ) == [3]


def test_parts_that_do_not_add_up_fail_the_iteration() -> None:
    member = Member()
    member.gather(BATCH[1:])
    member.machine.received(received(R1A, contribution(1, BATCH[1:2]), tensor(1)))
    effects = member.machine.received(received(R1C, contribution(1, []), None))
    reason = "stage 1 folded 4 microbatches, not the 4 committed"
    assert sent(effects) == [(R1A, ready(reason))]
    assert jobs_of(effects) == []


def test_an_abandoned_iteration_frees_all_that_it_held() -> None:
    member = Member()
    member.gather(BATCH[1:])
    member.machine.received(received(R1A, contribution(1, BATCH[:1]), tensor(1)))
    member.machine.received(received(R1C, ReducedPart(AveragingId(ITERATION, 1), 2), tensor(2)))
    assert sorted(freed(member.machine.abandon())) == [1, 2, 11]
    assert member.machine.abandon() == []


# --- the vote -------------------------------------------------------------------------------------


def test_a_subtree_votes_when_all_of_it_has() -> None:
    for order in permutations((R1A, R1B, R1C)):
        head = Member(R1A)
        head.begin(BATCH)
        votes: list[Effect] = []
        for node in order:
            assert votes == []
            if node == R1A:
                votes = head.machine.vote.propose("h")
            else:
                votes = head.machine.vote.received(node, ready(s1="h"))
        assert votes == [Send(D0, ready(s1="h"))]


def test_votes_of_others_than_children_do_not_count() -> None:
    head = Member(R1A)
    head.begin(BATCH)
    head.machine.vote.propose("h")
    assert head.machine.vote.received(D0, ready(s1="h")) == []
    assert head.machine.vote.received(R1B, ready(s1="h")) == []
    assert head.machine.vote.received(R1B, ready(s1="h")) == []
    assert sent(head.machine.vote.received(R1C, ready(s1="h")))


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


@pytest.mark.parametrize(
    ("proposed", "odd"), [("hxh", [1]), ("xhh", [0]), ("hxx", [0]), ("hxy", [1, 2])]
)
def test_members_that_differ_fail_the_iteration_and_those_who_differ_from_most_are_told(
    proposed: str, odd: list[int]
) -> None:
    """All members hold bit-identical parameters after a commit (I3)."""
    head, members = Member(R1A), (R1A, R1B, R1C)
    head.begin(BATCH)
    head.machine.vote.propose(proposed[0])
    assert head.machine.vote.received(R1B, ready(s1=proposed[1])) == [], (
        "two can't tell who is right"
    )
    effects = head.machine.vote.received(R1C, ready(s1=proposed[2]))
    told = tuple(members[k] for k in odd)
    *differ, (to, vote) = sent(effects)
    assert differ == [(node, Differs(ITERATION.number - 1, told)) for node in told]
    assert isinstance(vote, Ready)
    assert (to, vote.failure) == (D0, "members of stage 1 differ after the step")
    notes = [effect for effect in effects if isinstance(effect, Note)]
    assert [dict(note.fields)["peer"] for note in notes] == list(told)


def test_votes_that_differ_far_from_the_head_reach_it_by_name() -> None:
    """Ten members with two children each: r1b has r1d and r1e below it, and r1d r1h and r1i."""
    view = view_of("d0", *(f"r1{letter}" for letter in "abcdefghij"))
    ids = {m.name or m.node_id: m.node_id for m in view.roster(1)}
    names = sorted(ids)

    def member(index: int) -> Step:
        context = context_of(ids[names[index]], view)
        settle(context, protocol=replace(context.run.protocol, tree_fanout=2))
        machine = machine_of(context)
        machine.begin(BEGIN)
        return machine

    inner = member(1)
    inner.vote.propose("h")
    inner.vote.received(ids[names[4]], ready(s1="h"))
    below = Ready(
        AveragingId(ITERATION, 1), ((1, "h"),), votes=((ids[names[3]], "h"), (ids[names[8]], "x"))
    )
    ((to, vote),) = sent(inner.vote.received(ids[names[3]], below))
    assert isinstance(vote, Ready)
    assert (to, vote.failure) == (ids[names[0]], "")
    assert {names.index(node): proposed for node, proposed in vote.votes} == {
        1: "h", 3: "h", 4: "h", 7: "h", 8: "x", 9: "h",
    }  # fmt: skip


def test_at_a_tie_the_earliest_member_decides() -> None:
    roster = (R1A, R1B)
    assert odd_ones(roster, {R1A: "x", R1B: "h"}) == (R1B,)
    assert odd_ones(roster, {R1A: "h", R1B: "h"}) == ()
    assert odd_ones(roster, {}) == ()


def test_an_average_has_arrived_when_all_members_have_the_same() -> None:
    averaging = AveragingId(Iteration(1, 1), 1)
    told = [((0, 5), (1, 6), (2, 7)), ((1, 6), (2, 0)), ((2, 7), (3, 8)), ((3, 9),)]
    votes = [Ready(averaging, (), travelled=each) for each in told]
    assert in_common(votes) == ((0, 5), (1, 6), (2, 0), (3, 0))


def test_the_word_goes_on_at_once_and_the_sum_when_it_is_whole() -> None:
    root = machine_of(context_of(D0, view_of("d0", "r1a")))
    assert root.contribute(BATCH) == [], "nobody has said yet what counts"
    assert root.begin(BEGIN) == [Send(R1A, BEGIN)]
    assert root.state is StepState.WAITING
    assert len(jobs_of(root.contribute(BATCH))) == 1
    assert root.contribute(BATCH) == root.begin(BEGIN) == []


def test_the_root_gathers_the_hashes_of_all_stages() -> None:
    view = view_of("d0", "d1", "r1a")
    context = context_of(D0, view)
    root = machine_of(context)
    root.begin(BEGIN)
    root.contribute([])
    assert root.vote.received(R1A, ready(s1="b")) == []
    assert root.vote.received(D1, ready(s0="a")) == []
    assert root.vote.result is None
    assert root.vote.propose("a") == []
    assert root.vote.result == ready(s0="a", s1="b")


def test_a_vote_against_the_iteration_is_final() -> None:
    """A part that comes later must not take the vote back and start the device again."""
    head = Member(R1A)
    head.gather(BATCH[1:])
    head.machine.received(received(R1B, contribution(0, []), None))
    head.machine.received(received(R1B, ready("no memory"), None))
    effects = head.machine.received(received(R1C, contribution(0, BATCH[:1]), tensor(1)))
    assert jobs_of(effects) == []
    assert head.machine.state is StepState.READY
