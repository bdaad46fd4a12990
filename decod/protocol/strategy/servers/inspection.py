"""What clients return is looked at before it is used: one of them may be broken, or lie.

A server takes nothing that holds NaN or infinity into its stage. The leader then removes the client
at once, since what it has in its sum is as doubtful, and others do its work.
"""

from collections.abc import Callable
from dataclasses import dataclass

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send, noted
from decod.protocol.core.events import JobFinished
from decod.protocol.core.jobs import Inspect, Job
from decod.protocol.core.messages import NOT_FINITE, Suspect
from decod.protocol.core.view import Role

Take = Callable[[NodeId, MicrobatchId, TensorId], list[Effect]]
"""Takes a worker's result, with one reference to its tensor."""


@dataclass(frozen=True, slots=True)
class _Result:
    worker: NodeId
    tensor: TensorId


def unasked(worker: NodeId, microbatch: MicrobatchId) -> Effect:
    """Return the note of a result that nobody asked for. Who was asked for it does it."""
    reason = "it was not given this microbatch"
    return noted("result.refused", peer=worker, microbatch=str(microbatch), reason=reason)


class Inspection:
    """The results of one server's clients.

    Args:
        context: The node's.
        take: Takes what may be used.
        is_gradient: Results are of backward passes.
    """

    def __init__(self, context: Context, take: Take, *, is_gradient: bool) -> None:
        self._context, self._take, self._is_gradient = context, take, is_gradient
        self._open: dict[Inspect, list[_Result]] = {}

    def reset(self) -> list[Effect]:
        """Forget the iteration."""
        results = [result for each in self._open.values() for result in each]
        self._open.clear()
        return self._context.tensors.release(*(result.tensor for result in results))

    def came(self, worker: NodeId, microbatch: MicrobatchId, tensor: TensorId) -> list[Effect]:
        """A worker has returned something. Servers are trusted with more than that."""
        context, member = self._context, self._context.view.by_id.get(worker)
        if member is None:
            return context.tensors.release(tensor)
        if member.role is not Role.CLIENT:
            return self._take(worker, microbatch, tensor)
        job = Inspect(microbatch, self._is_gradient)
        self._open.setdefault(job, []).append(_Result(worker, tensor))
        return context.compute.submit(job, self, [context.tensors.retain(tensor)])

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """A result may be used."""
        assert isinstance(job, Inspect)
        result = self._pop(job)
        return self._take(result.worker, job.microbatch, result.tensor)

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """A result can't be used: the leader removes the client, and others do its work."""
        assert isinstance(job, Inspect)
        result, context = self._pop(job), self._context
        fields = {"peer": result.worker, "microbatch": str(job.microbatch), "reason": reason}
        suspect = Send(context.view.leader, Suspect(result.worker, NOT_FINITE))
        return [
            noted("result.refused", **fields),
            suspect,
            *context.tensors.release(result.tensor),
        ]

    def _pop(self, job: Inspect) -> _Result:
        """Return the result that a job has looked at: the oldest, since jobs run in order."""
        results = self._open[job]
        first = results.pop(0)
        if not results:
            del self._open[job]
        return first
