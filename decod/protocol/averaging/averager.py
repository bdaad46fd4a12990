"""One average over some members: everybody ends with the same bits (I3).

The average is cut into parts. Each has an owner, a member that reduces it for all. Every member
sends each owner its contribution to the owner's parts. The owner of a part adds the contributions
up *in roster order*, divides by their weight, and sends the mean to all (a butterfly). Parts don't
wait for each other, so contributions and means share the links.

    WAITING -> AVERAGING -> AVERAGED
         `------ or OVER ------'

A compressed average may have two phases, each of which goes this way. What a member sends in the
second depends on the means of the first.

Each contribution says how much weight is in it, and the digest of what that weight stands for.
There are two kinds of averages:

- It is known beforehand what the contributions add up to. The owner of a part compares: a sum that
  lacks or repeats something fails the average instead of entering the model (I2).
- Nobody knows it, since members may have been lost. Then an owner may go on without some. It leaves
  out a contribution that its device refuses, and names the member. If a quorum is enough, it waits
  no longer for the others once a grace window is over. It tells everybody whose contribution a mean
  lacks: that member's device keeps it for the next average.

A part that arrives early is kept. An averager knows neither stage, view, vote nor audit. Its user
gives it the roster and the total. Listeners get the average, and contribute nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from decod.ids import AveragingId, NodeId, TensorId
from decod.protocol.core.average_spec import WHOLE, AverageSpec
from decod.protocol.core.compute_queue import ComputeQueue, TensorStore
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, EffectSink, SendTensor
from decod.protocol.core.events import JobFinished, Tensor
from decod.protocol.core.fingerprints import add_digests
from decod.protocol.core.jobs import AverageKind, Gather, Job, Reduce, Squared
from decod.protocol.core.messages.averaging_messages import ReducedPart, ReducePart


class AveragingState(Enum):
    WAITING = "waiting"
    """This node's own sum is not whole, or the total is not known."""
    AVERAGING = "averaging"
    """Contributions and means are under way."""
    AVERAGED = "averaged"
    OVER = "over"
    """The average has failed, or nobody needs it any longer."""


@dataclass(frozen=True, slots=True)
class Weight:
    """How much a sum stands for."""

    num: int
    """Microbatches."""
    digest: int
    """Of the microbatches' ids."""


def added(weights: Collection[Weight]) -> Weight:
    """Return what some sums stand for together."""
    return Weight(sum(w.num for w in weights), add_digests(w.digest for w in weights))


@dataclass(frozen=True, slots=True)
class Averaging:
    """Which average it is, of what, and who takes part."""

    id: AveragingId
    """Names the average in messages."""
    roster: tuple[NodeId, ...]
    """All who contribute."""
    owners: tuple[int, ...] = ()
    """Of each part, who reduces it, by its position in the roster. None: member k reduces part
    k."""
    spec: AverageSpec = WHOLE
    """What the average is of, and how it travels."""
    overlapped: bool = False
    """The average travels while members train on."""
    quorum: int = 0
    """Contributions that are enough once the grace window is over. 0: all are needed."""
    readers: tuple[NodeId, ...] = ()
    """Who gets the average. None: all who contribute."""

    def __post_init__(self) -> None:
        assert len({*self.roster}) == len(self.roster), "a member would contribute twice"
        assert all(0 <= owner < len(self.roster) for owner in self.owners), self.owners

    @property
    def owner_of(self) -> tuple[NodeId, ...]:
        """Of each part, who reduces it."""
        return tuple(self.roster[owner] for owner in self.owners) or self.roster


@dataclass(frozen=True, slots=True)
class TensorPort:
    """What an averager needs of its host: its tensors, its device, and where it says what it wants
    done."""

    tensors: TensorStore
    compute: ComputeQueue
    out: EffectSink[Effect]
    num_phases: int = 1
    """Of an average."""
    compresses: bool = False
    """The device keeps what coding leaves out, even if it contributes nothing."""
    contribution: TensorId | None = None
    """The input of the first `Gather`. None: the device has this node's contribution."""
    kind: AverageKind = AverageKind.NOW
    """Of an average for which everybody waits."""


