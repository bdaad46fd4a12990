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
from decod.protocol.core.effects import Effect, Send, noted
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
    Unable,
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

    def reset(self) -> list[Effect]:
        """Forget the iteration."""
        tasks = self.tasks
        self.tasks = {}
        self._queue.clear()
        self._given_up.clear()
        self._closed = self._offers = self._idle = False
        effects = [effect for task in tasks.values() for effect in self._release(task)]
        return effects + self._kept.clear()

    def offer(self) -> list[Effect]:
        """Tell the servers that this node takes microbatches."""
        self._offers = self._context.member.capacity > 0
        return self._offer(idle=False) if self._offers else []

    def _offer(self, *, idle: bool) -> list[Effect]:
        context = self._context
        stage = context.member.stage_index
        capacity = context.member.capacity
        roster = context.view.roster(stage)
        num = max(1, len(servers_of(roster, Duty.FRONTAL)))
        window = -(-(capacity + _AHEAD) // num)
        pass_s = 2 * context.links.compute_s
        place = context.iteration, context.view.version
        message = Offer(*place, window, pass_s, idle=idle)
        return [Send(member.node_id, message) for member in roster]

    def _tell_idle(self) -> list[Effect]:
        """Ask for more work, once, if there is nothing left to do."""
        idle = self._offers and not self._closed and self._context.compute.idle and not self._queue
        first = idle and not self._idle
        self._idle = idle
        return self._offer(idle=True) if first else []

    # --- forward ------------------------------------------------------------------------------

    def activation(self, microbatch: MicrobatchId, tensor: TensorId) -> list[Effect]:
        """A frontal server gives a forward pass, or what a backward pass lacks."""
        task = self.tasks.get(microbatch)
        steps = self._closed and self._context.member.role is not Role.CLIENT
        if task is None and steps:
            refused = self._unable(self._frontal(microbatch), microbatch, "it ends its batch")
            return self._context.tensors.release(tensor) + refused
        if task is None:
            task = self.tasks[microbatch] = Task(microbatch, TaskPhase.QUEUED, entry=tensor)
            self._queue.append(task)
            self._idle = False
            return self._admit()
        if task.phase in (TaskPhase.MADE, TaskPhase.FOLDED):
            return self._context.tensors.release(tensor) + self._made_before(task)
        if task.phase is not TaskPhase.FETCHING:
            task.unwanted = False
            return self._context.tensors.release(tensor)
        task.entry = tensor
        task.phase = TaskPhase.RETURNING
        self._queue.appendleft(task)
        return self._admit()

    def _made_before(self, task: Task) -> list[Effect]:
        """Send an output again that a lost server had."""
        microbatch = task.microbatch
        output = self._kept.get(Kind.OUTPUT, task.microbatch)
        if task.sent_version == self._context.view.version:
            return []  # It may be on its way.
        if output is None:
            return self._unable(self._frontal(microbatch), microbatch, "it was not kept")
        return self._send_output(task, self._context.tensors.retain(output))

    def _unable(
        self, to: NodeId | None, microbatch: MicrobatchId, reason: str, attempt: int = 0
    ) -> list[Effect]:
        """Say that another is to do a pass. To a data node: that the iteration can't be ended."""
        place = self._context.iteration, self._context.view.version
        return [] if to is None else [Send(to, Unable(*place, microbatch, reason, attempt))]

    def _admit(self) -> list[Effect]:
        """Begin forward passes, as far as there is room."""
        effects: list[Effect] = []
        while self._queue:
            if not self._has_room:
                shed = self._shed_one()
                if shed is None:
                    break
                effects += shed
            task = self._queue.popleft()
            assert task.entry is not None, task
            if task.phase is TaskPhase.QUEUED:
                task.phase = TaskPhase.FORWARD
            task.on_device = True
            entry = self._context.tensors.retain(task.entry)
            task.job = Forward(task.microbatch)
            effects += self._context.compute.submit(task.job, self, [entry])
        return effects

    @property
    def _has_room(self) -> bool:
        num = sum(task.on_device for task in self.tasks.values())
        # Who is paused in the middle of an iteration still ends what it has begun.
        return num < max(1, self._context.member.capacity)

    def _shed_one(self) -> list[Effect] | None:
        """Let go of what the latest forward pass has left on the device. None: that is worth
        nothing.
        """
        made = (
            task
            for task in reversed(self.tasks.values())
            if task.phase is TaskPhase.MADE and task.on_device
        )
        task = next(made, None) if self._context.compute.idle else None
        if task is None:
            return None
        task.on_device = False
        return self._context.compute.submit(Drop(task.microbatch))

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """A pass has been computed."""
        self._context.links.computed(job, event.duration_s)
        output = event.outputs[0].id
        match job:
            case Forward(microbatch):
                return self._forwarded(microbatch, output) + self._tell_idle()
            case Backward(microbatch):
                return self._returned(microbatch, output) + self._tell_idle()
        raise AssertionError(f"{job} is no pass of a worker's")

    def _forwarded(self, microbatch: MicrobatchId, output: TensorId) -> list[Effect]:
        context = self._context
        task = self.tasks[microbatch]
        task.job = None
        if task.unwanted:
            task.phase = TaskPhase.MADE
            return [*context.tensors.release(output), *self._forget(task), *self._admit()]
        self._kept.keep(Kind.OUTPUT, microbatch, output)
        if task.phase is TaskPhase.RETURNING:  # The output has been where it is needed.
            return context.tensors.release(output) + self._begin_backward(task)
        task.phase = TaskPhase.MADE
        effects = self._send_output(task, output)
        if task.gradient is not None:  # It was given with another's output.
            task.phase = TaskPhase.RETURNING
            return effects + self._begin_backward(task)
        return effects + self._admit()

    def _send_output(self, task: Task, output: TensorId) -> list[Effect]:
        task.sent_version = self._context.view.version
        server = self._backward(task.microbatch)
        return self._courier.activation(server, task.microbatch, Leg.RESULT, output)

    def taken(self, message: Taken) -> list[Effect]:
        """Another's output counts: forget this node's, unless its gradient is here."""
        task = self.tasks.get(message.microbatch)
        own = message.worker == self._context.node_id
        if (
            own
            or task is None
            or task.phase not in (TaskPhase.QUEUED, TaskPhase.FORWARD, TaskPhase.MADE)
        ):
            return []
        if task.gradient is not None:
            return []
        if task.phase is TaskPhase.FORWARD:
            task.unwanted = True
            return []
        return self._forget(task) + self._admit()

    def _forget(self, task: Task) -> list[Effect]:
        """Do no more about a microbatch of which nothing is in the sum."""
        del self.tasks[task.microbatch]
        effects = self._release(task) + self._kept.drop(Kind.OUTPUT, task.microbatch)
        if task in self._queue:
            self._queue.remove(task)
        if task.on_device:
            effects += self._context.compute.submit(Drop(task.microbatch))
        return effects

    def close(self) -> list[Effect]:
        """The batch is home: let go of outputs that are still to come. Who needs one all the same,
        since it is lost, asks for it again.
        """
        assert self.all_done, "what was to be folded in would be missing"
        if self._closed:
            return []
        self._closed = True
        left = [t for t in self.tasks.values() if t.phase in (TaskPhase.QUEUED, TaskPhase.FORWARD)]
        effects = list[Effect]()
        compute = self._context.compute
        for task in left:
            del self.tasks[task.microbatch]
            effects += self._release(task)
            if task.job is not None:
                effects += compute.abandon(task.job) + compute.submit(Drop(task.microbatch))
        self._queue.clear()
        return effects

    def _release(self, task: Task) -> list[Effect]:
        held = [tensor for tensor in (task.entry, task.gradient) if tensor is not None]
        task.entry = task.gradient = None
        return self._context.tensors.release(*held)

    # --- backward -----------------------------------------------------------------------------

    def gradient(self, message: StageGradient, tensor: TensorId) -> list[Effect]:
        """A backward server gives a backward pass."""
        microbatch = message.microbatch
        attempt = (message.path_version, message.attempt)
        task = self.tasks.get(microbatch)
        if self._given_up.get(microbatch, (0, 0)) >= attempt:
            return self._context.tensors.release(tensor)
        if task is None:
            self.tasks[microbatch] = Task(microbatch, TaskPhase.FETCHING, None, tensor, attempt)
            return self._fetch(microbatch)
        if task.gradient is not None or task.phase in (TaskPhase.RETURNING, TaskPhase.FOLDED):
            return self._context.tensors.release(tensor)
        task.gradient = tensor
        task.attempt = attempt
        task.unwanted = False
        if task.phase is not TaskPhase.MADE:
            return []  # The forward pass comes first.
        task.phase = TaskPhase.RETURNING
        if task.on_device:
            return self._begin_backward(task)
        self._queue.appendleft(task)
        return self._admit()

    def revoke(self, sender: NodeId, message: Revoke) -> list[Effect]:
        """Give a backward pass up, unless it has begun."""
        microbatch = message.microbatch
        attempt = (message.path_version, message.attempt)
        task = self.tasks.get(microbatch)
        if task is not None and task.phase is TaskPhase.FOLDED:
            return self._say_folded(microbatch)
        known = (self._given_up.get(microbatch, attempt), task.attempt if task else attempt)
        if attempt < max(known):
            return []  # Another has come, or been given up, since.
        effects = [] if task is None else self._give_back(task)
        if effects is None:
            return []  # It is under way.
        self._given_up[microbatch] = attempt
        told = self._unable(sender, microbatch, "it was asked to give it up", message.attempt)
        return [*effects, *told, *self._admit()]

    def _give_back(self, task: Task) -> list[Effect] | None:
        """Forget a gradient; what was made before it still counts. None: the device has it."""
        if task.gradient is None:
            if task.phase is not TaskPhase.RETURNING:
                return []
            assert task.job is not None, task
            effects = self._context.compute.withdraw(task.job)
            if effects is not None:
                task.phase = TaskPhase.MADE
                task.job = None
            return effects
        effects = self._context.tensors.release(task.gradient)
        task.gradient = None
        if task.phase is TaskPhase.FETCHING:
            return effects + self._forget(task)
        if task.phase is TaskPhase.RETURNING and task in self._queue:
            self._queue.remove(task)
            task.phase = TaskPhase.MADE
        elif task.phase is TaskPhase.RETURNING:
            task.phase = TaskPhase.FORWARD
            task.unwanted = True
        return effects

    def _fetch(self, microbatch: MicrobatchId) -> list[Effect]:
        context = self._context
        server = self._frontal(microbatch)
        message = Fetch(context.iteration, context.view.version, microbatch)
        return [] if server is None else [Send(server, message)]

    def _begin_backward(self, task: Task) -> list[Effect]:
        gradient = task.gradient
        task.gradient = None
        assert gradient is not None, task
        task.job = Backward(task.microbatch)
        return self._context.compute.submit(task.job, self, [gradient])

    def _returned(self, microbatch: MicrobatchId, output: TensorId) -> list[Effect]:
        """The backward pass has been computed: it counts."""
        task = self.tasks[microbatch]
        task.phase = TaskPhase.FOLDED
        task.job = None
        task.on_device = False
        effects = self._release(task) + self._say_folded(microbatch)
        self._kept.keep(Kind.RETURN, microbatch, output)
        frontal = self._frontal(microbatch)
        effects += self._courier.gradient(frontal, microbatch, Leg.RESULT, output)
        return effects + self._admit()

    def _say_folded(self, microbatch: MicrobatchId) -> list[Effect]:
        context = self._context
        server = self._backward(microbatch)
        message = Folded(context.iteration, context.view.version, microbatch)
        return [] if server is None else [Send(server, message)]

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """The device has refused a pass."""
        assert isinstance(job, (Forward, Backward))
        task = self.tasks[job.microbatch]
        task.on_device = False
        returning = task.phase in (TaskPhase.RETURNING, TaskPhase.FOLDED)
        note = noted("microbatch.refused", microbatch=str(job.microbatch), peer="", reason=reason)
        # A sum that lacks something must not count: then the iteration is repeated.
        assert self._placement is not None
        home = self._placement.home(job.microbatch)
        frontal = self._frontal(job.microbatch)
        told = self._unable(home if returning else frontal, job.microbatch, reason[:200])
        return [note, *told, *([] if returning else self._forget(task)), *self._admit()]

    # --- after a loss -------------------------------------------------------------------------

    def reopen(self) -> None:
        """What is lost has to be computed again, even if the batch was home."""
        self._closed = False

    def mend(self, before: View) -> list[Effect]:
        """Servers are not in the context's view any more, as they were in the one before.

        Those that take their places get what the lost ones had.
        """
        effects = list[Effect]()
        for microbatch, task in self.tasks.items():
            moved = self._backward(microbatch, before) != self._backward(microbatch)
            if task.phase is TaskPhase.MADE and moved:
                effects += self._output_again(task)
            if self._frontal(microbatch, before) != self._frontal(microbatch):
                effects += self._frontal_again(task)
        return effects + self._tell_holding()

    def _tell_holding(self) -> list[Effect]:
        """Tell those that take lost backward servers' places what this node has of theirs."""
        context = self._context
        placement = self._placement
        stage = self._context.member.stage_index
        assert placement is not None
        if not placement.bereft(context.view, stage, Duty.BACKWARD):
            return []
        effects: list[Effect] = []
        for server in placement.all_backward(context.view, stage):
            own = [task for m, task in self.tasks.items() if self._backward(m) == server]
            effects.append(Send(server, _holding(context.averaging, own)))
        return effects

    def _output_again(self, task: Task) -> list[Effect]:
        output = self._kept.get(Kind.OUTPUT, task.microbatch)
        if output is not None:
            return self._send_output(task, self._context.tensors.retain(output))
        effects = self._context.compute.submit(Drop(task.microbatch)) if task.on_device else []
        task.phase = TaskPhase.QUEUED
        task.on_device = False
        self._queue.append(task)
        return effects + self._admit()

    def _frontal_again(self, task: Task) -> list[Effect]:
        """Another frontal server takes a microbatch over."""
        microbatch = task.microbatch
        if task.phase is TaskPhase.FETCHING:
            return self._fetch(microbatch)
        if task.phase is not TaskPhase.FOLDED:
            return []
        gradient = self._kept.get(Kind.RETURN, microbatch)
        if gradient is None:
            assert self._placement is not None
            reason = "a frontal server is lost, and what was sent to it was not kept"
            return self._unable(self._placement.home(microbatch), microbatch, reason)
        gradient = self._context.tensors.retain(gradient)
        return self._courier.gradient(self._frontal(microbatch), microbatch, Leg.RESULT, gradient)

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
