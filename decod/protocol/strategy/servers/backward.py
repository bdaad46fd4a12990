"""A backward server: it gathers its stage's outputs, and has workers compute backward passes.

It notes who has made which output: the segment list. The gradient of an output goes to the worker
that made it, if that is still there; otherwise another is given it, and begins with the forward
pass. Each backward pass is given to one worker. Only when that one is lost with all that it had
added up, or says that it has not begun, is it given to another. So each is in one sum.

    (given) -> made: the output has gone on -> (the gradient is here) assigned -> folded
                                                `-- its worker is lost, or gives it up --'

Whoever takes a lost backward server's place first hears from all workers what they have of it.

Source: reliable and unreliable parameter servers, section 3.2.1.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.averaging.averager import Weight
from decod.protocol.core.context import Context
from decod.protocol.core.events import earliest
from decod.protocol.core.messages.server_messages import (
    Holding,
    Leg,
    Missing,
    Offer,
    Revoke,
    Settled,
    Taken,
    Unable,
)
from decod.protocol.core.view import Duty, Member, View
from decod.protocol.strategy.servers.placement import Courier, KeptTensors, Kind, Placement
from decod.protocol.strategy.servers.workers import Inspection, WorkerTable, unasked
from decod.protocol.strategy.step import weight_of

_LATE_FACTOR = 4.0
"""A worker that takes so many times as long as expected is asked to give its work up."""


@dataclass(slots=True)
class StageOutput:
    """One microbatch at its backward server: a segment of the list."""

    given_to: set[NodeId] = field(default_factory=set)
    early: dict[NodeId, TensorId] = field(default_factory=dict)
    """Outputs of workers that are not known to have been given it."""
    maker: NodeId | None = None
    """Whose output counts."""
    worker: NodeId | None = None
    """Who has been given the backward pass."""
    unable: set[NodeId] = field(default_factory=set)
    """Workers that have given it up. Others come first."""
    lacking: bool = False
    """The output is needed again, and is not here."""
    has_gradient: bool = False
    folded: bool = False
    revoked: bool = False
    """The worker has been asked to give it up."""
    attempt: int = 0
    """Grows each time that the backward pass is given to a worker."""
    due_s: float | None = None
    """When the worker counts as late."""


class BackwardServer:
    """One backward server's microbatches in one iteration after another.

    Args:
        context: The node's.
        courier: Carries tensors.
        kept: What this node keeps of the iteration.
    """

    def __init__(self, context: Context, courier: Courier, kept: KeptTensors) -> None:
        self._context = context
        self._out = context.out
        self._courier = courier
        self._kept = kept
        self._placement: Placement | None = None
        self.workers = WorkerTable(context)
        self.inspection = Inspection(context, self.made, is_gradient=False)
        self.outputs: dict[MicrobatchId, StageOutput] = {}
        self._unheard: set[NodeId] = set()
        """Workers that have not said yet what they have of a lost server's microbatches."""
        self._begun = False
        self._told: Weight | None = None
        """What workers were told to be in their sums, of this server's microbatches."""
        self.deadline_s: float | None = None

    def open(self, placement: Placement) -> None:
        """Begin an iteration. `reset` has come before."""
        self._placement = placement

    def reset(self) -> None:
        """Forget the iteration."""
        early = [(m, *each) for m, o in self.outputs.items() for each in o.early.items()]
        # Of lost servers, the word that a worker was given something may not have come.
        if not (self._bereft(Duty.FRONTAL) or self._bereft(Duty.BACKWARD)):
            self._out.put(*(unasked(worker, m) for m, worker, _ in early))
        self.inspection.reset()
        self._kept.clear()
        self._context.tensors.release(*(tensor for _, _, tensor in early))
        self.outputs.clear()
        self.workers.reset()
        self._unheard.clear()
        self._begun = False
        self._told = None
        self.deadline_s = None

    @property
    def awaited(self) -> set[NodeId]:
        """Workers that are to fold something in, or to say what they have."""
        waiting = (o for o in self.outputs.values() if not o.folded)
        return {o.worker for o in waiting if o.worker is not None} | self._unheard

    def _output(self, microbatch: MicrobatchId) -> StageOutput:
        return self.outputs.setdefault(microbatch, StageOutput())

    # --- forward ------------------------------------------------------------------------------

    def given(self, microbatch: MicrobatchId, worker: NodeId) -> None:
        """A worker was given a forward pass."""
        output = self._output(microbatch)
        output.given_to.add(worker)
        tensor = output.early.pop(worker, None)
        if tensor is not None:
            self.made(worker, microbatch, tensor)

    def made(self, worker: NodeId, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """A worker has made an output."""
        output = self._output(microbatch)
        tensors = self._context.tensors
        if worker not in output.given_to:
            # As a rule the word that it was is on its way.
            before = output.early.pop(worker, None)
            output.early[worker] = tensor
            if before is not None:
                tensors.release(before)
            return
        known = output.maker
        output.maker = output.maker or worker
        if self._kept.get(Kind.OUTPUT, microbatch) is not None:
            tensors.release(tensor)
            if known != worker:
                self._say_taken(microbatch, output)
            return
        self._kept.keep(Kind.OUTPUT, microbatch, tensor)
        output.lacking = False
        # Even if the maker was known, from what workers held when a server was lost: the frontal
        # server may count on this worker.
        self._send_on(microbatch, tensor)
        self._say_taken(microbatch, output)

    def _say_taken(self, microbatch: MicrobatchId, output: StageOutput) -> None:
        """Tell the frontal server, and those who need not compute it any more."""
        maker = output.maker
        assert maker is not None
        taken = Taken(*self._courier.place, microbatch, maker)
        late = (node for node in sorted(output.given_to) if node != maker)
        told = dict.fromkeys((self._frontal(microbatch), *late))
        self._out.send_all((node for node in told if node is not None), taken)

    def _miss(self, microbatch: MicrobatchId, output: StageOutput) -> None:
        """Have an output made again that a lost server had, or that was not kept."""
        output.maker = None
        output.lacking = True
        missing = Missing(*self._courier.place, microbatch)
        self._courier.tell(self._frontal(microbatch), missing)

    # --- backward -----------------------------------------------------------------------------

    def offered(self, sender: NodeId, message: Offer) -> None:
        """A worker takes microbatches."""
        self.workers.offered(sender, message, 1)
        self._assign_all()
        self._relieve()

    def _relieve(self) -> None:
        """Have workers without work do what others will not have begun for some time."""
        able = {m for m, output in self.outputs.items() if output.worker and not output.revoked}
        while (found := self.workers.overloaded(able)) is not None:
            microbatch, _ = found
            able.discard(microbatch)
            self._revoke(microbatch, self.outputs[microbatch])
            idle = [r for r in self.workers.records.values() if r.idle and not r.given]
            idle[0].idle = False

    def gradient(self, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """The stage behind has computed a gradient, or sends it again."""
        output = self._output(microbatch)
        if output.has_gradient:
            self._context.tensors.release(tensor)
            return
        self._kept.keep(Kind.GRADIENT, microbatch, tensor)
        self._context.tensors.release(tensor)
        if self._kept.get(Kind.GRADIENT, microbatch) is None:
            self._fail(microbatch, "there is no room to keep a gradient")
        else:
            output.has_gradient = True
            self._assign(microbatch, output)

    def _assign_all(self) -> None:
        for microbatch, output in self.outputs.items():
            self._assign(microbatch, output)

    def _assign(self, microbatch: MicrobatchId, output: StageOutput) -> None:
        """Give a backward pass to a worker, unless one has it."""
        taken = output.folded or output.worker is not None
        if not output.has_gradient or taken or self._unheard:
            return
        context = self._context
        workers = self.workers
        able = [node for node in workers.records if node not in output.unable]
        if not able:
            # All of those that are left have given it up once: that was because they were late.
            output.unable.clear()
            able = [*workers.records]
        if not able:
            return
        worker = min(able, key=lambda node: (workers.expected_s(node), node))
        if output.maker in able:
            worker = output.maker
        output.worker = worker
        output.attempt = output.attempt + 1
        output.revoked = False
        wait_s = max(
            context.run.protocol.complete_timeout_s, _LATE_FACTOR * workers.expected_s(worker)
        )
        workers.gave(context.now_s, worker, microbatch)
        output.due_s = context.now_s + wait_s
        self.deadline_s = earliest(self.deadline_s, output.due_s)
        tensor = self._kept.get(Kind.GRADIENT, microbatch)
        assert tensor is not None, f"the gradient of {microbatch} is not here"
        tensor = context.tensors.retain(tensor)
        self._courier.gradient(worker, microbatch, Leg.TASK, tensor, output.attempt)

    def overdue(self, now_s: float) -> None:
        """Ask workers that are late to give up what they have not begun."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return
        self.deadline_s = None
        for microbatch, output in self.outputs.items():
            late = output.due_s is not None and output.due_s <= now_s
            if late and output.worker is not None:
                self._revoke(microbatch, output)
                output.due_s = now_s + self._context.run.protocol.complete_timeout_s
            self.deadline_s = earliest(self.deadline_s, output.due_s)

    def unable(self, sender: NodeId, message: Unable) -> None:
        """A worker gives a backward pass up: nothing of it is in its sum."""
        output = self._output(message.microbatch)
        if (output.worker, output.attempt) != (sender, message.attempt) or output.folded:
            return
        self.workers.done(sender, message.microbatch)
        output.worker = output.due_s = None
        if output.maker == sender:
            output.maker = None
        output.unable.add(sender)
        self._out.note("task.given_up", microbatch=str(message.microbatch), peer=sender)
        self._assign(message.microbatch, output)

    def undelivered(self, worker: NodeId, microbatch: MicrobatchId) -> None:
        """A backward pass did not reach the worker that it was given to."""
        output = self.outputs.get(microbatch)
        if output is not None and output.worker == worker and not output.folded:
            # It may have arrived all the same.
            self._revoke(microbatch, output)

    def _revoke(self, microbatch: MicrobatchId, output: StageOutput) -> None:
        assert output.worker is not None, f"nobody has {microbatch}"
        output.revoked = True
        revoke = Revoke(*self._courier.place, microbatch, output.attempt)
        self._out.send(output.worker, revoke)

    def folded(self, sender: NodeId, microbatch: MicrobatchId) -> None:
        """A worker has a microbatch's gradient in its sum."""
        output = self._output(microbatch)
        # Nobody: the word that it was being folded in, at a lost server's time, comes later.
        if output.worker not in (sender, None) or output.folded:
            return
        self.workers.done(sender, microbatch)
        output.worker = sender
        output.folded = True
        output.due_s = None
        self._settle()

    def work(self) -> Counter[NodeId]:
        """Return how many microbatches each worker has folded in, as far as this server knows."""
        done = (output for output in self.outputs.values() if output.folded)
        return Counter(output.worker for output in done if output.worker is not None)

    # --- the end of the batch -----------------------------------------------------------------

    def begun(self) -> None:
        """The batch is whole: all its microbatches have come home."""
        self._begun = True
        self._settle()

    def _settle(self) -> None:
        """Tell all workers what is in their sums, once nothing is left for them to do.

        Whoever has taken a lost server's place may not have heard of all of its microbatches yet.
        """
        left = any(o.has_gradient and not o.folded for o in self.outputs.values())
        if not self._begun or left or self._unheard:
            return
        found = weight_of([m for m, output in self.outputs.items() if output.folded])
        if found != self._told:
            self._told = found
            settled = Settled(self._context.averaging, found.num, found.digest)
            self._out.send_all((member.node_id for member in self._all_workers), settled)

    @property
    def _all_workers(self) -> Iterable[Member]:
        view = self._context.view
        stage = self._context.member.stage_index
        return (*view.roster(stage), *view.clients[stage])

    # --- after a loss -------------------------------------------------------------------------

    def mend(self, before: View) -> None:
        """Some members are not in the context's view any more, as they were in the one before."""
        context = self._context
        placement = self._placement
        assert placement is not None
        view = context.view
        stage = context.member.stage_index
        self.workers.keep(view.by_id)
        self._begun = False
        self._told = None
        self._unheard = (
            {m.node_id for m in self._all_workers} if self._bereft(Duty.BACKWARD) else set()
        )
        for microbatch, output in self.outputs.items():
            output.given_to &= view.by_id.keys()
            output.unable &= view.by_id.keys()
            for node in [node for node in output.early if node not in view]:
                context.tensors.release(output.early.pop(node))
            if output.maker is not None and output.maker not in view:
                output.maker = None
            if output.worker is not None and output.worker not in view:
                # Its sum is lost, and all that was in it.
                output.worker = output.due_s = None
                output.folded = False
            behind = placement.frontal(before, stage + 1, microbatch)
            if behind != placement.frontal(view, stage + 1, microbatch):
                kept = self._kept.get(Kind.OUTPUT, microbatch)
                if output.maker is not None or kept is not None:
                    self._output_again(microbatch, output)
            frontal = self._frontal(microbatch)
            if frontal == placement.frontal(before, stage, microbatch):
                continue
            if output.maker is not None:
                self._say_taken(microbatch, output)
            elif output.lacking:
                self._miss(microbatch, output)
        self._assign_all()

    def _bereft(self, duty: Duty) -> bool:
        """Whether servers are lost whose microbatches others deal with."""
        if self._placement is None:
            return False
        view = self._context.view
        return self._placement.bereft(view, self._context.member.stage_index, duty)

    def _output_again(self, microbatch: MicrobatchId, output: StageOutput) -> None:
        tensor = self._kept.get(Kind.OUTPUT, microbatch)
        if tensor is None:
            self._miss(microbatch, output)
        else:
            output.lacking = False
            self._send_on(microbatch, self._context.tensors.retain(tensor))

    def _send_on(self, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """Send an output to the stage behind. Takes over one reference."""
        assert self._placement is not None
        stage = self._context.member.stage_index
        behind = self._placement.frontal(self._context.view, stage + 1, microbatch)
        self._courier.activation(behind, microbatch, Leg.ONWARD, tensor)

    def fetched(self, microbatch: MicrobatchId) -> None:
        """The stage behind lacks an output."""
        self._output_again(microbatch, self._output(microbatch))

    def stood(self, sender: NodeId, message: Holding) -> None:
        """A worker says what it has of a lost server's microbatches. Once: later it may have given
        something back.
        """
        if sender not in self._unheard:
            return
        for microbatch in message.made:
            self._output(microbatch).given_to.add(sender)
        for microbatch in (*message.folding, *message.folded):
            output = self._output(microbatch)
            output.worker = output.maker = sender
            output.folded = output.folded or microbatch in message.folded
        self._unheard.discard(sender)
        early = [
            (node, m)
            for m, output in self.outputs.items()
            for node in output.early
            if node in output.given_to
        ]
        for node, m in early:
            self.given(m, node)
        for microbatch in (*message.folding, *message.folded):
            if (output := self._output(microbatch)).lacking:
                self._output_again(microbatch, output)
        if not self._unheard:
            self._assign_all()
            self._settle()

    def _fail(self, microbatch: MicrobatchId, reason: str) -> None:
        """Have the iteration repeated."""
        assert self._placement is not None
        self._courier.unable(self._placement.home(microbatch), microbatch, reason)

    def _frontal(self, microbatch: MicrobatchId) -> NodeId | None:
        assert self._placement is not None
        stage = self._context.member.stage_index
        return self._placement.frontal(self._context.view, stage, microbatch)