@dataclass(slots=True)
class _OwnPart:
    """What has come of a part that this node reduces."""

    weights: dict[NodeId, Weight] = field(default_factory=dict)
    """Of the members whose contributions are here, or that have none."""
    tensors: dict[NodeId, TensorId] = field(default_factory=dict)
    given: tuple[NodeId, ...] | None = None
    """Once it is being reduced: whose contributions the device has got, in order."""
    mean: tuple[TensorId, ReducedPart] | None = None
    """The mean, and what is said with it. Once all have got it, the tensor may be gone."""


@dataclass(slots=True)
class _Phase:
    """What has come of one phase."""

    own: dict[int, _OwnPart]
    """The parts that this node reduces."""
    means: dict[int, TensorId] = field(default_factory=dict)
    """Of all parts."""
    nums: dict[int, int] = field(default_factory=dict)
    """Microbatches in each mean."""
    square_sums: dict[int, float] = field(default_factory=dict)
    """The sum of the squares of each mean."""


class AveragingUser(Protocol):
    """Who needs the average."""

    def averaged(self) -> None:
        """All parts are here: `Averager.take` gives them."""
        ...

    def lacking(self, found: Weight) -> None:
        """The sums of all members do not add up to the total."""
        ...

    def averaging_failed(self, reason: str) -> None:
        """The device has refused a sum or a part."""
        ...


class AveragingObserver(Protocol):
    """Who sees all that goes into an average, and comes of it, at this node.

    The tensors are the averager's. Whoever needs one for longer retains it.
    """

    def contributed_to(
        self,
        part: int,
        owner: NodeId,
        weights: Mapping[NodeId, Weight],
        tensors: Mapping[NodeId, TensorId],
    ) -> None:
        """What members have contributed to a part of the phase: this node, or all of them if it is
        the part's owner. Who has contributed nothing has no tensor.
        """
        ...

    def reduced(self, part: int, mean: TensorId) -> None:
        """The mean of a part is here."""
        ...

    def stand_out(self, nodes: tuple[NodeId, ...]) -> None:
        """What these members have contributed stands out from the others' contributions."""
        ...


