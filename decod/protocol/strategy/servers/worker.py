"""What a worker does for its stage's servers: forward and backward passes, as they are given.

    QUEUED -> FORWARD -> MADE -> RETURNING -> FOLDED
    (a gradient comes for which it has made nothing) FETCHING -> RETURNING -> FOLDED

A worker is a client, or a server that has a device. It sends the output of a forward pass to the
microbatch's backward server, and the gradient of a backward pass to its frontal server. The
parameters' gradient stays here, in the worker's sum. That sum counts as long as the worker is in
the view: so a microbatch whose backward pass was given to a worker is given to no other.

Of a forward pass whose output came too late, and of one whose place another needs more, nothing is
kept on the device. If the gradient comes all the same, the forward pass is computed again.

Source: reliable and unreliable parameter servers, section 3.2.1, "Task Pool".
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from decod.ids import AveragingId, MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.events import JobFinished
from decod.protocol.core.jobs import Backward, Drop, Forward, Job
from decod.protocol.core.messages.server_messages import (
    Fetch,
    Folded,
    Holding,
    Leg,
    Offer,
    Revoke,
    StageGradient,
    Taken,
)
from decod.protocol.core.view import Duty, Role, View
from decod.protocol.strategy.servers.placement import (
    Courier,
    KeptTensors,
    Kind,
    Placement,
    servers_of,
)

_AHEAD = 2
"""Forward passes that a worker may be given beyond those that fit on its device. They wait here, so
that the device need not wait for the next one's way."""


class TaskPhase(Enum):
    QUEUED = "queued"
    """The activation is here, and waits for room on the device."""
    FORWARD = "forward"
    MADE = "made"
    """The output has gone out."""
    FETCHING = "fetching"
    """The gradient is here, and the activation is not."""
    RETURNING = "returning"
    """The gradient is here, and what the backward pass needs is, or is being computed."""
    FOLDED = "folded"


@dataclass(slots=True)
class Task:
    """One microbatch at a worker."""

    microbatch: MicrobatchId
    phase: TaskPhase
    entry: TensorId | None = None
    """The activation, until the backward pass ends."""
    gradient: TensorId | None = None
    """Of the output, until the backward pass is submitted."""
    attempt: tuple[int, int] = (0, 0)
    """Version of the view, and attempt, with which the gradient came."""
    on_device: bool = False
    """What the backward pass needs takes up room there, or is about to."""
    job: Job | None = None
    """The pass that waits for the device, or is under way."""
    sent_version: int = -1
    """Of the view in which the output was sent last."""
    unwanted: bool = False
    """Another's output counts: what the forward pass that is under way leaves is let go of."""


