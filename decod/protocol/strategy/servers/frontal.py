"""A frontal server: it takes activations from the stage before, and has workers compute with them.

    WAITING (in the pool) -> GIVEN to a worker -> DONE, and its output is at the backward server
       `-- the worker is lost, silent for too long, or unable --'
       `-- the output is lost with the backward server, and needed again ----------'

A forward pass may be given to several workers: the first output counts. What came is kept till the
end of the iteration, since a backward pass that another worker does begins with it. The gradients
that come back go to the stage before.

Source: reliable and unreliable parameter servers, section 3.2.1.
"""

from dataclasses import dataclass, field
from enum import Enum

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.events import earliest
from decod.protocol.core.messages.server_messages import Fetch, Given, Leg, Offer, Taken
from decod.protocol.core.view import Duty, View
from decod.protocol.strategy.servers.placement import (
    Courier,
    KeptTensors,
    Kind,
    Placement,
    servers_of,
)
from decod.protocol.strategy.servers.workers import Inspection, WorkerTable, unasked

_LATE_FACTOR = 4.0
"""A worker that takes so many times as long as expected is silent: another gets its work too."""

_SOON_MAX_S = 1.0
"""How long after an iteration's opening a worker may still offer itself, without others having got
all of the work meanwhile. Less where passes take less."""

_LATE_MIN_S = 2.0
"""Below this, times are noise."""


class InputState(Enum):
    WAITING = "waiting"
    GIVEN = "given"
    DONE = "done"


@dataclass(slots=True)
class StageInput:
    """One microbatch at its frontal server."""

    state: InputState = InputState.WAITING
    given_to: set[NodeId] = field(default_factory=set)
    """Workers that have it, or have been silent about it."""
    unable: set[NodeId] = field(default_factory=set)
    """Workers that can't compute it."""
    maker: NodeId | None = None
    """Whose output counts."""
    due_s: float | None = None
    """When whoever has it counts as silent."""
    sent_to: set[NodeId] = field(default_factory=set)
    """Workers that the activation was sent to. Others have nothing to return."""
    asked_by: set[NodeId] = field(default_factory=set)
    """Workers that wait for the activation, for its backward pass."""
    here: bool = False
    """The activation has come."""
    returned: bool = False
    """The gradient has come back."""
    lost: bool = False
    """The output was made, and is needed again: even if the batch is home."""


