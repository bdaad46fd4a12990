"""A node of a stage with servers, part by part: what a test brings it, and what it sends."""

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import JobFailed, JobFinished, Received
from decod.protocol.core.jobs import Job, JobResult, Nothing
from decod.protocol.core.messages.scopes import Message
from decod.protocol.core.messages.server_messages import Leg, StageActivation, StageGradient
from decod.protocol.core.view import Member, View
from decod.protocol.strategy.servers.placement import Courier, KeptTensors, Placement, Room
from tests.unit.protocol.cast import ITERATION, context_of, tensor, told_end, view_of

NUM = 4
"""Microbatches of the batch."""


def stage(*without: str, client: Member | str = "c1a", version: int = 1) -> View:
    """Return two stages: one with two servers of each kind and two clients, one with a pair.

    Microbatches 0 and 1 are f1a's and b1a's, the others f1b's and b1b's.

    Args:
        without: Members that are lost.
        client: Stands for c1a.
        version: The view's.
    """
    names = ["d0", "f1a", "f1b", "b1a", "b1b", "c1b", "f2a", "b2a"]
    left = [name for name in names if name not in without]
    own = [client] if "c1a" not in without else []
    return view_of(*left, *own, version=version, num_stages=3)


class Bench:
    """The parts of a node that has a view of `stage`, and what they send to this node itself.

    Attributes:
        own: What the courier brought to this node's other half.
    """

    def __init__(self, node: NodeId, view: View) -> None:
        self.context: Context = context_of(node, view)
        self.own: list[Message] = []
        self.room = Room()
        self.kept = KeptTensors(self.context, self.room)
        self.courier = Courier(self.context, self._took)
        self.placement = Placement(view, num_microbatches=NUM, num_shares=1)
        self._num_tensors = 100

    def _took(self, received: Received, taken: TensorId) -> None:
        self.own.append(received.message)
        self.context.tensors.release(taken)

    def new(self) -> TensorId:
        """Return a tensor that has just come, with one reference."""
        self._num_tensors += 1
        return self.context.tensors.add(tensor(self._num_tensors))

    def lose(self, *without: str, version: int = 2) -> View:
        """Adopt a view without some members. Returns the view before."""
        before, now = self.context.view, stage(*without, version=version)
        self.context.adopt(now)
        return before

    def end(
        self, job: Job, *, result: JobResult | None = None, num_outputs: int = 1
    ) -> list[Effect]:
        """End a job that the device has been given. It took a second."""
        job_id = self._given(job)
        self._num_tensors += num_outputs
        outputs = tuple(tensor(self._num_tensors - k) for k in range(num_outputs))
        done = JobFinished(job_id, result or Nothing(), outputs, duration_s=1.0)
        return told_end(self.context, done, now_s=self.context.now_s)

    def refuse(self, job: Job, reason: str = "a value is nan") -> list[Effect]:
        """Have the device refuse a job."""
        job_id = self._given(job)
        failed = JobFailed(job_id, reason, fatal=False)
        return told_end(self.context, failed, now_s=self.context.now_s)

    def _given(self, job: Job) -> int:
        """Return the oldest of these that the device has."""
        return next(i for i, given in self.context.compute._given.items() if given.job == job)

    @property
    def num_held(self) -> int:
        """Tensors that this node still has."""
        return len(self.context.tensors)


def activation(microbatch: MicrobatchId, leg: Leg, version: int = 1) -> StageActivation:
    return StageActivation(ITERATION, version, microbatch, leg)


def gradient(
    microbatch: MicrobatchId, leg: Leg, version: int = 1, attempt: int = 0
) -> StageGradient:
    return StageGradient(ITERATION, version, microbatch, leg, attempt)