class Averager:
    """One member's part in one average.

    Args:
        node_id: This node, a member of the roster or a listener.
        averaging: The average.
        port: Tensors and device.
        user: Told how it ends.
        observer: Sees what is averaged. None: nobody does.
    """

    def __init__(
        self,
        node_id: NodeId,
        averaging: Averaging,
        port: TensorPort,
        user: AveragingUser,
        observer: AveragingObserver | None = None,
    ) -> None:
        self.state = AveragingState.WAITING
        self._node_id = node_id
        self._port = port
        self._out = port.out
        self._user = user
        self._observer = observer
        self._averaging = averaging
        self._id = averaging.id
        self._roster = averaging.roster
        self._owners = averaging.owner_of
        self._overlapped = averaging.overlapped
        self._kind = AverageKind.AHEAD if averaging.overlapped else port.kind
        self._contributes = node_id in self._roster
        self._listeners: tuple[NodeId, ...] = ()
        self._total: Weight | None = None
        self._own: Weight | None = None
        own = [part for part, owner in enumerate(self._owners) if owner == node_id]
        self._phases = [_Phase({part: _OwnPart() for part in own}) for _ in range(port.num_phases)]
        self._phase = 0
        """The phase that is under way."""
        self._gathered = False
        """Whether this node's contribution to the phase stands."""
        self._num_closing = 0
        """Phases whose grace window is over."""
        self.outgoing: dict[TensorId, NodeId] = {}
        """Contributions on their way to the owners of their parts."""
        self._withholds = False
        self.missed: set[int] = set()
        """Parts of all phases, counted on, whose means lack this node's contribution."""
        self._dropped = False
        """Whether this node has told the others that they can't have its parts."""

    @property
    def awaited(self) -> set[NodeId]:
        """From whom something is to come."""
        if self.state is AveragingState.WAITING:
            return {*self._roster} - {self._node_id}
        if self.state is not AveragingState.AVERAGING:
            return set()
        phase = self._phases[self._phase]
        late = {node for part in phase.own.values() for node in self._late(part)}
        owners = {node for k, node in enumerate(self._owners) if k not in phase.means}
        # An owner may wait for the same contributions as this node.
        return (late or owners) - {self._node_id}

    def _late(self, part: _OwnPart) -> set[NodeId]:
        """Return whose contributions a part waits for."""
        return {*self._roster} - part.weights.keys() if part.given is None else set()

    @property
    def num_parts(self) -> int:
        return len(self._owners)

    @property
    def found(self) -> Weight:
        """What is in the average, once it is whole. If its means hold different contributions: as
        a mean over them, rounded down.
        """
        nums = self._phases[-1].nums
        return self._total or Weight(sum(nums.values()) // max(len(nums), 1), 0)

    @property
    def num_missed(self) -> int:
        """This node's microbatches that the average lacks, rounded up."""
        first = (len(self._phases) - 1) * self.num_parts
        num_missed = sum(part >= first for part in self.missed)
        num = self._own.num if self._own is not None else 0
        return -(-num * num_missed // self.num_parts)

    @property
    def square_sums(self) -> Mapping[int, float]:
        """The sum of the squares of each part, once the average is whole."""
        return self._phases[-1].square_sums

    def owners_of(self, parts: Collection[int]) -> tuple[NodeId, ...]:
        """Return who reduces some parts."""
        return tuple(self._owners[part] for part in parts)

    def abandon(self) -> None:
        """Release all tensors that are held for the average."""
        tensors = list[TensorId]()
        for phase in self._phases:
            tensors += phase.means.values()
            phase.means.clear()
            for part in phase.own.values():
                tensors += part.tensors.values()
                part.tensors.clear()
        self._port.tensors.release(*tensors)

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
            assert len(phase.means) == self.num_parts
            found += (phase.means[part] for part in range(self.num_parts))
            phase.means.clear()
        return found

    def listen(self) -> None:
        """Take no part, but wait for the average."""
        assert not self._contributes, "a member of the roster begins"
        self.state = AveragingState.AVERAGING

    def tell(self, listeners: Collection[NodeId]) -> None:
        """Let others, who are no members of the roster, have the average too.

        Whoever has taken the average must not have released it.
        """
        new = [node for node in listeners if node not in self._listeners]
        self._listeners = tuple(listeners)
        if self._dropped:
            self._refuse(new)
            return
        for phase in self._phases:
            for part in phase.own.values():
                self._share(new, part)

    def begin(self, own: Weight, total: Weight | None, *, withholds: bool = False) -> None:
        """Take part: this node's own sum is whole.

        Args:
            own: What is in it.
            total: What must be in all sums of the roster together. None: whatever there is.
            withholds: This node's link is too busy. Its contribution counts in the next average.
        """
        assert self.state is AveragingState.WAITING
        self._own = own
        self._total = total
        self._withholds = withholds
        self.state = AveragingState.AVERAGING
        self._collect()

    def grace_over(self, num_phases: int) -> None:
        """The grace window of some phases is over: a quorum is enough."""
        if num_phases > self._num_closing:
            self._num_closing = num_phases
            self._reduce_all()

    def _collect(self) -> None:
        """Begin a phase: cut and send this node's contribution."""
        own = self._own
        first = self._phase == 0
        assert own is not None
        self._gathered = False
        if not own.num and not (self._port.compresses and first):
            self._send([])
            return
        num_parts = self.num_parts if own.num else 0
        spec = self._averaging.spec
        job = Gather(self._id.iteration.number, num_parts, self._phase, spec, kind=self._kind)
        before = {} if first else self._phases[self._phase - 1].means
        inputs = [before[part] for part in sorted(before)]
        if first and self._port.contribution is not None:
            inputs.insert(0, self._port.contribution)
        inputs = [self._port.tensors.retain(each) for each in inputs]
        self._port.compute.submit(job, self, inputs)

    # --- jobs ---------------------------------------------------------------------------------

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        """This node's sum has been cut into parts, or one of its parts has been averaged."""
        if self.state is AveragingState.OVER:
            self._port.tensors.release(*(output.id for output in event.outputs))
            return
        match job, event.result:
            case Gather(), _:
                self._send([output.id for output in event.outputs])
            case Reduce(part=part), Squared() as result:
                self._reduced(part, event.outputs[0].id, result)
            case _:
                raise AssertionError(f"{job} ended with {event.result}")

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """The device has refused the sum or the parts."""
        if not isinstance(job, Gather) or self._total is not None:
            self.fail(reason)
            return
        # The others average without this node.
        self._own = Weight(0, 0)
        if self.state is not AveragingState.OVER:
            self._send([])

    def _send(self, outputs: Sequence[TensorId]) -> None:
        """Send the parts of this node's contribution, or the word that there are none."""
        phase = self._phases[self._phase]
        own = self._own
        assert own is not None
        if self._withholds and own.num:
            first = self._phase * self.num_parts
            self.missed.update(range(first, first + self.num_parts))
            self._port.tensors.release(*outputs)
            outputs = ()
            own = Weight(0, 0)
        self._gathered = True
        self.outgoing = {}
        for part, owner in enumerate(self._owners):
            message = ReducePart(self._id, part, own.num, own.digest, self._overlapped, self._phase)
            tensors = {self._node_id: outputs[part]} if outputs else {}
            if owner == self._node_id:
                phase.own[part].weights[owner] = own
                phase.own[part].tensors |= tensors
                continue
            if self._observer is not None:
                self._observer.contributed_to(part, owner, {self._node_id: own}, tensors)
            if outputs:
                self.outgoing[outputs[part]] = owner
                self._out.put(SendTensor(owner, message, outputs[part]))
            else:
                self._out.send(owner, message)
        self._reduce_all()

    def _reduced(self, part: int, output: TensorId, result: Squared) -> None:
        """One of this node's parts is averaged: share it."""
        phase = self._phases[self._phase]
        own = phase.own[part]
        assert own.given is not None
        refused = {own.given[k] for k in result.refused}
        for node in sorted(refused):
            self._out.note("contribution.refused", peer=node, reason=result.reason)
        there = {node for node in own.weights if own.weights[node].num} & {*own.given} - refused
        missing = tuple(
            k
            for k, node in enumerate(self._roster)
            if node not in there and (node not in own.weights or own.weights[node].num)
        )
        num = 0 if self._total is not None else sum(own.weights[node].num for node in there)
        message = ReducedPart(
            self._id, part, result.square_sum, self._overlapped, num, self._phase, missing
        )
        own.mean = output, message
        odd = tuple(own.given[k] for k in result.standing_out)
        if odd and self._observer is not None:
            self._observer.stand_out(odd)
        readers = self._averaging.readers or self._roster
        others = [node for node in readers if node != self._node_id]
        self._share((*others, *self._listeners), own)
        self._keep(message, output)

    def _share(self, nodes: Sequence[NodeId], own: _OwnPart) -> None:
        """Send one of this node's means to others, if it is there."""
        if own.mean is None:
            return
        output, message = own.mean
        for node in nodes:
            self._out.put(SendTensor(node, message, self._port.tensors.retain(output)))

    # --- messages -----------------------------------------------------------------------------

    def part(self, sender: NodeId, message: ReducePart, tensor: Tensor | None) -> None:
        """A member's contribution to a part that this node reduces."""
        tensors = self._port.tensors
        if tensor is not None:
            tensors.add(tensor)
        phase = self._phases[message.phase] if message.phase < len(self._phases) else None
        own = phase.own.get(message.part) if phase is not None else None
        unwanted = (
            own is None
            or sender not in self._roster
            or sender in own.weights
            or own.given is not None
            or (tensor is None) != (message.num_microbatches == 0)
        )
        if own is None or unwanted:
            if tensor is not None:
                tensors.release(tensor.id)
            return
        own.weights[sender] = Weight(message.num_microbatches, message.digest)
        if tensor is not None:
            own.tensors[sender] = tensor.id
        if message.phase == self._phase:
            self._reduce(message.part)

    def average(self, sender: NodeId, message: ReducedPart, tensor: Tensor) -> None:
        """The mean of another member's part."""
        tensors = self._port.tensors
        tensors.add(tensor)
        expected = message.part < self.num_parts and self._owners[message.part] == sender
        expected = expected and self._phase <= message.phase < len(self._phases)
        over = self.state in (AveragingState.AVERAGED, AveragingState.OVER)
        if over or not expected or message.part in self._phases[message.phase].means:
            tensors.release(tensor.id)
        else:
            self._keep(message, tensor.id)

    def _refuse(self, nodes: Sequence[NodeId]) -> None:
        """Tell others that this node's parts of the average can't be had."""
        nothing = ReducedPart(self._id, self._owners.index(self._node_id), overlapped=True)
        self._out.send_all(nodes, nothing)

    def refused(self, sender: NodeId, message: ReducedPart) -> None:
        """Another member's part of an overlapped average can't be had."""
        if message.part < self.num_parts and self._owners[message.part] == sender:
            self.fail("a member could not average its part")

    # --- steps --------------------------------------------------------------------------------

    def _reduce_all(self) -> None:
        for part in self._phases[self._phase].own:
            self._reduce(part)

    def _reduce(self, part: int) -> None:
        """Average one of this node's parts when all contributions are there, or enough."""
        own = self._phases[self._phase].own[part]
        averaging = self.state is AveragingState.AVERAGING and self._gathered
        if not averaging or own.given is not None or not self._enough(own):
            return
        found = added(own.weights.values())
        if self._total is not None and found != self._total:
            self.state = AveragingState.OVER
            self._user.lacking(found)
            return
        if not found.num:
            self.fail("nobody has anything to contribute")
            return
        own.given = tuple(node for node in self._roster if node in own.tensors)
        weights = tuple(own.weights[node].num for node in own.given)
        assert sum(weights) == found.num, "a part would be left out"
        if self._observer is not None:
            self._observer.contributed_to(part, self._node_id, own.weights, own.tensors)
        inputs = [own.tensors[node] for node in own.given]
        own.tensors.clear()
        spec = self._averaging.spec
        lenient = self._total is None
        job = Reduce(part, self.num_parts, weights, self._phase, spec, lenient, kind=self._kind)
        self._port.compute.submit(job, self, inputs)

    def _enough(self, own: _OwnPart) -> bool:
        """Whether a part waits for nobody any more."""
        if len(own.weights) == len(self._roster):
            return True
        quorum = self._averaging.quorum
        closing = self._phase < self._num_closing and self._total is None
        return bool(quorum) and closing and len(own.weights) >= quorum

    def _keep(self, message: ReducedPart, tensor: TensorId) -> None:
        phase = self._phases[message.phase]
        assert message.part not in phase.means, f"{message} would be replaced, and never freed"
        phase.means[message.part] = tensor
        phase.nums[message.part] = message.num_microbatches
        phase.square_sums[message.part] = message.square_sum
        if self._observer is not None:
            self._observer.reduced(message.part, tensor)
        if self._contributes and self._roster.index(self._node_id) in message.missing:
            self.missed.add(message.phase * self.num_parts + message.part)
        self._advance()

    def _advance(self) -> None:
        """Go on when all means of the phase are here."""
        whole = len(self._phases[self._phase].means) == self.num_parts
        ready = self._gathered or not self._contributes
        if self.state is not AveragingState.AVERAGING or not whole or not ready:
            return
        if self._phase + 1 == len(self._phases):
            self.state = AveragingState.AVERAGED
            self._user.averaged()
            return
        self._phase += 1
        if self._contributes:
            self._collect()
        else:
            self._advance()

    def forget(self) -> None:
        """This node's device is about to lose its contribution: a later phase can't be had."""
        own = self._own
        if own is None or not own.num or self._phase + 1 == len(self._phases):
            return
        if self._node_id in self._owners:
            self.fail("a member has lost its contribution")
            return
        self._own = Weight(0, 0)

    def fail(self, reason: str) -> None:
        """Nobody can have the average: this node's part of it, or another's, can't be had.

        Whoever reduces a part of an overlapped average says so to all.
        """
        if self.state in (AveragingState.AVERAGED, AveragingState.OVER):
            return
        self.state = AveragingState.OVER
        self._dropped = self._overlapped and self._node_id in self._owners
        others = [node for node in self._roster if node != self._node_id]
        if self._dropped:
            self._refuse((*others, *self._listeners))
        self._user.averaging_failed(reason)


def port_of(context: Context) -> TensorPort:
    """Return what averagers need of a node."""
    sync = context.run.sync
    return TensorPort(
        context.tensors, context.compute, context.out, sync.num_phases, sync.compresses
    )
