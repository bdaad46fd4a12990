"""Count the entries of a serialized message before it is parsed.

Parsing costs far more than receiving: 4 MiB can hold two million empty submessages, and each
becomes an object. `scan` walks over tags and lengths only. It stops at the first field that comes
more often than its class allows.

The walk enters a submessage only if it can hold a repeated field. The size of the whole message
bounds everything else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from decod.errors import MalformedMessageError
from decod.limits import ENTRIES_MAX
from decod.wire import validate
from decod.wire.message_schema import Part, Struct

_SIZE_MAX_BYTES = 10


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the number that begins at `position`, and the position after it.

    Raises:
        MalformedMessageError: No whole number begins there.
    """
    piece = data[position : position + _SIZE_MAX_BYTES]
    number = 0
    for index, byte in enumerate(piece):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, position + index + 1
    raise validate.malformed("a number", bytes(piece), allowed="whole")


def write_varint(number: int) -> bytes:
    """Return a number as a varint. `number` must not be negative."""
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


_UNKNOWN_MAX = 16
"""Most unknown fields in one message. A later version may add fields."""

_VARINT = 0
_FIXED64 = 1
_LENGTH = 2
_FIXED32 = 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
_CONTINUED = bytes(range(0x80, 0x100))
"""The bytes of a varint that another one follows: their high bit is set."""

_WIRE_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_STRING: _LENGTH,
    FieldDescriptor.TYPE_BYTES: _LENGTH,
    FieldDescriptor.TYPE_MESSAGE: _LENGTH,
}
"""The types of decod's messages that are no varints."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One field of a message, or all fields of a oneof."""

    key: str
    """The name under which it is counted: its own, or that of its oneof."""
    wire_type: int
    num_max: int = 1
    repeated: bool = False
    packed_width: int | None = None
    """Bytes of one entry of a packed field, 0 for varints. None if the field is not packed."""
    inner: "Shape | None" = None
    """The shape of the submessage, if it can hold a repeated field."""


_UNKNOWN = {
    wire_type: _Kind("an unknown field", wire_type, _UNKNOWN_MAX)
    for wire_type in (_VARINT, _FIXED64, _LENGTH, _FIXED32)
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields that a message may have, and how often each may come."""

    name: str
    kinds: Mapping[int, _Kind] = field(default_factory=dict)
    """The fields by tag, which combines a field's number with its wire type."""
    countable: bool = False
    """Whether the message can hold a repeated field, at any depth."""


def shape_of(
    descriptor: Any, parts: Mapping[str, Part], inner: Mapping[str, Struct | Shape]
) -> Shape:
    """Return the shape of a message.

    Args:
        descriptor: The descriptor of its protobuf class. It gives numbers and types.
        parts: What its class says of its fields: how often each may come. Others may come once.
        inner: Submessages of other fields.
    """
    kinds = {}
    for each in descriptor.fields:
        part = parts.get(each.name)
        kind = _kind_of(each, part, inner.get(each.name) if part is None else part.struct)
        kinds[each.number << 3 | kind.wire_type] = kind
    countable = any(kind.repeated or kind.inner is not None for kind in kinds.values())
    return Shape(descriptor.name, kinds, countable)


def _kind_of(each: Any, part: Part | None, inner: Struct | Shape | None) -> _Kind:
    if isinstance(inner, Struct):
        parts = {part.name: part for part in inner.parts}
        inner = shape_of(each.message_type, parts, {})
    wire_type = _WIRE_TYPES.get(each.type, _VARINT)
    oneof = each.containing_oneof
    packed = each.is_repeated and wire_type != _LENGTH
    return _Kind(
        key=each.name if oneof is None else oneof.name,
        wire_type=_LENGTH if packed else wire_type,
        num_max=1 if part is None else part.num_max,
        repeated=each.is_repeated,
        packed_width=_WIDTHS.get(wire_type, 0) if packed else None,
        inner=inner if inner is not None and inner.countable else None,
    )


def scan(shape: Shape, data: bytes) -> int:
    """Return the number of entries in all repeated fields of a serialized message.

    Raises:
        MalformedMessageError: A field comes too often, there are more than `ENTRIES_MAX` entries,
            or the bytes are no message.
    """
    return _Scan(data).walk(shape, 0, len(data))


class _Scan:
    """One walk over one message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_entries = 0

    def walk(self, shape: Shape, position: int, end: int) -> int:
        data = self._data
        kinds = shape.kinds
        counts = dict[str, int]()
        while position < end:
            tag, position = read_varint(data, position)
            kind = kinds.get(tag) or _UNKNOWN.get(tag & 7)
            if kind is None:
                raise _malformed(shape, f"tag {tag}")
            begin, position = self._bounds(kind.wire_type, position)
            if position > end:
                raise _malformed(shape, f"{kind.key} cut short")
            num = 1 if kind.packed_width is None else self._num_packed(kind, begin, position)
            total = counts[kind.key] = counts.get(kind.key, 0) + num
            if total > kind.num_max:
                raise _malformed(shape, f"more than {kind.num_max} of {kind.key}")
            if kind.repeated:
                self._num_entries += num
                if self._num_entries > ENTRIES_MAX:
                    raise _malformed(shape, f"more than {ENTRIES_MAX} entries")
            if kind.inner is not None:
                self.walk(kind.inner, begin, position)
        return self._num_entries

    def _bounds(self, wire_type: int, position: int) -> tuple[int, int]:
        """Return where a field's content begins and ends."""
        if wire_type == _LENGTH:
            size, begin = read_varint(self._data, position)
            return begin, begin + size
        if wire_type == _VARINT:
            return position, read_varint(self._data, position)[1]
        return position, position + _WIDTHS[wire_type]

    def _num_packed(self, kind: _Kind, begin: int, end: int) -> int:
        if kind.packed_width:
            return (end - begin) // kind.packed_width
        return len(self._data[begin:end].translate(None, _CONTINUED))


def _malformed(shape: Shape, what: str) -> MalformedMessageError:
    return MalformedMessageError(
        f"{shape.name} has {what}",
        why="no message of this version does",
        fix="run the same version of decod on every node",
    )
