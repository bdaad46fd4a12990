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
from decod.protocol.core.effects import Effect, Note, Send
from decod.protocol.core.events import earliest
from decod.protocol.core.messages.server_messages import Fetch, Given, Leg, Offer, Taken, Unable
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
        links = self._context.links
        members = (*view.roster(self._stage), *view.clients[self._stage])
        pass_s = 2 * links.compute_s
        self.workers.expect((m.node_id for m in members if m.capacity), pass_s)
        self.deadline_s = self._context.now_s + min(_SOON_MAX_S, pass_s)

    def reset(self) -> list[Effect]:
        """Forget the iteration."""
        self.entries.clear()
        self._pool.clear()
        self.workers.reset()
        self._closed = False
        self.deadline_s = None
        return self.inspection.reset() + self._kept.clear()

    @property
    def awaited(self) -> set[NodeId]:
        """Workers whose outputs are to come."""
        return {node for node, record in self.workers.records.items() if record.given}

    def _entry(self, microbatch: MicrobatchId) -> StageInput:
        return self.entries.setdefault(microbatch, StageInput())

    # --- forward ------------------------------------------------------------------------------

    def activation(self, microbatch: MicrobatchId, tensor: TensorId) -> list[Effect]:
        """The stage before has computed a microbatch, or sends it again."""
        entry = self._entry(microbatch)
        effects = list[Effect]()
        self._kept.keep(Kind.ENTRY, microbatch, tensor)
        if entry.here:
            effects += self._return_again(microbatch) if entry.returned else []
        elif self._kept.get(Kind.ENTRY, microbatch) is None:
            effects += self._fail(microbatch, "there is no room to keep an activation")
        else:
            entry.here = True
            asked_by = entry.asked_by
            entry.asked_by = set()
            for worker in sorted(asked_by):
                effects += self.fetched(worker, microbatch)
            if entry.state is InputState.WAITING:
                self._pool[microbatch] = None
        return effects + self._context.tensors.release(tensor) + self._give()

    def offered(self, sender: NodeId, message: Offer) -> list[Effect]:
        """A worker takes microbatches."""
        num = len(servers_of(self._context.view.roster(self._stage), Duty.FRONTAL))
        self.workers.offered(sender, message, num)
        return self._give()

    def _give(self) -> list[Effect]:
        """Give what waits to workers."""
        effects = list[Effect]()
        entries = [(m, self.entries[m]) for m in self._pool if self._wanted(self.entries[m])]
        waiting = [(m, entry.given_to | entry.unable) for m, entry in entries]
        for microbatch, worker in self.workers.choose(waiting):
            del self._pool[microbatch]
            effects += self._give_to(worker, microbatch)
        return effects + (self._give_again() if not (self._pool or self._closed) else [])

    def _wanted(self, entry: StageInput) -> bool:
        """Whether somebody may need the output that a microbatch lacks."""
        return entry.lost or not self._closed

    def _give_again(self) -> list[Effect]:
        """Let workers without work do what others have, and will not do for some time."""
        given = {m: e for m, e in self.entries.items() if e.state is InputState.GIVEN}
        having = {m: entry.given_to | entry.unable for m, entry in given.items()}
        effects = list[Effect]()
        while (found := self.workers.spare(having)) is not None:
            microbatch, worker = found
            having[microbatch] = having[microbatch] | {worker}
            effects += self._give_to(worker, microbatch)
        return effects

    def _give_to(self, worker: NodeId, microbatch: MicrobatchId) -> list[Effect]:
        self._await(microbatch, self.entries[microbatch], worker)
        return self._say_given(microbatch, worker) + self._send(worker, microbatch)

    def _await(self, microbatch: MicrobatchId, entry: StageInput, worker: NodeId) -> None:
        """Expect an output from a worker."""
        now_s = self._context.now_s
        wait_s = max(_LATE_MIN_S, _LATE_FACTOR * self.workers.expected_s(worker))
        entry.state = InputState.GIVEN
        entry.due_s = now_s + wait_s
        entry.given_to.add(worker)
        self.deadline_s = earliest(self.deadline_s, entry.due_s)
        self.workers.gave(now_s, worker, microbatch)

    def _say_given(self, microbatch: MicrobatchId, worker: NodeId) -> list[Effect]:
        context = self._context
        server = self._backward(microbatch)
        given = Given(context.iteration, context.view.version, microbatch, worker)
        return [] if server is None else [Send(server, given)]

    def _send(self, worker: NodeId, microbatch: MicrobatchId) -> list[Effect]:
        tensor = self._kept.get(Kind.ENTRY, microbatch)
        assert tensor is not None, f"{microbatch} is given, and not here"
        self.entries[microbatch].sent_to.add(worker)
        tensor = self._context.tensors.retain(tensor)
        return self._courier.activation(worker, microbatch, Leg.TASK, tensor)

    def taken(self, message: Taken) -> list[Effect]:
        """The backward server has an output."""
        microbatch = message.microbatch
        entry = self._entry(message.microbatch)
        self.workers.made(message.worker, microbatch)
        entry.state = InputState.DONE
        entry.due_s = None
        entry.maker = message.worker
        entry.lost = False
        self._pool.pop(microbatch, None)
        return self._give()

    def again(self, microbatch: MicrobatchId, worker: NodeId) -> list[Effect]:
        """What a worker has made of a microbatch, or would make, can't be used."""
        entry = self._entry(microbatch)
        self.workers.done(worker, microbatch)
        entry.unable.add(worker)
        if entry.state is InputState.DONE and entry.maker != worker:
            return self._give()
        return self._make_again(microbatch, entry) + self._give()

    def missing(self, microbatch: MicrobatchId) -> list[Effect]:
        """The backward server lacks an output that is needed again."""
        entry = self._entry(microbatch)
        entry.lost = True
        if entry.state is InputState.WAITING or entry.due_s is not None:
            return self._give()
        return self._make_again(microbatch, entry) + self._give()

    def _make_again(self, microbatch: MicrobatchId, entry: StageInput) -> list[Effect]:
        """Have a forward pass done by another, if any is left that can."""
        if entry.unable and all(node in entry.unable for node in self.workers.records):
            return self._fail(microbatch, "no worker can compute it")
        entry.lost = entry.lost or entry.state is InputState.DONE
        self._pool_again(microbatch, entry)
        return []

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

    def undelivered(self, worker: NodeId, microbatch: MicrobatchId) -> list[Effect]:
        """A forward pass did not reach the worker that it was given to."""
        entry = self.entries.get(microbatch)
        if entry is None or entry.state is not InputState.GIVEN:
            return []
        if not self._others(entry):
            return []  # It is sent again by itself.
        self.workers.done(worker, microbatch)
        self._pool_again(microbatch, entry)
        return self._give()

    def begun(self) -> None:
        """The batch is home: outputs are needed only where they are lost."""
        self._closed = True
        self.deadline_s = None
        for entry in self.entries.values():
            entry.due_s = entry.due_s if entry.lost else None
            self.deadline_s = earliest(self.deadline_s, entry.due_s)

    def overdue(self, now_s: float) -> list[Effect]:
        """Have others do the work of workers that have been silent for too long."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return []
        self.deadline_s = None
        effects = list[Effect]()
        self.workers.forget_silent()  # No deadline is earlier than that for offers.
        for microbatch, entry in self.entries.items():
            if entry.due_s is not None and entry.due_s <= now_s:
                self._pool_again(microbatch, entry)
                fields = (("microbatch", str(microbatch)), ("stage", self._stage))
                effects.append(Note("task.pooled", fields))
            self.deadline_s = earliest(self.deadline_s, entry.due_s)
        return effects + self._give()

    # --- backward -----------------------------------------------------------------------------

    def fetched(self, worker: NodeId, microbatch: MicrobatchId) -> list[Effect]:
        """A worker is to compute the backward pass of a microbatch that it has not got."""
        entry = self._entry(microbatch)
        if entry.here:
            return self._send(worker, microbatch)
        first = not entry.asked_by
        entry.asked_by.add(worker)
        return self._ask_for(microbatch) if first else []

    def _ask_for(self, microbatch: MicrobatchId) -> list[Effect]:
        """Ask the stage before for an activation that a lost server had.

        That may have been lost together with one of the stage before, and then nobody there knows
        that it is needed.
        """
        context = self._context
        before = self._before(microbatch)
        fetch = Fetch(context.iteration, context.view.version, microbatch)
        return [] if before is None else [Send(before, fetch)]

    def returned(self, worker: NodeId, microbatch: MicrobatchId, tensor: TensorId) -> list[Effect]:
        """A worker has computed a backward pass, and what it returned may be used.

        It returns a lost server's microbatches to who takes the place of that one, too.
        """
        assert self._placement is not None
        view = self._context.view
        entry = self._entry(microbatch)
        if worker in entry.sent_to or self._placement.bereft(view, self._stage, Duty.FRONTAL):
            return self.gradient(microbatch, tensor)
        return [unasked(worker, microbatch), *self._context.tensors.release(tensor)]

    def gradient(self, microbatch: MicrobatchId, tensor: TensorId) -> list[Effect]:
        """A worker has computed a backward pass."""
        entry = self._entry(microbatch)
        if entry.returned:
            return self._context.tensors.release(tensor)
        entry.returned = True
        self.workers.returned(microbatch)
        self._kept.keep(Kind.RETURN, microbatch, tensor)
        return self._courier.gradient(self._before(microbatch), microbatch, Leg.ONWARD, tensor)

    def _return_again(self, microbatch: MicrobatchId) -> list[Effect]:
        gradient = self._kept.get(Kind.RETURN, microbatch)
        if gradient is None:
            return self._fail(microbatch, "a gradient that is needed again was not kept")
        gradient = self._context.tensors.retain(gradient)
        return self._courier.gradient(self._before(microbatch), microbatch, Leg.ONWARD, gradient)

    def _fail(self, microbatch: MicrobatchId, reason: str) -> list[Effect]:
        """Have the iteration repeated."""
        assert self._placement is not None
        context = self._context
        home = self._placement.home(microbatch)
        unable = Unable(context.iteration, context.view.version, microbatch, reason)
        return [] if home is None else [Send(home, unable)]

    # --- after a loss -------------------------------------------------------------------------

    def mend(self, before: View) -> list[Effect]:
        """Some members are not in the context's view any more, as they were in the one before."""
        view = self._context.view
        effects = list[Effect]()
        self._closed = False
        self.workers.keep(view.by_id)
        for microbatch, entry in self.entries.items():
            entry.given_to &= view.by_id.keys()
            entry.asked_by &= view.by_id.keys()
            having = [n for n, r in self.workers.records.items() if microbatch in r.given]
            if entry.state is InputState.GIVEN and not having:
                effects += self._make_again(microbatch, entry)
            if self._backward(microbatch, before) != self._backward(microbatch):
                effects += self._output_lost(microbatch, entry, having)
            if self._before(microbatch, before) != self._before(microbatch):
                effects += self._return_again(microbatch) if entry.returned else []
                effects += self._ask_for(microbatch) if entry.asked_by else []
        return effects + self._give()

    def _output_lost(
        self, microbatch: MicrobatchId, entry: StageInput, having: list[NodeId]
    ) -> list[Effect]:
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
            return self._make_again(microbatch, entry)
        return [effect for node in having for effect in self._say_given(microbatch, node)]

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
