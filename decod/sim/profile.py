"""How large messages and tensors are in a simulated run, and how long jobs take on a device."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import Any

from decod.compression.plan import Plan
from decod.ids import MicrobatchId, NodeId, RunId, TensorId
from decod.protocol.core import jobs
from decod.protocol.core.events import Tensor
from decod.protocol.core.jobs import Job
from decod.protocol.core.messages import Message
from decod.sim.averages import AveragedPart, GradientPart, MisuseError, SimulatedState
from decod.wire import codec
from decod.wire.message_schema import BODIES, Part, Struct

_RUN = RunId("a" * 26)
_SENDER = NodeId("a" * 52)
_TERM = 1
_SEQUENCE = 1000

_Count = Callable[[Any], Iterator[int]]
"""Yields the numbers of entries of a value's repeated and optional fields, at any depth."""


def _counter_of(struct: Struct) -> _Count | None:
    """Return what counts the entries of a message; None if it has no such field."""
    parts = {part.name: found for part in struct.parts if (found := _part_of(part))}
    of_bytes = [part.name for part in struct.parts if _holds_bytes(part)]
    if not parts and not of_bytes:
        return None

    def count(value: Any) -> Iterator[int]:
        for name, part in parts.items():
            yield from part(getattr(value, name))
        for name in of_bytes:
            yield _num_bytes(getattr(value, name))

    return count


def _holds_bytes(part: Part) -> bool:
    """Whether bytes are in the field, or in the plain tuples that are its entries."""
    inner = part.struct.parts if part.is_plain and part.struct is not None else ()
    return part.of is bytes or any(each.of is bytes for each in inner)


def _part_of(part: Part) -> _Count | None:
    found: _Count | None = None
    if part.form is not None:
        found = _count_values
    elif part.repeated:
        found = _entries_of(part)
    elif part.struct is not None:
        found = _counter_of(part.struct)
    return _optional(found) if part.optional else found


def _count_values(value: Any) -> Iterator[int]:
    yield _num_values(value)


def _entries_of(part: Part) -> _Count:
    inner = None if part.struct is None or part.is_plain else _counter_of(part.struct)

    def count(values: Any) -> Iterator[int]:
        yield len(values)
        if inner is not None:
            yield sum(sum(inner(value)) for value in values)

    return count


def _optional(within: _Count | None) -> _Count:
    def count(value: Any) -> Iterator[int]:
        yield value is not None
        if value is not None and within is not None:
            yield from within(value)

    return count


def _num_values(value: Any) -> int:
    """Return how many single values a value holds."""
    if isinstance(value, tuple):
        return sum(map(_num_values, value))
    if is_dataclass(value):
        return sum(_num_values(getattr(value, field.name)) for field in fields(value))
    return 1


def _num_bytes(value: Any) -> int:
    """Return how many bytes a value holds in fields of bytes."""
    if isinstance(value, tuple):
        return sum(map(_num_bytes, value))
    return len(value) if isinstance(value, bytes) else 0


_COUNTERS: Mapping[type, _Count | None] = {
    struct.cls: _counter_of(struct) for struct in BODIES.values()
}

_known: dict[tuple[type, tuple[int, ...]], int] = {}


def wire_bytes(message: Message) -> int:
    """Return the size of a message's envelope, to within the length of its texts and numbers.

    Fields of fixed size differ by a few bytes at most, so the first message of a kind stands for
    all that have as many entries in their repeated fields, as many bytes in those of bytes, and the
    same optional ones. Only that one is encoded.
    """
    count = _COUNTERS[type(message)]
    key = (type(message), () if count is None else tuple(count(message)))
    size = _known.get(key)
    if size is None:
        size = codec.encode(_RUN, _SENDER, _TERM, _SEQUENCE, message).ByteSize()
        _known[key] = size
    return size


@dataclass(frozen=True, slots=True)
class Activation:
    microbatch: MicrobatchId
    stage_index: int
    """The stage that computed it."""
    false: bool = field(default=False, compare=False)
    """The host lies: the activation is not what the stage makes of what came."""
    made: int = field(default=0, compare=False, repr=False)
    """Which computation it comes from. Of two, the bits differ."""


@dataclass(frozen=True, slots=True)
class Gradient:
    microbatch: MicrobatchId
    stage_index: int
    """The stage that computed it; the head counts as the stage after the last."""
    false: bool = field(default=False, compare=False)
    """As of an activation."""
    made: int = field(default=0, compare=False, repr=False)
    """As of an activation."""


