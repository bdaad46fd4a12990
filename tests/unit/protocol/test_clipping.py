"""The norm of the gradient over all stages: one number for all, before anybody steps."""

from dataclasses import replace

from decod.ids import AveragingId, NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.fingerprints import digest_of
from decod.protocol.core.jobs import Propose, Squared
from decod.protocol.core.messages import (
    BeginAggregation,
    GradientNorm,
    GradientSquares,
    ReducedPart,
    ReducePart,
)
from decod.protocol.state.replay_sources import ReplaySource
from decod.protocol.state.stage_state import StageState
from decod.protocol.strategy.step import EveryIteration, Step
from decod.run.training_config import OptimizerConfig
from tests.unit.protocol.cast import (
    CONFIG,
    D0,
    ITERATION,
    R1A,
    R1B,
    R1C,
    R2A,
    context_of,
    end_job,
    jobs_of,
    mb,
    not_called,
    received,
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
        self.machine = Step(self.context, EveryIteration(), replay_source, loaded=True)

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
