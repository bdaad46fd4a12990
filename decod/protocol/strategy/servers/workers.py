"""What a server knows of its stage's workers, and whom it gives the next microbatch.

A worker says how long its device takes for a microbatch, and the server knows the link to it. Each
microbatch goes to the worker that is expected to have it done first: so all get work in proportion
to their speed, and none has much left at the end. One that has as many as it may wait for is passed
over only if it would not be first all the same; then the microbatch stays in the pool until
somebody has room. At the end of a batch, workers without work get what others have not begun.

Source: reliable and unreliable parameter servers, section 3.2.1. Deviation: there a batch is cut
beforehand by the clients' computing power, and what is left over goes into a pool. Here all of it
comes from the pool, one microbatch at a time.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Note, noted
from decod.protocol.core.events import JobFinished
from decod.protocol.core.jobs import Inspect, Job
from decod.protocol.core.messages import NOT_FINITE, Suspect
from decod.protocol.core.messages.server_messages import Offer
from decod.protocol.core.view import Role

Take = Callable[[NodeId, MicrobatchId, TensorId], None]
"""Takes a worker's result, with one reference to its tensor."""


@dataclass(frozen=True, slots=True)
class _Result:
    worker: NodeId
    tensor: TensorId


def unasked(worker: NodeId, microbatch: MicrobatchId) -> Note:
    """Return the note of a result that nobody asked for. Who was asked for it does it."""
    reason = "it was not given this microbatch"
    return noted("result.refused", peer=worker, microbatch=str(microbatch), reason=reason)


