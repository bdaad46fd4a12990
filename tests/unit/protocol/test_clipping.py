"""The norm of the gradient over all stages: one number for all, before anybody steps."""

import math
from dataclasses import replace

import pytest

from decod.ids import AveragingId, NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.fingerprints import digest_of
from decod.protocol.core.jobs import Propose, Square, Squared
from decod.protocol.core.messages.averaging_messages import (
    BeginAggregation,
    GradientNorm,
    GradientSquares,
    Ready,
    ReducedPart,
    ReducePart,
)
from decod.protocol.state.replay_sources import ReplaySource
from decod.protocol.state.stage_state import StageState
from decod.protocol.strategy.step import Step, StepPolicy
from decod.run.training_config import OptimizerConfig
from tests.unit.protocol.cast import (
    CONFIG,
    D0,
    ITERATION,
    R1A,
    R1B,
    R1C,
    R2A,
    Heard,
    context_of,
    end_job,
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
NORM = GradientNorm(AveragingId(ITERATION, 1), 5.0)


def squares(**sums: float) -> GradientSquares:
    return GradientSquares(
        AveragingId(ITERATION, 1), tuple((int(name[1:]), sum_) for name, sum_ in sums.items())
    )


class Member:
    """A member of a run that clips; everybody but r1b and r1c is alone in its stage."""

    def __init__(self, node: NodeId, *members: str, fanout: int = 4, clips: bool = True) -> None:
        view = view_of(*(members or ("d0", "r1a", "r1b", "r1c", "r2a")))
        config = replace(CONFIG, tree_fanout=fanout)
        self.context = context_of(node, view, config=config)
        settle(self.context, optimizer=OptimizerConfig(clip_norm=float(clips)))
        replay_source = ReplaySource(self.context, StageState(self.context, not_called))
        self.machine = Heard(Step(self.context, StepPolicy(), replay_source, loaded=True))

    def begin(self) -> list[Effect]:
        """Begin, alone or as one of three of whom the others have folded nothing."""
        return self.machine.begin(BEGIN) + self.machine.contribute(BATCH)

    def reduce(self, index: int) -> list[Effect]:
        """Begin, and have the average of the part that this member reduces, 0.25 squared."""
        parts = [tensor(10 + k) for k in range(3)]
        end_job(self.context, self.begin(), *parts)
        self.machine.averager._send([each.id for each in parts])
        effects: list[Effect] = []
        for other in {R1A, R1B, R1C} - {self.context.node_id}:
            effects += self.machine.received(
                received(other, ReducePart(AveragingId(ITERATION, 1), index, 0, 0), None)
            )
        end_job(self.context, effects, tensor(20))
        return self.machine.averager._reduced(index, tensor(20).id, Squared(0.25))

    def reduced(self, sender: NodeId, part: int, square_sum: float) -> list[Effect]:
        message = ReducedPart(AveragingId(ITERATION, 1), part, square_sum)
        return self.machine.received(received(sender, message, tensor(30 + part)))


def test_nothing_is_asked_where_nothing_is_clipped() -> None:
    alone = Member(R2A, clips=False)
    assert jobs_of(alone.begin()) == [Propose(1, 0, 4)]
    assert alone.machine.received(received(D0, NORM)) == []
    assert alone.machine.received(received(R1A, squares(s1=1.0))) == []


def test_a_member_that_is_alone_squares_its_sum_and_waits_for_the_norm() -> None:
    alone = Member(R2A)
    effects = alone.begin()
    assert jobs_of(effects) == [Square(1, 4)]
    end_job(alone.context, effects)
    assert alone.machine._clipping.add_parts({0: 9.0}) == [Send(D0, squares(s2=9.0))]
    assert alone.machine.awaited == {D0}
    assert jobs_of(alone.machine.received(received(D0, NORM))) == [Propose(1, 0, 4, 5.0)]
    assert alone.machine.received(received(D0, NORM)) == [], "a repeat"


def test_the_first_of_a_stage_adds_up_its_parts_in_order() -> None:
    first = Member(R1A)
    assert GradientSquares not in {type(message) for _, message in sent(first.reduce(0))}
    assert sent(first.reduced(R1C, 2, 0.5)) == []
    assert first.machine.awaited == {R1B}
    assert sent(first.reduced(R1B, 1, 2.0)) == [(D0, squares(s1=2.75))]
    assert first.machine.awaited == {D0}
    effects = first.machine.received(received(D0, NORM))
    assert sent(effects) == [(R1B, NORM), (R1C, NORM)]
    assert jobs_of(effects) == [Propose(1, 3, 4, 5.0)]


def test_the_others_of_a_stage_say_only_what_is_in_their_part() -> None:
    other = Member(R1B)
    assert sent(other.reduce(1)) == [
        (R1A, ReducedPart(AveragingId(ITERATION, 1), 1, 0.25)),
        (R1C, ReducedPart(AveragingId(ITERATION, 1), 1, 0.25)),
    ]
    assert sent(other.reduced(R1A, 0, 1.0) + other.reduced(R1C, 2, 1.0)) == []
    assert other.machine.awaited == {R1A}
    assert jobs_of(other.machine.received(received(D0, NORM))) == [Propose(1, 3, 4, 5.0)]


@pytest.mark.parametrize("own_first", [False, True])
def test_the_root_finds_the_norm_when_all_stages_have_said_their_sums(own_first: bool) -> None:
    root = Member(D0)
    end_job(root.context, root.begin())
    own = (lambda: root.machine._clipping.add_parts({0: 4.0}),)
    others = (
        lambda: root.machine.received(received(R1A, squares(s1=5.0))),
        lambda: root.machine.received(received(R1A, squares(s1=7.0))),
        lambda: root.machine.received(received(R2A, squares(s2=16.0))),
    )
    order = [*own, *others] if own_first else [*others, *own]
    effects = [step() for step in order]
    assert effects[:-1] == [[], [], []]
    (found,) = effects[-1]
    assert found == Send(D0, NORM), "4 + 5 + 16 is the square of 5; what is said again is not added"
    effects = root.machine.received(received(D0, NORM))
    assert sent(effects) == [(R1A, NORM), (R2A, NORM)]
    assert jobs_of(effects) == [Propose(1, 0, 4, 5.0)]


def test_sums_come_up_a_chain_by_way_of_the_stages_between() -> None:
    between = Member(R1A, "d0", "r1a", "r2a", fanout=1)
    end_job(between.context, between.begin())
    assert between.machine._clipping.add_parts({0: 3.0}) == []
    assert between.machine.awaited == {R2A}
    assert between.machine.received(received(R1B, squares(s2=1.0))) == [], "no child of this node"
    assert between.machine.received(received(R2A, squares(s2=1.0))) == [
        Send(D0, squares(s1=3.0, s2=1.0))
    ]
    assert sent(between.machine.received(received(D0, NORM))) == [(R2A, NORM)]


def test_a_member_without_its_stages_state_steps_when_it_has_state_and_norm() -> None:
    late = Member(R2A)
    late.machine.loaded = False
    end_job(late.context, late.begin())
    late.machine._clipping.add_parts({0: 9.0})
    assert late.machine.received(received(D0, NORM)) == []
    assert jobs_of(late.machine.state_loaded()) == [Propose(1, 0, 4, 5.0)]


def test_sums_that_overflow_stay_finite() -> None:
    """An infinite number could not be sent."""
    root = Member(D0)
    root.begin()
    root.machine.received(received(R1A, squares(s1=1.7e308)))
    root.machine.received(received(R2A, squares(s2=1.7e308)))
    (found,) = root.machine._clipping.add_parts({0: 1.7e308})
    assert isinstance(found, Send)
    assert isinstance(found.message, GradientNorm)
    assert math.isfinite(found.message.gradient_norm)
    assert found.message.gradient_norm > 1e149


def test_the_account_of_a_vote_tells_the_norm() -> None:
    alone = Member(R2A)
    end_job(alone.context, alone.begin())
    alone.machine._clipping.add_parts({0: 9.0})
    end_job(alone.context, alone.machine.received(received(D0, NORM)))
    assert alone.machine.vote.propose("h") == [
        Send(D0, Ready(AveragingId(ITERATION, 1), ((2, "h"),)))
    ]
    assert dict(alone.machine.account)["gradient_norm"] == 5.0
