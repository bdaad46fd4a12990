"""Carriers of fields: each reads a field from a peer or writes it for one, and checks it.

A message is a `Struct`: it names a carrier for each field of the dataclass. `codec`,
`routing_codec` and `gwtf_codec` are tables of structs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message as Proto

from decod.ids import FlowId, MicrobatchId
from decod.wire import validate


class Field(Protocol):
    """A carrier of one field. Both methods raise `MalformedMessageError` on a bad value."""

    def write(self, target: Proto, field: str, value: Any) -> None: ...

    def read(self, source: Proto, field: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Plain:
    check: Callable[[str, Any], Any]

    def write(self, target: Proto, field: str, value: Any) -> None:
        setattr(target, field, self.check(field, value))

    def read(self, source: Proto, field: str) -> Any:
        return self.check(field, getattr(source, field))


class Reason:
    """A text for people. Writing clips it, since this node's own text may quote an exception."""

    def write(self, target: Proto, field: str, value: str) -> None:
        setattr(target, field, validate.clip_reason(value))

    def read(self, source: Proto, field: str) -> str:
        return validate.reason(field, getattr(source, field))


@dataclass(frozen=True, slots=True)
class Capped:
    """A cost from 0 to `value_max`.

    Writing cuts it to `value_max`: this node's own cost may be infinite, or include a peer's.
    """

    value_max: float

    def write(self, target: Proto, field: str, value: float) -> None:
        setattr(target, field, min(validate.cost(field, value), self.value_max))

    def read(self, source: Proto, field: str) -> float:
        value = validate.cost(field, getattr(source, field))
        if value > self.value_max:
            raise validate.malformed(field, value, allowed=f"at most {self.value_max}")
        return value


class Choice:
    """A member of an enum, which protobuf numbers from 1.

    Args:
        numbers: The protobuf number of each member.
    """

    def __init__(self, numbers: Mapping[Any, int]) -> None:
        self._numbers = numbers
        self._members = {number: member for member, number in numbers.items()}

    def write(self, target: Proto, field: str, value: Any) -> None:
        setattr(target, field, self._numbers[value])

    def read(self, source: Proto, field: str) -> Any:
        number = getattr(source, field)
        if number not in self._members:
            raise validate.malformed(field, number, allowed=f"1 to {len(self._members)}")
        return self._members[number]


@dataclass(frozen=True, slots=True)
class Optional:
    """A field that may be absent, which stands for None."""

    inner: Field

    def write(self, target: Proto, field: str, value: Any) -> None:
        if value is not None:
            self.inner.write(target, field, value)

    def read(self, source: Proto, field: str) -> Any:
        return self.inner.read(source, field) if source.HasField(field) else None


@dataclass(frozen=True, slots=True)
class Struct:
    """A message, or a message within a message: its fields, and a check of their relations."""

    cls: type[Any]
    parts: Mapping[str, Field]
    verify: Callable[[Any], None] = lambda _value: None

    def fill(self, target: Proto, value: Any) -> None:
        self.verify(value)
        for field, part in self.parts.items():
            part.write(target, field, getattr(value, field))

    def take(self, source: Proto) -> Any:
        value = self.cls(**{field: part.read(source, field) for field, part in self.parts.items()})
        self.verify(value)
        return value

    def write(self, target: Proto, field: str, value: Any) -> None:
        inner = getattr(target, field)
        inner.SetInParent()
        self.fill(inner, value)

    def read(self, source: Proto, field: str) -> Any:
        if not source.HasField(field):
            raise validate.malformed(field, None, allowed="there")
        return self.take(getattr(source, field))


@dataclass(frozen=True, slots=True)
class Repeated:
    struct: Struct
    num_max: int
    num_min: int = 0

    def write(self, target: Proto, field: str, value: Sequence[Any]) -> None:
        validate.length(field, len(value), low=self.num_min, high=self.num_max)
        items = getattr(target, field)
        for item in value:
            self.struct.fill(items.add(), item)

    def read(self, source: Proto, field: str) -> tuple[Any, ...]:
        items = getattr(source, field)
        validate.length(field, len(items), low=self.num_min, high=self.num_max)
        return tuple(map(self.struct.take, items))


@dataclass(frozen=True, slots=True)
class Tuples:
    """Plain tuples in the core, messages on the wire. `items` names the fields."""

    items: Repeated
    """The class of its struct is a named tuple."""

    def write(self, target: Proto, field: str, value: Sequence[tuple[Any, ...]]) -> None:
        cls = self.items.struct.cls
        self.items.write(target, field, [cls(*item) for item in value])

    def read(self, source: Proto, field: str) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(item) for item in self.items.read(source, field))


@dataclass(frozen=True, slots=True)
class Scalars:
    """A tuple of single values, each checked. With `unique`, no value may come twice."""

    check: Callable[[str, Any], Any]
    num_max: int
    num_min: int = 0
    unique: bool = False

    def write(self, target: Proto, field: str, value: Sequence[Any]) -> None:
        getattr(target, field).extend(self._checked(field, value))

    def read(self, source: Proto, field: str) -> tuple[Any, ...]:
        return self._checked(field, getattr(source, field))

    def _checked(self, field: str, values: Sequence[Any]) -> tuple[Any, ...]:
        validate.length(field, len(values), low=self.num_min, high=self.num_max)
        checked = tuple(self.check(field, value) for value in values)
        if self.unique:
            validate.unique(field, checked)
        return checked


class Converted(Field):
    """Base of carriers whose message has another form than the core's value."""

    struct: Struct
    """The form of the message."""


def extent(part: Field | None) -> tuple[int, Struct | None]:
    """Return how often a field may come in its message, and the struct of its entries, if any.

    A field without a carrier may come once.
    """
    match part:
        case Repeated():
            return part.num_max, part.struct
        case Scalars():
            return part.num_max, None
        case Tuples():
            return extent(part.items)
        case Optional():
            return extent(part.inner)
        case Converted():
            return 1, part.struct
        case Struct():
            return 1, part
    return 1, None


NODE_ID = Plain(validate.node_id)
ADDRESS = Plain(validate.address)
NAME = Plain(validate.name)
SHA256 = Plain(validate.sha256)
SEAL = Plain(validate.blob(validate.SEAL_SIZE_MAX_BYTES))
ITERATION = Plain(validate.iteration)
NUMBER = Plain(validate.number)
COUNT = Plain(validate.count)
STAGE = Plain(validate.stage_index)
CAPACITY = Plain(validate.capacity)
USABLE_CAPACITY = Plain(validate.usable_capacity)
NUM_FLOWS = Plain(validate.num_flows)
INDEX = Plain(validate.index)
DATA_NODE_INDEX = Plain(validate.data_node_index)
DURATION = Plain(validate.duration)
COST = Plain(validate.cost)
FINITE = Plain(validate.finite)
MAGNITUDE = Plain(validate.magnitude)
NUM_STAGES = Plain(validate.num_stages)
STATE = Plain(validate.state)
BOOLEAN = Plain(validate.boolean)
REASON = Reason()

MICROBATCH = Struct(
    MicrobatchId, {"iteration": ITERATION, "data_node_index": INDEX, "index": COUNT}
)

# The slot is no INDEX, because GWTF's own search uses it to number its hops without limit.
FLOW = Struct(FlowId, {"data_node": NODE_ID, "slot": COUNT})