class Inspection:
    """The results of one server's clients.

    A server takes nothing that holds NaN or infinity into its stage. The leader then removes the
    client at once, since what it has in its sum is as doubtful, and others do its work.

    Args:
        context: The node's.
        take: Takes what may be used.
        is_gradient: Results are of backward passes.
    """

    def __init__(self, context: Context, take: Take, *, is_gradient: bool) -> None:
        self._context = context
        self._out = context.out
        self._take = take
        self._is_gradient = is_gradient
        self._open: dict[Inspect, list[_Result]] = {}

    def reset(self) -> None:
        """Forget the iteration."""
        results = [result for each in self._open.values() for result in each]
        self._open.clear()
        self._context.tensors.release(*(result.tensor for result in results))

    def came(self, worker: NodeId, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """A worker has returned something. Servers are trusted with more than that."""
        context = self._context
        member = self._context.view.by_id.get(worker)
        if member is None:
            context.tensors.release(tensor)
        elif member.role is not Role.CLIENT:
            self._take(worker, microbatch, tensor)
        else:
            job = Inspect(microbatch, self._is_gradient)
            self._open.setdefault(job, []).append(_Result(worker, tensor))
            context.compute.submit(job, self, [context.tensors.retain(tensor)])

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        """A result may be used."""
        assert isinstance(job, Inspect)
        result = self._pop(job)
        self._take(result.worker, job.microbatch, result.tensor)

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """A result can't be used: the leader removes the client, and others do its work."""
        assert isinstance(job, Inspect)
        result = self._pop(job)
        context = self._context
        fields = {"peer": result.worker, "microbatch": str(job.microbatch), "reason": reason}
        self._out.note("result.refused", **fields)
        self._out.send(context.view.leader, Suspect(result.worker, NOT_FINITE))
        context.tensors.release(result.tensor)

    def _pop(self, job: Inspect) -> _Result:
        """Return the result that a job has looked at: the oldest, since jobs run in order."""
        results = self._open[job]
        first = results.pop(0)
        if not results:
            del self._open[job]
        return first


_BACKWARD_SHARE = 2 / 3
"""Of a microbatch's time on a device."""


@dataclass(slots=True)
class WorkerRecord:
    """One worker, as a server sees it."""

    window: int
    """Microbatches that it may be given and not have done."""
    pass_s: float
    """How long the worker's device takes for a microbatch, by its own account."""
    num_servers: int = 1
    """Whose microbatches it takes in turn."""
    idle: bool = False
    """The worker has asked for more."""
    given: dict[MicrobatchId, float] = field(default_factory=dict)
    """Since when the worker has which microbatch, oldest first."""
    made: set[MicrobatchId] = field(default_factory=set)
    """Those whose forward pass it has done, and whose backward pass it will have to do."""

    @property
    def each_s(self) -> float:
        """How long the worker takes for a microbatch: beside those of other servers, unless it has
        none."""
        return self.pass_s if self.idle else self.pass_s * self.num_servers

    def left_s(self, microbatch: MicrobatchId) -> float:
        """Return how long it is expected to take for one that it has."""
        return ([*self.given].index(microbatch) + 1) * self.each_s

    def work_s(self, num_more: int) -> float:
        """Return how long its device has to work, for so many more microbatches, too."""
        num = len(self.given) + num_more + _BACKWARD_SHARE * len(self.made)
        return num * self.each_s


class WorkerTable:
    """The workers that have offered themselves in an iteration.

    Args:
        context: The server's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.records: dict[NodeId, WorkerRecord] = {}

    def reset(self) -> None:
        """An iteration is over."""
        self.records.clear()

    def keep(self, members: Mapping[NodeId, object]) -> None:
        """Forget those that are no members any more."""
        for node in [node for node in self.records if node not in members]:
            del self.records[node]

    def expect(self, nodes: Iterable[NodeId], pass_s: float) -> None:
        """An iteration begins: these are likely to take microbatches soon.

        Args:
            nodes: All workers of the stage.
            pass_s: How long each may take for one.
        """
        self.records = {node: WorkerRecord(0, pass_s) for node in nodes}

    def forget_silent(self) -> None:
        """Reckon no longer with those that have not offered themselves."""
        for node in [node for node, record in self.records.items() if not record.window]:
            del self.records[node]

    def offered(self, node: NodeId, message: Offer, num_servers: int) -> None:
        """A worker takes microbatches, from so many servers."""
        record = self.records.setdefault(node, WorkerRecord(0, message.pass_s))
        record.window = message.window
        record.idle = message.idle
        record.pass_s = message.pass_s
        record.num_servers = num_servers

    def gave(self, now_s: float, node: NodeId, microbatch: MicrobatchId) -> None:
        """A worker has got a microbatch."""
        record = self.records[node]
        record.given[microbatch] = now_s
        record.idle = False

    def made(self, node: NodeId, microbatch: MicrobatchId) -> None:
        """A worker's output counts. Nobody else need make it."""
        for worker, record in self.records.items():
            record.given.pop(microbatch, None)
            if worker == node:
                record.made.add(microbatch)

    def returned(self, microbatch: MicrobatchId) -> None:
        """The backward pass is done, too. Nobody need make the output any more."""
        for record in self.records.values():
            record.made.discard(microbatch)
            record.given.pop(microbatch, None)

    def done(self, node: NodeId, microbatch: MicrobatchId) -> None:
        """A worker's result has come, or is not wanted any more."""
        if (record := self.records.get(node)) is not None:
            record.given.pop(microbatch, None)

    def expected_s(self, node: NodeId, num_more: int = 0) -> float:
        """Return how long a worker would take until it has done one more.

        Args:
            node: The worker.
            num_more: Microbatches that it is to get before.
        """
        record = self.records[node]
        own = node == self._context.node_id
        travel_s = 0.0 if own else self._context.links.transfer_s(node)
        num = len(record.given) + num_more + 1
        return max(record.work_s(num_more + 1), num * travel_s) + travel_s

    def choose(
        self, waiting: Collection[tuple[MicrobatchId, Collection[NodeId]]]
    ) -> list[tuple[MicrobatchId, NodeId]]:
        """Return who is to get which microbatches now.

        Args:
            waiting: Microbatches in their order, and who must not get each.
        """
        more = dict.fromkeys(self.records, 0)
        chosen: list[tuple[MicrobatchId, NodeId]] = []
        for microbatch, barred in waiting:
            if all(len(r.given) + more[n] >= r.window for n, r in self.records.items()):
                break
            able = [node for node in self.records if node not in barred]
            if not able:
                continue
            best = min(able, key=lambda node: (self.expected_s(node, more[node]), node))
            record = self.records[best]
            if len(record.given) + more[best] < record.window:
                chosen.append((microbatch, best))
            more[best] += 1
        return chosen

    def spare(
        self, having: Mapping[MicrobatchId, Collection[NodeId]]
    ) -> tuple[MicrobatchId, NodeId] | None:
        """Return what somebody without work could do before those who have it. None: nothing.

        Args:
            having: Microbatches that were given, and to whom.
        """
        for worker in [node for node, record in self.records.items() if record.idle]:
            own_s = self.expected_s(worker)
            late = [
                (self._left_s(microbatch), microbatch)
                for microbatch, nodes in having.items()
                if worker not in nodes
            ]
            left_s, microbatch = max(late, default=(0.0, None))
            if microbatch is not None and left_s > own_s:
                return microbatch, worker
            self.records[worker].idle = False
        return None

    def overloaded(self, able: Collection[MicrobatchId]) -> tuple[MicrobatchId, NodeId] | None:
        """Return what a worker will do last of what it has, if somebody without work would have it
        done before. None: nobody would.

        Args:
            able: Microbatches that may be taken from workers.
        """
        idle = [node for node, record in self.records.items() if record.idle and not record.given]
        if not idle:
            return None
        own_s = min(map(self.expected_s, idle))
        late = [
            (record.left_s(microbatch), microbatch, node)
            for node, record in self.records.items()
            for microbatch in record.given
            if microbatch in able
        ]
        left_s, microbatch, node = max(late, default=(0.0, None, None))
        if microbatch is None or node is None or left_s <= own_s:
            return None
        return microbatch, node

    def _left_s(self, microbatch: MicrobatchId) -> float:
        """Return how long somebody is expected to take for one that was given."""
        having = [record for record in self.records.values() if microbatch in record.given]
        return min((record.left_s(microbatch) for record in having), default=0.0)
