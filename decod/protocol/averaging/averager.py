"""One average over some members: everybody ends with the same bits (I3).

Every member of the roster sends part k of its own sum to member k. Member k adds the parts up *in
roster order*, divides by the total weight, and sends the result back to all (a butterfly).

    WAITING -> COLLECTING -> REDUCING -> AVERAGED
         `----------- or OVER -----------'

A compressed average may have two phases, each of which goes this way. What a member sends in the
second depends on the means of the first.

Each part says how much weight is in it, and the digest of what that weight stands for. The reducer
of a part checks that these add up to the total: a sum that lacks or repeats something fails the
average instead of entering the model (I2). A part that arrives early is kept.

An averager knows neither stage, view nor vote. Whoever needs the average gives it the roster and
the total. Listeners get the average, and contribute nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from decod.ids import AveragingId, NodeId, TensorId
from decod.protocol.core.average_spec import WHOLE, AverageSpec
from decod.protocol.core.compute_queue import ComputeQueue
from decod.protocol.core.context import Context
from decod.protocol.core.digest import add_digests
from decod.protocol.core.effects import Effect, Send, SendTensor
from decod.protocol.core.events import JobFinished, Tensor
from decod.protocol.core.jobs import (
    Gather,
    GatherAhead,
    Job,
    Reduce,
    ReduceAhead,
    Squared,
)
from decod.protocol.core.messages.averaging import ReducedPart, ReducePart
from decod.protocol.core.tensor_store import TensorStore


class AveragingState(Enum):
    WAITING = "waiting"
    """This node's own sum is not whole, or the total is not known."""
    COLLECTING = "collecting"
    """Parts of the members' sums are under way."""
    REDUCING = "reducing"
    """This node's part is being added up, or other members' averages are under way."""
    AVERAGED = "averaged"
    OVER = "over"
    """It has failed, or nobody needs it any longer."""


@dataclass(frozen=True, slots=True)
class Weight:
    """How much a sum stands for."""

    num: int
    """Microbatches."""
    digest: int
    """Of their ids."""


@dataclass(frozen=True, slots=True)
class Averaging:
    """Which average it is, of what, and who takes part."""

    id: AveragingId
    """Names the average in messages."""
    roster: tuple[NodeId, ...]
    """Member k reduces part k."""
    spec: AverageSpec = WHOLE
    """What the average is of, and how it travels."""
    overlapped: bool = False
    """The average travels while members train on."""

    def __post_init__(self) -> None:
        assert len({*self.roster}) == len(self.roster), "a member would reduce two parts"


@dataclass(frozen=True, slots=True)
class TensorPort:
    """What an averager needs of its host: the tensors that it holds, and its device."""

    tensors: TensorStore
    compute: ComputeQueue
    num_phases: int = 1
    """Of an average."""
    compresses: bool = False
    """The device keeps what coding leaves out, even if it contributes nothing."""


@dataclass(slots=True)
class _Phase:
    """What has come of one phase."""

    weights: dict[NodeId, Weight] = field(default_factory=dict)
    """Of the members whose parts are here, or that have none to send."""
    parts: dict[NodeId, TensorId] = field(default_factory=dict)
    """Of the part that this node reduces."""
    averages: dict[int, TensorId] = field(default_factory=dict)
    reduced: tuple[TensorId, float] | None = None
    """This node's part of the average, and the sum of its squares."""


class AveragingUser(Protocol):
    """Who needs the average."""

    def part_squared(self, part: int, square_sum: float) -> list[Effect]:
        """One part of the average is known, and the sum of its squares."""
        ...

    def averaged(self) -> list[Effect]:
        """All parts are here: `Averager.take` gives them."""
        ...

    def lacking(self, found: Weight) -> list[Effect]:
        """The sums of all members do not add up to the total."""
        ...

    def averaging_failed(self, reason: str) -> list[Effect]:
        """The device has refused a sum or a part."""
        ...