Content = Activation | Gradient | GradientPart | AveragedPart | SimulatedState


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProfile:
    """How long jobs take on a host of speed 1, and how large their tensors are."""

    forward_s: float = 0.1
    """A relay's forward pass of one microbatch."""
    backward_ratio: float = 2.0
    """Backward time over forward time, for a relay's blocks and for the embedding."""
    embed_s: float = 0.01
    head_s: float = 0.03
    """Final norm, head and loss, including their backward pass."""
    optimizer_s: float = 0.1
    """One optimizer step. Building, copying or loading a stage's state takes as long."""
    reduce_s: float = 0.01
    """Summing one part over a roster, or cutting a sum into parts."""
    decide_s: float = 0.2
    """Choosing flows, in the planning process, whatever the device's speed."""
    decide_failure_ratio: float = 0.0
    """Share of choices in which the planning process dies."""
    jitter_ratio: float = 0.05
    """Largest deviation of a job's time, as a share of it."""
    activation_bytes: int = 1_000_000
    parameter_bytes: int = 4_000_000
    """Size of a stage's gradients. Its parameters with optimizer state take three times as much."""
    plan: Plan | None = field(default=None, repr=False)
    """What averages send in each phase. None: `parameter_bytes`."""

    def seconds(self, job: Job) -> float:
        """Return the time of a job on a host of speed 1, in seconds."""
        match job:
            case jobs.Forward():
                return self.forward_s
            case jobs.Backward():
                return self.backward_ratio * self.forward_s
            case jobs.Measure() | jobs.ReplayPasses():
                return (1 + self.backward_ratio) * self.forward_s
            case jobs.Embed():
                return self.embed_s
            case jobs.EmbedBackward():
                return self.backward_ratio * self.embed_s
            case jobs.Head():
                return self.head_s
            case jobs.Gather() | jobs.Reduce() | jobs.Square():
                return self.reduce_s
            case (
                jobs.Build()
                | jobs.Propose()
                | jobs.StepAhead()
                | jobs.Snapshot()
                | jobs.Load()
                | jobs.Mix()
                | jobs.StandIn()
            ):
                return self.optimizer_s
            case jobs.DecideFlows():
                return self.decide_s
            case _:
                return 0.0  # It keeps or forgets what is there.

    def pass_s(self, *, data: bool) -> float:
        """Return c_i of GWTF's equation (1), in seconds: the mean time of a pass.

        For a data node this includes the head.
        """
        both = 1 + self.backward_ratio
        return (both * self.embed_s + self.head_s if data else both * self.forward_s) / 2

    def num_bytes(self, content: Content) -> int:
        """Return the size in bytes of a tensor with this content."""
        match content:
            case Activation() | Gradient():
                return self.activation_bytes
            case GradientPart() | AveragedPart() if self.plan is not None:
                return _part_bytes(self.plan, content.phase, content.num_parts)[content.part]
            case GradientPart(num_parts=num_parts) | AveragedPart(num_parts=num_parts):
                return -(-self.parameter_bytes // num_parts)
            case SimulatedState(with_optimizer=whole):
                return (3 if whole else 1) * self.parameter_bytes


@lru_cache(maxsize=256)
def _part_bytes(plan: Plan, phase: int, num_parts: int) -> list[int]:
    return plan.part_bytes(phase, num_parts)


@dataclass(slots=True)
class StoredTensor:
    """A tensor that a host holds."""

    content: Content
    size_bytes: int
    num_sends: int = 0
    num_jobs: int = 0
    freed: bool = False
    """Whether the core has freed it. The driver may still read it for a send."""


class TensorTable:
    """Tensors by id.

    The core owns a tensor until it frees it. The driver may still read a freed tensor for a send in
    progress. Every wrong use is a `MisuseError` that names the tensor.

    Attributes:
        stored_bytes: Size of all tensors here now.
        stored_peak_bytes: Largest size so far.
    """

    def __init__(self, profile: ComputeProfile) -> None:
        self.stored_bytes = 0
        self.stored_peak_bytes = 0
        self._profile = profile
        self._tensors: dict[TensorId, StoredTensor] = {}
        self._next_id = 1

    def __contains__(self, tensor: TensorId) -> bool:
        return tensor in self._tensors

    @property
    def contents(self) -> list[Content]:
        """The contents of all tensors here."""
        return [entry.content for entry in self._tensors.values()]

    @property
    def num_idle(self) -> int:
        """Number of tensors that the core owns and that no job and no send uses."""
        return sum(
            not (entry.freed or entry.num_jobs or entry.num_sends)
            for entry in self._tensors.values()
        )

    def content(self, tensor: TensorId) -> Content:
        return self._tensors[tensor].content

    def clear(self) -> None:
        """Forget everything, because the host has died."""
        self._tensors.clear()
        self.stored_bytes = 0

    def add(self, content: Content) -> Tensor:
        """Store a tensor, owned by the core from now on."""
        tensor_id = TensorId(self._next_id)
        self._next_id += 1
        size_bytes = self._profile.num_bytes(content)
        self._tensors[tensor_id] = StoredTensor(content, size_bytes)
        self.stored_bytes += size_bytes
        self.stored_peak_bytes = max(self.stored_peak_bytes, self.stored_bytes)
        return Tensor(tensor_id, size_bytes)

    def usable(self, tensor: TensorId, user: object) -> StoredTensor:
        """Return a tensor that the core may use.

        Raises:
            MisuseError: The tensor was freed, or never existed.
        """
        stored = self._tensors.get(tensor)
        if stored is None or stored.freed:
            raise MisuseError(f"{user} uses tensor {tensor}, which is freed or was never there")
        return stored

    def free(self, tensor: TensorId, user: object) -> None:
        """Take in that the core no longer needs a tensor.

        Raises:
            MisuseError: The tensor was freed already, or a job still reads it.
        """
        stored = self.usable(tensor, user)
        if stored.num_jobs:
            raise MisuseError(f"{user} while a job still reads it ({stored.content})")
        stored.freed = True
        self._forget_unread(tensor, stored)

    def end_send(self, tensor: TensorId) -> int:
        """Count one send as over, and return the tensor's size in bytes."""
        stored = self._tensors[tensor]
        stored.num_sends -= 1
        self._forget_unread(tensor, stored)
        return stored.size_bytes

    def end_job(self, inputs: tuple[TensorId, ...]) -> None:
        """Count one job as over."""
        for tensor in inputs:
            self._tensors[tensor].num_jobs -= 1

    def _forget_unread(self, tensor: TensorId, stored: StoredTensor) -> None:
        if stored.freed and stored.num_sends == 0:
            del self._tensors[tensor]
            self.stored_bytes -= stored.size_bytes