class FrontalServer:
    """One frontal server's microbatches in one iteration after another.

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
        self.inspection = Inspection(context, self.returned, is_gradient=True)
        self.entries: dict[MicrobatchId, StageInput] = {}
        self._pool: dict[MicrobatchId, None] = {}
        """Microbatches that wait for a worker, in their order."""
        self._closed = False
        """The batch is home: no output is needed any more."""
        self.deadline_s: float | None = None
        """When workers that are silent, or have not offered themselves, count no more."""

    def open(self, placement: Placement) -> None:
        """Begin an iteration. `reset` has come before."""
        self._placement = placement
        view = self._context.view
        members = (*view.roster(self._stage), *view.clients[self._stage])
        pass_s = 2 * self._context.links.compute_s
        self.workers.expect((m.node_id for m in members if m.capacity), pass_s)
        self.deadline_s = self._context.now_s + min(_SOON_MAX_S, pass_s)

    def reset(self) -> None:
        """Forget the iteration."""
        self.entries.clear()
        self._pool.clear()
        self.workers.reset()
        self._closed = False
        self.deadline_s = None
        self.inspection.reset()
        self._kept.clear()

    @property
    def awaited(self) -> set[NodeId]:
        """Workers whose outputs are to come."""
        return {node for node, record in self.workers.records.items() if record.given}

    def _entry(self, microbatch: MicrobatchId) -> StageInput:
        return self.entries.setdefault(microbatch, StageInput())

    # --- forward ------------------------------------------------------------------------------

    def activation(self, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """The stage before has computed a microbatch, or sends it again."""
        entry = self._entry(microbatch)
        self._kept.keep(Kind.ENTRY, microbatch, tensor)
        if entry.here:
            if entry.returned:
                self._return_again(microbatch)
        elif self._kept.get(Kind.ENTRY, microbatch) is None:
            self._fail(microbatch, "there is no room to keep an activation")
        else:
            entry.here = True
            for worker in sorted(entry.asked_by):
                self.fetched(worker, microbatch)
            entry.asked_by.clear()
            if entry.state is InputState.WAITING:
                self._pool[microbatch] = None
        self._context.tensors.release(tensor)
        self._give()

    def offered(self, sender: NodeId, message: Offer) -> None:
        """A worker takes microbatches."""
        num = len(servers_of(self._context.view.roster(self._stage), Duty.FRONTAL))
        self.workers.offered(sender, message, num)
        self._give()

    def _give(self) -> None:
        """Give what waits to workers."""
        entries = [(m, self.entries[m]) for m in self._pool if self._wanted(self.entries[m])]
        waiting = [(m, entry.given_to | entry.unable) for m, entry in entries]
        for microbatch, worker in self.workers.choose(waiting):
            del self._pool[microbatch]
            self._give_to(worker, microbatch)
        if not (self._pool or self._closed):
            self._give_again()

    def _wanted(self, entry: StageInput) -> bool:
        """Whether somebody may need the output that a microbatch lacks."""
        return entry.lost or not self._closed

    def _give_again(self) -> None:
        """Let workers without work do what others have, and will not do for some time."""
        given = {m: e for m, e in self.entries.items() if e.state is InputState.GIVEN}
        having = {m: entry.given_to | entry.unable for m, entry in given.items()}
        while (found := self.workers.spare(having)) is not None:
            microbatch, worker = found
            having[microbatch] = having[microbatch] | {worker}
            self._give_to(worker, microbatch)

    def _give_to(self, worker: NodeId, microbatch: MicrobatchId) -> None:
        self._await(microbatch, self.entries[microbatch], worker)
        self._say_given(microbatch, worker)
        self._send(worker, microbatch)

    def _await(self, microbatch: MicrobatchId, entry: StageInput, worker: NodeId) -> None:
        """Expect an output from a worker."""
        now_s = self._context.now_s
        wait_s = max(_LATE_MIN_S, _LATE_FACTOR * self.workers.expected_s(worker))
        entry.state = InputState.GIVEN
        entry.due_s = now_s + wait_s
        entry.given_to.add(worker)
        self.deadline_s = earliest(self.deadline_s, entry.due_s)
        self.workers.gave(now_s, worker, microbatch)

    def _say_given(self, microbatch: MicrobatchId, worker: NodeId) -> None:
        given = Given(*self._courier.place, microbatch, worker)
        self._courier.tell(self._backward(microbatch), given)

    def _send(self, worker: NodeId, microbatch: MicrobatchId) -> None:
        tensor = self._kept.get(Kind.ENTRY, microbatch)
        assert tensor is not None, f"{microbatch} is given, and not here"
        self.entries[microbatch].sent_to.add(worker)
        tensor = self._context.tensors.retain(tensor)
        self._courier.activation(worker, microbatch, Leg.TASK, tensor)

    def taken(self, message: Taken) -> None:
        """The backward server has an output."""
        microbatch = message.microbatch
        entry = self._entry(message.microbatch)
        self.workers.made(message.worker, microbatch)
        entry.state = InputState.DONE
        entry.due_s = None
        entry.maker = message.worker
        entry.lost = False
        self._pool.pop(microbatch, None)
        self._give()

    def again(self, microbatch: MicrobatchId, worker: NodeId) -> None:
        """What a worker has made of a microbatch, or would make, can't be used."""
        entry = self._entry(microbatch)
        self.workers.done(worker, microbatch)
        entry.unable.add(worker)
        if entry.state is not InputState.DONE or entry.maker == worker:
            self._make_again(microbatch, entry)
        self._give()

    def missing(self, microbatch: MicrobatchId) -> None:
        """The backward server lacks an output that is needed again."""
        entry = self._entry(microbatch)
        entry.lost = True
        if entry.state is not InputState.WAITING and entry.due_s is None:
            self._make_again(microbatch, entry)
        self._give()

    def _make_again(self, microbatch: MicrobatchId, entry: StageInput) -> None:
        """Have a forward pass done by another, if any is left that can."""
        if entry.unable and all(node in entry.unable for node in self.workers.records):
            self._fail(microbatch, "no worker can compute it")
        else:
            entry.lost = entry.lost or entry.state is InputState.DONE
            self._pool_again(microbatch, entry)

    def _pool_again(self, microbatch: MicrobatchId, entry: StageInput) -> None:
        """Have a forward pass done by whoever has room."""
        entry.state = InputState.WAITING
        entry.due_s = None
        entry.maker = None
        if entry.here:
            self._pool[microbatch] = None
        if not self._others(entry):
            entry.given_to.clear()  # It may have been lost on its way.

    def _others(self, entry: StageInput) -> set[NodeId]:
        """Return the workers that have not got a microbatch yet, and can compute it."""
        return self.workers.records.keys() - entry.given_to - entry.unable

    def undelivered(self, worker: NodeId, microbatch: MicrobatchId) -> None:
        """A forward pass did not reach the worker that it was given to."""
        entry = self.entries.get(microbatch)
        if entry is None or entry.state is not InputState.GIVEN:
            return
        if self._others(entry):  # Else it is sent again by itself.
            self.workers.done(worker, microbatch)
            self._pool_again(microbatch, entry)
            self._give()

    def begun(self) -> None:
        """The batch is home: outputs are needed only where they are lost."""
        self._closed = True
        self.deadline_s = None
        for entry in self.entries.values():
            entry.due_s = entry.due_s if entry.lost else None
            self.deadline_s = earliest(self.deadline_s, entry.due_s)

    def overdue(self, now_s: float) -> None:
        """Have others do the work of workers that have been silent for too long."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return
        self.deadline_s = None
        self.workers.forget_silent()  # No deadline is earlier than that for offers.
        for microbatch, entry in self.entries.items():
            if entry.due_s is not None and entry.due_s <= now_s:
                self._pool_again(microbatch, entry)
                self._out.note("task.pooled", microbatch=str(microbatch), stage=self._stage)
            self.deadline_s = earliest(self.deadline_s, entry.due_s)
        self._give()

    # --- backward -----------------------------------------------------------------------------

    def fetched(self, worker: NodeId, microbatch: MicrobatchId) -> None:
        """A worker is to compute the backward pass of a microbatch that it has not got."""
        entry = self._entry(microbatch)
        if entry.here:
            self._send(worker, microbatch)
            return
        first = not entry.asked_by
        entry.asked_by.add(worker)
        if first:
            self._ask_for(microbatch)

    def _ask_for(self, microbatch: MicrobatchId) -> None:
        """Ask the stage before for an activation that a lost server had.

        That may have been lost together with one of the stage before, and then nobody there knows
        that it is needed.
        """
        fetch = Fetch(*self._courier.place, microbatch)
        self._courier.tell(self._before(microbatch), fetch)

    def returned(self, worker: NodeId, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """A worker has computed a backward pass, and what it returned may be used.

        It returns a lost server's microbatches to who takes the place of that one, too.
        """
        assert self._placement is not None
        view = self._context.view
        entry = self._entry(microbatch)
        if worker in entry.sent_to or self._placement.bereft(view, self._stage, Duty.FRONTAL):
            self.gradient(microbatch, tensor)
        else:
            self._out.put(unasked(worker, microbatch))
            self._context.tensors.release(tensor)

    def gradient(self, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """A worker has computed a backward pass."""
        entry = self._entry(microbatch)
        if entry.returned:
            self._context.tensors.release(tensor)
            return
        entry.returned = True
        self.workers.returned(microbatch)
        self._kept.keep(Kind.RETURN, microbatch, tensor)
        self._courier.gradient(self._before(microbatch), microbatch, Leg.ONWARD, tensor)
        if entry.maker is not None:
            # If a backward server was lost, it was to send its output again. Who had the gradient
            # by then does not.
            entry.due_s = None
            if entry.lost:
                self.missing(microbatch)

    def _return_again(self, microbatch: MicrobatchId) -> None:
        gradient = self._kept.get(Kind.RETURN, microbatch)
        if gradient is None:
            self._fail(microbatch, "a gradient that is needed again was not kept")
        else:
            gradient = self._context.tensors.retain(gradient)
            self._courier.gradient(self._before(microbatch), microbatch, Leg.ONWARD, gradient)

    def _fail(self, microbatch: MicrobatchId, reason: str) -> None:
        """Have the iteration repeated."""
        assert self._placement is not None
        self._courier.unable(self._placement.home(microbatch), microbatch, reason)

    # --- after a loss -------------------------------------------------------------------------

    def mend(self, before: View) -> None:
        """Some members are not in the context's view any more, as they were in the one before."""
        view = self._context.view
        self._closed = False
        self.workers.keep(view.by_id)
        for microbatch, entry in self.entries.items():
            entry.given_to &= view.by_id.keys()
            entry.asked_by &= view.by_id.keys()
            having = [n for n, r in self.workers.records.items() if microbatch in r.given]
            if entry.state is InputState.GIVEN and not having:
                self._make_again(microbatch, entry)
            if self._backward(microbatch, before) != self._backward(microbatch):
                self._output_lost(microbatch, entry, having)
            if self._before(microbatch, before) != self._before(microbatch):
                if entry.returned:
                    self._return_again(microbatch)
                if entry.asked_by:
                    self._ask_for(microbatch)
        self._give()

    def _output_lost(
        self, microbatch: MicrobatchId, entry: StageInput, having: list[NodeId]
    ) -> None:
        """Another backward server takes a microbatch over: it has no output of it.

        Whoever is computing it, or has kept it, sends it there. If nobody has, it is made again.
        """
        if entry.state is InputState.DONE and entry.maker in self.workers.records:
            having = [*having, entry.maker]
            if not entry.here:
                entry.state = InputState.WAITING  # For the activation, unless the output comes.
            elif not entry.returned:
                self._await(microbatch, entry, entry.maker)
        elif entry.state is InputState.DONE:
            self._make_again(microbatch, entry)
            return
        for node in having:
            self._say_given(microbatch, node)

    # --- whose microbatch it is ---------------------------------------------------------------

    @property
    def _stage(self) -> int:
        return self._context.member.stage_index

    def _backward(self, microbatch: MicrobatchId, view: View | None = None) -> NodeId | None:
        assert self._placement is not None
        return self._placement.backward(view or self._context.view, self._stage, microbatch)

    def _before(self, microbatch: MicrobatchId, view: View | None = None) -> NodeId | None:
        assert self._placement is not None
        return self._placement.backward(view or self._context.view, self._stage - 1, microbatch)
