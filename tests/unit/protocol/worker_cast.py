"""A worker under test, and what servers give it."""

from decod.ids import NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.jobs import Backward, Forward
from decod.protocol.core.messages.server_messages import Leg, Revoke, Taken, Unable
from decod.protocol.strategy.servers.worker import TaskPhase, Worker
from tests.unit.protocol.cast import B1A, C1A, C1B, ITERATION, Heard, mb, member
from tests.unit.protocol.servers_cast import Bench, gradient, stage

M, N = mb(0), mb(3)
"""Of f1a and b1a, and of f1b and b1b."""


class WorkerBench(Bench):
    """c1a at work."""

    def __init__(self, *, capacity: int = 2, node: NodeId = C1A) -> None:
        super().__init__(node, stage(client=member("c1a", capacity=capacity)))
        self.worker = Heard(Worker(self.context, self.courier, self.kept))
        self.worker.open(self.placement)

    def give(self, microbatch: object = M) -> list[Effect]:
        return self.worker.activation(microbatch, self.new())  # type: ignore[arg-type]

    def give_back(self, microbatch: object = M, version: int = 1, attempt: int = 1) -> list[Effect]:
        message = gradient(microbatch, Leg.TASK, version, attempt)  # type: ignore[arg-type]
        return self.worker.gradient(message, self.new())

    def revoke(self, microbatch: object = M, version: int = 1, attempt: int = 1) -> list[Effect]:
        message = Revoke(ITERATION, version, microbatch, attempt)  # type: ignore[arg-type]
        return self.worker.revoke(B1A, message)

    def taken(self, microbatch: object = M, *, by: object = C1B) -> list[Effect]:
        return self.worker.taken(Taken(ITERATION, 1, microbatch, by))  # type: ignore[arg-type]

    def made(self, microbatch: object = M) -> list[Effect]:
        """Have a forward pass computed."""
        self.give(microbatch)
        return self.end(Forward(microbatch))  # type: ignore[arg-type]

    def folded(self, microbatch: object = M) -> list[Effect]:
        """Have both passes computed."""
        self.made(microbatch)
        self.give_back(microbatch)
        return self.end(Backward(microbatch))  # type: ignore[arg-type]

    def phase(self, microbatch: object = M) -> TaskPhase | None:
        task = self.worker.tasks.get(microbatch)  # type: ignore[call-overload]
        return task.phase if task is not None else None


def refusal(attempt: int = 1, version: int = 1) -> Unable:
    return Unable(ITERATION, version, M, "it was asked to give it up", attempt)
