"""How many bytes a message takes on the wire, without encoding each one.

Fields of fixed size differ by a few bytes at most, so the first message of a kind stands for all
that have as many entries in their repeated fields, as many bytes in those of bytes, and the same
optional ones. Only that one is encoded.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from decod.ids import NodeId, RunId
from decod.protocol.core.messages import Message
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
        for field, part in parts.items():
            yield from part(getattr(value, field))
        for field in of_bytes:
            yield _num_bytes(getattr(value, field))

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
    """Return the size of a message's envelope, to within the length of its texts and numbers."""
    count = _COUNTERS[type(message)]
    key = (type(message), () if count is None else tuple(count(message)))
    size = _known.get(key)
    if size is None:
        size = codec.encode(_RUN, _SENDER, _TERM, _SEQUENCE, message).ByteSize()
        _known[key] = size
    return size