class Worker:
    """One worker's tasks in one iteration after another.

    Args:
        context: The node's.
        courier: Carries tensors.
        kept: What this node has sent.
    """

    def __init__(self, context: Context, courier: Courier, kept: KeptTensors) -> None:
        self._context = context
        self._out = context.out
        self._courier = courier
        self._kept = kept
        self._placement: Placement | None = None
        self.tasks: dict[MicrobatchId, Task] = {}
        self._given_up: dict[MicrobatchId, tuple[int, int]] = {}
        """Backward passes that were revoked: version of the view, and attempt."""
        self._offers = self._idle = False
        """The servers know that this node takes microbatches; and that it has nothing to do."""
        self._closed = False
        """The batch is home: no more work is asked for."""
        self._queue: deque[Task] = deque()
        """Forward passes that wait for room; those that backward passes wait for come first."""

    @property
    def folded(self) -> Sequence[MicrobatchId]:
        """What is in this node's gradient sum."""
        return [m for m, task in self.tasks.items() if task.phase is TaskPhase.FOLDED]

    @property
    def all_done(self) -> bool:
        """Whether all whose gradients have come are in the sum."""
        waits = (TaskPhase.FETCHING, TaskPhase.RETURNING)
        return not any(task.phase in waits for task in self.tasks.values())

    @property
    def awaited(self) -> set[NodeId]:
        """Frontal servers that owe this node an activation."""
        late = (m for m, task in self.tasks.items() if task.phase is TaskPhase.FETCHING)
        return {node for m in late if (node := self._frontal(m)) is not None}

    def open(self, placement: Placement) -> None:
        """Begin an iteration. `reset` has come before."""
        self._placement = placement

    def reset(self) -> None:
        """Forget the iteration."""
        tasks = self.tasks
        self.tasks = {}
        self._queue.clear()
        self._given_up.clear()
        self._closed = self._offers = self._idle = False
        for task in tasks.values():
            self._release(task)
        self._kept.clear()

    def offer(self) -> None:
        """Tell the servers that this node takes microbatches."""
        self._offers = self._context.member.capacity > 0
        if self._offers:
            self._offer(idle=False)

    def _offer(self, *, idle: bool) -> None:
        context = self._context
        capacity = context.member.capacity
        roster = context.view.roster(context.member.stage_index)
        num = max(1, len(servers_of(roster, Duty.FRONTAL)))
        window = -(-(capacity + _AHEAD) // num)
        pass_s = 2 * context.links.compute_s
        message = Offer(*self._courier.place, window, pass_s, idle=idle)
        self._out.send_all((member.node_id for member in roster), message)

    def _tell_idle(self) -> None:
        """Ask for more work, once, if there is nothing left to do."""
        idle = self._offers and not self._closed and self._context.compute.idle and not self._queue
        first = idle and not self._idle
        self._idle = idle
        if first:
            self._offer(idle=True)

    # --- forward ------------------------------------------------------------------------------

    def activation(self, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """A frontal server gives a forward pass, or what a backward pass lacks."""
        task = self.tasks.get(microbatch)
        steps = self._closed and self._context.member.role is not Role.CLIENT
        if task is None and steps:
            self._context.tensors.release(tensor)
            self._courier.unable(self._frontal(microbatch), microbatch, "it ends its batch")
        elif task is None:
            task = self.tasks[microbatch] = Task(microbatch, TaskPhase.QUEUED, entry=tensor)
            self._queue.append(task)
            self._idle = False
            self._admit()
        elif task.phase in (TaskPhase.MADE, TaskPhase.FOLDED):
            self._context.tensors.release(tensor)
            self._made_before(task)
        elif task.phase is not TaskPhase.FETCHING:
            task.unwanted = False
            self._context.tensors.release(tensor)
        else:
            task.entry = tensor
            task.phase = TaskPhase.RETURNING
            self._queue.appendleft(task)
            self._admit()

    def _made_before(self, task: Task) -> None:
        """Send an output again that a lost server had."""
        microbatch = task.microbatch
        output = self._kept.get(Kind.OUTPUT, task.microbatch)
        if task.sent_version == self._context.view.version:
            return  # It may be on its way.
        if output is None:
            self._courier.unable(self._frontal(microbatch), microbatch, "it was not kept")
        else:
            self._send_output(task, self._context.tensors.retain(output))

    def _admit(self) -> None:
        """Begin forward passes, as far as there is room."""
        while self._queue and (self._has_room or self._shed_one()):
            task = self._queue.popleft()
            assert task.entry is not None, task
            if task.phase is TaskPhase.QUEUED:
                task.phase = TaskPhase.FORWARD
            task.on_device = True
            entry = self._context.tensors.retain(task.entry)
            task.job = Forward(task.microbatch)
            self._context.compute.submit(task.job, self, [entry])

    @property
    def _has_room(self) -> bool:
        num = sum(task.on_device for task in self.tasks.values())
        # Who is paused in the middle of an iteration still ends what it has begun.
        return num < max(1, self._context.member.capacity)

    def _shed_one(self) -> bool:
        """Let go of what the latest forward pass has left on the device. Return whether that is
        worth anything.
        """
        made = (
            task
            for task in reversed(self.tasks.values())
            if task.phase is TaskPhase.MADE and task.on_device
        )
        task = next(made, None) if self._context.compute.idle else None
        if task is None:
            return False
        task.on_device = False
        self._context.compute.submit(Drop(task.microbatch))
        return True

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        """A pass has been computed."""
        self._context.links.computed(job, event.duration_s)
        output = event.outputs[0].id
        match job:
            case Forward(microbatch):
                self._forwarded(microbatch, output)
            case Backward(microbatch):
                self._returned(microbatch, output)
            case _:
                raise AssertionError(f"{job} is no pass of a worker's")
        self._tell_idle()

    def _forwarded(self, microbatch: MicrobatchId, output: TensorId) -> None:
        context = self._context
        task = self.tasks[microbatch]
        task.job = None
        if task.unwanted:
            task.phase = TaskPhase.MADE
            context.tensors.release(output)
            self._forget(task)
            self._admit()
            return
        self._kept.keep(Kind.OUTPUT, microbatch, output)
        if task.phase is TaskPhase.RETURNING:  # The output has been where it is needed.
            context.tensors.release(output)
        else:
            task.phase = TaskPhase.MADE
            self._send_output(task, output)
        if task.gradient is not None:  # As it is if that was given with another's output.
            task.phase = TaskPhase.RETURNING
            self._begin_backward(task)
        else:
            self._admit()

    def _send_output(self, task: Task, output: TensorId) -> None:
        task.sent_version = self._context.view.version
        server = self._backward(task.microbatch)
        self._courier.activation(server, task.microbatch, Leg.RESULT, output)

    def taken(self, message: Taken) -> None:
        """Another's output counts: forget this node's, unless its gradient is here."""
        task = self.tasks.get(message.microbatch)
        own = message.worker == self._context.node_id
        if own or task is None or task.gradient is not None:
            return
        if task.phase is TaskPhase.FORWARD:
            task.unwanted = True
        elif task.phase in (TaskPhase.QUEUED, TaskPhase.MADE):
            self._forget(task)
            self._admit()

    def _forget(self, task: Task) -> None:
        """Do no more about a microbatch of which nothing is in the sum."""
        del self.tasks[task.microbatch]
        self._release(task)
        self._kept.drop(Kind.OUTPUT, task.microbatch)
        if task in self._queue:
            self._queue.remove(task)
        if task.on_device:
            self._context.compute.submit(Drop(task.microbatch))

    def close(self) -> None:
        """The batch is home: let go of outputs that are still to come. Who needs one all the same,
        since it is lost, asks for it again.
        """
        assert self.all_done, "what was to be folded in would be missing"
        if self._closed:
            return
        self._closed = True
        left = [t for t in self.tasks.values() if t.phase in (TaskPhase.QUEUED, TaskPhase.FORWARD)]
        compute = self._context.compute
        for task in left:
            del self.tasks[task.microbatch]
            self._release(task)
            if task.job is not None:
                compute.abandon(task.job)
                compute.submit(Drop(task.microbatch))
        self._queue.clear()

    def _release(self, task: Task) -> None:
        held = [tensor for tensor in (task.entry, task.gradient) if tensor is not None]
        task.entry = task.gradient = None
        self._context.tensors.release(*held)

    # --- backward -----------------------------------------------------------------------------

    def gradient(self, message: StageGradient, tensor: TensorId) -> None:
        """A backward server gives a backward pass."""
        microbatch = message.microbatch
        attempt = (message.path_version, message.attempt)
        task = self.tasks.get(microbatch)
        over = (TaskPhase.RETURNING, TaskPhase.FOLDED)
        has = task is not None and (task.gradient is not None or task.phase in over)
        if has or self._given_up.get(microbatch, (0, 0)) >= attempt:
            self._context.tensors.release(tensor)
            return
        if task is None:
            self.tasks[microbatch] = Task(microbatch, TaskPhase.FETCHING, None, tensor, attempt)
            self._fetch(microbatch)
            return
        task.gradient = tensor
        task.attempt = attempt
        task.unwanted = False
        if task.phase is not TaskPhase.MADE:
            return  # The forward pass comes first.
        task.phase = TaskPhase.RETURNING
        if task.on_device:
            self._begin_backward(task)
        else:
            self._queue.appendleft(task)
            self._admit()

    def revoke(self, sender: NodeId, message: Revoke) -> None:
        """Give a backward pass up, unless it has begun."""
        microbatch = message.microbatch
        attempt = (message.path_version, message.attempt)
        task = self.tasks.get(microbatch)
        if task is not None and task.phase is TaskPhase.FOLDED:
            self._say_folded(microbatch)
            return
        known = (self._given_up.get(microbatch, attempt), task.attempt if task else attempt)
        if attempt < max(known):
            return  # Another has come, or been given up, since.
        if task is not None and not self._give_back(task):
            return  # It is under way.
        self._given_up[microbatch] = attempt
        self._courier.unable(sender, microbatch, "it was asked to give it up", message.attempt)
        self._admit()

    def _give_back(self, task: Task) -> bool:
        """Forget a gradient, unless the device has it; what was made before it still counts. Return
        whether none is here any more.
        """
        if task.gradient is None:
            if task.phase is not TaskPhase.RETURNING:
                return True
            assert task.job is not None, task
            if not self._context.compute.withdraw(task.job):
                return False
            task.phase = TaskPhase.MADE
            task.job = None
            return True
        self._context.tensors.release(task.gradient)
        task.gradient = None
        if task.phase is TaskPhase.FETCHING:
            self._forget(task)
        elif task.phase is TaskPhase.RETURNING and task in self._queue:
            self._queue.remove(task)
            task.phase = TaskPhase.MADE
        elif task.phase is TaskPhase.RETURNING:
            task.phase = TaskPhase.FORWARD
            task.unwanted = True
        return True

    def _fetch(self, microbatch: MicrobatchId) -> None:
        fetch = Fetch(*self._courier.place, microbatch)
        self._courier.tell(self._frontal(microbatch), fetch)

    def _begin_backward(self, task: Task) -> None:
        gradient = task.gradient
        task.gradient = None
        assert gradient is not None, task
        task.job = Backward(task.microbatch)
        self._context.compute.submit(task.job, self, [gradient])

    def _returned(self, microbatch: MicrobatchId, output: TensorId) -> None:
        """The backward pass has been computed: it counts."""
        task = self.tasks[microbatch]
        task.phase = TaskPhase.FOLDED
        task.job = None
        task.on_device = False
        self._release(task)
        self._say_folded(microbatch)
        self._kept.keep(Kind.RETURN, microbatch, output)
        frontal = self._frontal(microbatch)
        self._courier.gradient(frontal, microbatch, Leg.RESULT, output)
        self._admit()

    def _say_folded(self, microbatch: MicrobatchId) -> None:
        folded = Folded(*self._courier.place, microbatch)
        self._courier.tell(self._backward(microbatch), folded)

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """The device has refused a pass."""
        assert isinstance(job, (Forward, Backward))
        task = self.tasks[job.microbatch]
        task.on_device = False
        returning = task.phase in (TaskPhase.RETURNING, TaskPhase.FOLDED)
        self._out.note("microbatch.refused", microbatch=str(job.microbatch), peer="", reason=reason)
        # A sum that lacks something must not count: then the iteration is repeated.
        assert self._placement is not None
        home = self._placement.home(job.microbatch)
        frontal = self._frontal(job.microbatch)
        self._courier.unable(home if returning else frontal, job.microbatch, reason[:200])
        if not returning:
            self._forget(task)
        self._admit()

    # --- after a loss -------------------------------------------------------------------------

    def reopen(self) -> None:
        """What is lost has to be computed again, even if the batch was home."""
        self._closed = False

    def mend(self, before: View) -> None:
        """Servers are not in the context's view any more, as they were in the one before.

        Those that take their places get what the lost ones had.
        """
        for microbatch, task in self.tasks.items():
            moved = self._backward(microbatch, before) != self._backward(microbatch)
            if task.phase is TaskPhase.MADE and moved:
                self._output_again(task)
            if self._frontal(microbatch, before) != self._frontal(microbatch):
                self._frontal_again(task)
        self._tell_holding()

    def _tell_holding(self) -> None:
        """Tell those that take lost backward servers' places what this node has of theirs."""
        context = self._context
        placement = self._placement
        stage = self._context.member.stage_index
        assert placement is not None
        if not placement.bereft(context.view, stage, Duty.BACKWARD):
            return
        for server in placement.all_backward(context.view, stage):
            own = [task for m, task in self.tasks.items() if self._backward(m) == server]
            self._out.send(server, _holding(context.averaging, own))

    def _output_again(self, task: Task) -> None:
        output = self._kept.get(Kind.OUTPUT, task.microbatch)
        if output is not None:
            self._send_output(task, self._context.tensors.retain(output))
            return
        if task.on_device:
            self._context.compute.submit(Drop(task.microbatch))
        task.phase = TaskPhase.QUEUED
        task.on_device = False
        self._queue.append(task)
        self._admit()

    def _frontal_again(self, task: Task) -> None:
        """Another frontal server takes a microbatch over."""
        microbatch = task.microbatch
        if task.phase is TaskPhase.FETCHING:
            self._fetch(microbatch)
            return
        if task.phase is not TaskPhase.FOLDED:
            return
        gradient = self._kept.get(Kind.RETURN, microbatch)
        if gradient is None:
            assert self._placement is not None
            reason = "a frontal server is lost, and what was sent to it was not kept"
            self._courier.unable(self._placement.home(microbatch), microbatch, reason)
        else:
            gradient = self._context.tensors.retain(gradient)
            self._courier.gradient(self._frontal(microbatch), microbatch, Leg.RESULT, gradient)

    # --- whose microbatch it is ---------------------------------------------------------------

    def _frontal(self, microbatch: MicrobatchId, view: View | None = None) -> NodeId | None:
        assert self._placement is not None
        stage = self._context.member.stage_index
        return self._placement.frontal(view or self._context.view, stage, microbatch)

    def _backward(self, microbatch: MicrobatchId, view: View | None = None) -> NodeId | None:
        assert self._placement is not None
        stage = self._context.member.stage_index
        return self._placement.backward(view or self._context.view, stage, microbatch)


def _holding(averaging: AveragingId, tasks: Iterable[Task]) -> Holding:
    """Return what a worker has of a backward server's microbatches."""
    made = list[MicrobatchId]()
    folding = list[MicrobatchId]()
    folded = list[MicrobatchId]()
    for task in tasks:
        if task.phase is TaskPhase.FOLDED:
            folded.append(task.microbatch)
        elif task.gradient is not None or task.phase is TaskPhase.RETURNING:
            folding.append(task.microbatch)
        else:
            made.append(task.microbatch)
    return Holding(averaging, tuple(made), tuple(folding), tuple(folded))