class Averager:
    """One member's part in one average.

    Args:
        node_id: This node, a member of the roster or a listener.
        averaging: The average.
        port: Tensors and device.
        user: Told how it ends.
    """

    def __init__(
        self, node_id: NodeId, averaging: Averaging, port: TensorPort, user: AveragingUser
    ) -> None:
        self.state = AveragingState.WAITING
        self._node_id, self._port, self._user = node_id, port, user
        self._id, self._roster, self._spec = averaging.id, averaging.roster, averaging.spec
        self._overlapped = averaging.overlapped
        self._index = self._roster.index(node_id) if node_id in self._roster else None
        self._listeners: tuple[NodeId, ...] = ()
        self._total: Weight | None = None
        self.found: Weight | None = None
        """What is in the average, once all members' contributions are known."""
        self._own: Weight | None = None
        self._phases = [_Phase() for _ in range(port.num_phases)]
        self._phase = 0
        """The phase that is under way."""
        self._dropped = False
        """Whether this node has told the others that they can't have its part."""

    @property
    def awaited(self) -> set[NodeId]:
        """From whom something is to come."""
        phase = self._phases[self._phase]
        if self.state is AveragingState.REDUCING:
            return {node for k, node in enumerate(self._roster) if k not in phase.averages}
        if self.state in (AveragingState.WAITING, AveragingState.COLLECTING):
            return {*self._roster} - phase.weights.keys()
        return set()

    @property
    def num_parts(self) -> int:
        return len(self._roster)

    def abandon(self) -> list[Effect]:
        """Release all tensors that are held for the average."""
        tensors = list[TensorId]()
        for phase in self._phases:
            tensors += [*phase.parts.values(), *phase.averages.values()]
            phase.parts.clear()
            phase.averages.clear()
        return self._port.tensors.release(*tensors)

    def close(self) -> None:
        """Nobody needs the average any longer."""
        if self.state is not AveragingState.AVERAGED:
            self.state = AveragingState.OVER

    def take(self) -> list[TensorId]:
        """Return the parts of the average, phase by phase, in order. Their references are the
        caller's.
        """
        assert self.state is AveragingState.AVERAGED, self.state
        found = list[TensorId]()
        for phase in self._phases:
            assert len(phase.averages) == len(self._roster)
            found += [phase.averages.pop(k) for k in range(len(self._roster))]
        return found

    def listen(self) -> list[Effect]:
        """Take no part, but wait for the average."""
        assert self._index is None, "a member of the roster begins"
        self.state = AveragingState.REDUCING
        return []

    def tell(self, listeners: Collection[NodeId]) -> list[Effect]:
        """Let others, who are no members of the roster, have the average too.

        Whoever has taken the average must not have released it.
        """
        new = [node for node in listeners if node not in self._listeners]
        self._listeners = tuple(listeners)
        if self._dropped:
            return self._refuse(new)
        return [e for k, phase in enumerate(self._phases) for e in self._share(new, k, phase)]

    def begin(self, own: Weight, total: Weight | None) -> list[Effect]:
        """Take part: this node's own sum is whole.

        Args:
            own: What is in it.
            total: What must be in all sums of the roster together. None: whatever there is.
        """
        assert self.state is AveragingState.WAITING
        self._own, self._total = own, total
        return self._collect()

    def _collect(self) -> list[Effect]:
        """Begin a phase: cut and send this node's contribution."""
        own, phase = self._own, self._phases[self._phase]
        assert own is not None
        self.state = AveragingState.COLLECTING
        phase.weights[self._node_id] = own
        first = self._phase == 0
        if not own.num and not (self._port.compresses and first):
            return self._gathered([])
        kind = GatherAhead if self._overlapped else Gather
        num_parts = len(self._roster) if own.num else 0
        job = kind(self._id.iteration.number, num_parts, self._phase, self._spec)
        before = {} if first else self._phases[self._phase - 1].averages
        means = [self._port.tensors.retain(before[k]) for k in sorted(before)]
        return self._port.compute.submit(job, self, means)

    # --- jobs ---------------------------------------------------------------------------------

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """This node's sum has been cut into parts, or its part has been averaged."""
        if self.state is AveragingState.OVER:
            return self._port.tensors.release(*(output.id for output in event.outputs))
        match job, event.result:
            case Gather(), _:
                return self._gathered([output.id for output in event.outputs])
            case Reduce(), Squared(square_sum):
                return self._reduced(event.outputs[0].id, square_sum)
        raise AssertionError(f"{job} ended with {event.result}")

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """The device has refused the sum or the parts."""
        return self.fail(reason)

    def _gathered(self, outputs: Sequence[TensorId]) -> list[Effect]:
        """Send the parts of this node's contribution, or the word that there are none."""
        effects, phase = list[Effect](), self._phases[self._phase]
        for k, node in enumerate(self._roster):
            if outputs and k == self._index:
                phase.parts[node] = outputs[k]
            elif outputs:
                effects.append(SendTensor(node, self._part(k), outputs[k]))
            elif k != self._index:
                effects.append(Send(node, self._part(k)))
        return effects + self._reduce()

    def _reduced(self, output: TensorId, square_sum: float) -> list[Effect]:
        """The average of this node's part is there: share it."""
        assert self._index is not None, "listeners reduce nothing"
        phase = self._phases[self._phase]
        phase.reduced = output, square_sum
        others = [node for node in self._roster if node != self._node_id]
        effects = self._share((*others, *self._listeners), self._phase, phase)
        return effects + self._keep(self._phase, self._index, output, square_sum)

    def _share(self, nodes: Sequence[NodeId], number: int, phase: _Phase) -> list[Effect]:
        """Send this node's part of a phase's average to others, if it is there."""
        if phase.reduced is None:
            return []
        assert self._index is not None, "listeners reduce nothing"
        output, square_sum = phase.reduced
        num = self.found.num if self._overlapped and self.found is not None else 0
        message = ReducedPart(self._id, self._index, square_sum, self._overlapped, num, number)
        return [SendTensor(node, message, self._port.tensors.retain(output)) for node in nodes]

    # --- messages -----------------------------------------------------------------------------

    def part(self, sender: NodeId, message: ReducePart, tensor: Tensor | None) -> list[Effect]:
        """A member's contribution to the part that this node reduces."""
        tensors = self._port.tensors
        if tensor is not None:
            tensors.add(tensor)
        unwanted = (
            sender not in self._roster
            or not self._phase <= message.phase < len(self._phases)
            or sender in self._phases[message.phase].weights
            or message.part != self._index
            or (tensor is None) != (message.num_microbatches == 0)
        )
        if unwanted:
            return tensors.release(tensor.id) if tensor is not None else []
        phase = self._phases[message.phase]
        phase.weights[sender] = Weight(message.num_microbatches, message.digest)
        if tensor is not None:
            phase.parts[sender] = tensor.id
        return self._reduce()

    def average(self, sender: NodeId, message: ReducedPart, tensor: Tensor) -> list[Effect]:
        """The average of another member's part."""
        tensors = self._port.tensors
        tensors.add(tensor)
        expected = message.part < len(self._roster) and self._roster[message.part] == sender
        expected = expected and self._phase <= message.phase < len(self._phases)
        over = self.state in (AveragingState.AVERAGED, AveragingState.OVER)
        if over or not expected or message.part in self._phases[message.phase].averages:
            return tensors.release(tensor.id)
        if self._index is None:
            self.found = Weight(message.num_microbatches, 0)
        return self._keep(message.phase, message.part, tensor.id, message.square_sum)

    def _refuse(self, nodes: Sequence[NodeId]) -> list[Effect]:
        """Tell others that this node's part of the average can't be had."""
        assert self._index is not None, "listeners reduce nothing"
        nothing = ReducedPart(self._id, self._index, overlapped=True)
        return [Send(node, nothing) for node in nodes]

    def refused(self, sender: NodeId, message: ReducedPart) -> list[Effect]:
        """Another member's part of an overlapped average can't be had."""
        expected = message.part < len(self._roster) and self._roster[message.part] == sender
        return self.fail("a member could not average its part") if expected else []

    # --- steps --------------------------------------------------------------------------------

    def _part(self, part: int) -> ReducePart:
        assert self._own is not None
        own = self._own
        return ReducePart(self._id, part, own.num, own.digest, self._overlapped, self._phase)

    def _reduce(self) -> list[Effect]:
        """Average this node's part when all contributions are there and add up."""
        own, total = self._own, self._total
        if self.state is not AveragingState.COLLECTING or own is None:
            return []
        phase = self._phases[self._phase]
        missing = own.num > 0 and self._node_id not in phase.parts
        if missing or len(phase.weights) < len(self._roster):
            return []
        weights = phase.weights.values()
        self.found = found = Weight(
            sum(w.num for w in weights), add_digests(w.digest for w in weights)
        )
        if total is not None and found != total:
            self.state = AveragingState.OVER
            return self._user.lacking(found)
        if not found.num:
            return self.fail("nobody has anything to contribute")
        self.state = AveragingState.REDUCING
        inputs = [phase.parts.pop(node) for node in self._roster if node in phase.parts]
        assert len(inputs) == sum(weight.num > 0 for weight in weights), "a part would be left out"
        assert self._index is not None, "listeners reduce nothing"
        kind = ReduceAhead if self._overlapped else Reduce
        job = kind(self._index, len(self._roster), found.num, self._phase, self._spec)
        return self._port.compute.submit(job, self, inputs)

    def _keep(self, number: int, part: int, tensor: TensorId, square_sum: float) -> list[Effect]:
        averages = self._phases[number].averages
        assert part not in averages, f"part {part} would be replaced, and never freed"
        averages[part] = tensor
        return self._user.part_squared(part, square_sum) + self._advance()

    def _advance(self) -> list[Effect]:
        """Go on when all averages of the phase are here."""
        averages = self._phases[self._phase].averages
        own_done = self._index is None or self._index in averages
        whole = own_done and len(averages) == len(self._roster)
        if self.state is not AveragingState.REDUCING or not whole:
            return []
        if self._phase + 1 == len(self._phases):
            self.state = AveragingState.AVERAGED
            return self._user.averaged()
        self._phase += 1
        return self._advance() if self._index is None else self._collect()

    def forget(self) -> list[Effect]:
        """This node's device is about to lose its contribution: a later phase can't be had."""
        own = self._own
        if own is None or not own.num or self._phase + 1 == len(self._phases):
            return []
        return self.fail("a member has lost its contribution")

    def fail(self, reason: str) -> list[Effect]:
        """Nobody can have the average: this node's part of it, or another's, can't be had.

        Whoever reduces a part of an overlapped average says so to all.
        """
        if self.state in (AveragingState.AVERAGED, AveragingState.OVER):
            return []
        self.state = AveragingState.OVER
        self._dropped = self._overlapped and self._index is not None
        others = [node for node in self._roster if node != self._node_id]
        told = self._refuse((*others, *self._listeners)) if self._dropped else []
        return told + self._user.averaging_failed(reason)


def port_of(context: Context) -> TensorPort:
    """Return what averagers need of a node."""
    return TensorPort(
        context.tensors, context.compute, context.sync.num_phases, context.sync.compresses
    )
