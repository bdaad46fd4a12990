"""Writers and readers of messages, made from what their classes say (`message_schema`).

Each class gets one pair of functions when this is imported. They check every field: a writer this
node's own values, a reader a peer's. Both raise `MalformedMessageError`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from google.protobuf.message import Message as Proto

from decod import limits
from decod.wire.message_schema import Part, Struct, values_prefix
from decod.wire.validate import clip_printable

Write = Callable[[Any, Any], None]
"""Fills a protobuf message with the fields of a value."""
Read = Callable[[Any], Any]
"""Returns the value in a protobuf message."""
_Cut = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Carrier:
    """How the objects of one class travel."""

    write: Write
    read: Read


def carrier_of(struct: Struct, descriptor: Any, known: dict[type, Carrier]) -> Carrier:
    """Return how the objects of a class travel.

    Args:
        struct: What the class says of its fields.
        descriptor: Of its protobuf message.
        known: The carriers that there are; gets those that are new.
    """
    if struct.cls not in known:
        fields = descriptor.fields_by_name
        carriers = {
            part.name: carrier_of(part.struct, fields[part.name].message_type, known)
            for part in struct.parts
            if part.struct is not None
        }
        numbers = {
            part.name: _numbers(part.of, fields[part.name].enum_type)
            for part in struct.parts
            if fields[part.name].enum_type is not None
        }
        made = _Maker(struct, carriers, numbers)
        known[struct.cls] = Carrier(made.writer(), made.reader())
    return known[struct.cls]


def _numbers(enum: Any, descriptor: Any) -> dict[Any, int]:
    """Return the number of each member of an enum."""
    values = descriptor.values_by_name
    prefix = values_prefix(descriptor.name)
    return {member: values[prefix + member.name].number for member in enum}


def _cut(allowed: limits.Allowed) -> _Cut:
    """Return what cuts an own value to what is allowed."""
    if allowed.length_max:
        return lambda text: text and clip_printable(text, allowed.length_max)
    high = allowed.high
    assert high is not None
    return lambda value: min(value, high)


class _Maker:
    """Makes the writer and the reader of a class.

    Fields are sorted by kinds, so that those of a kind need no call each.
    """

    def __init__(
        self, struct: Struct, carriers: dict[str, Carrier], numbers: dict[str, dict[Any, int]]
    ) -> None:
        self._struct = struct
        self._carriers = carriers
        self._numbers = numbers
        self._bounded = list[tuple[str, float, float, limits.Allowed]]()
        """Numbers, with their lowest and highest value."""
        self._limited = list[tuple[str, Callable[[Any], object], limits.Allowed]]()
        """Other single values that have a limit, with what says whether they fit."""
        self._free = list[str]()
        """Those that have none."""
        self._others = list[Part]()
        for part in struct.parts:
            allowed = part.allowed
            if not self._is_single(part):
                self._others.append(part)
            elif allowed is None:
                self._free.append(part.name)
            elif allowed.low is not None and allowed.high is not None:
                self._bounded.append((part.name, allowed.low, allowed.high, allowed))
            else:
                self._limited.append((part.name, allowed.fits, allowed))

    def _is_single(self, part: Part) -> bool:
        """Whether the field is a value that protobuf holds as it is."""
        return not (part.optional or part.repeated or part.struct or part.name in self._numbers)

    # --- writing ------------------------------------------------------------------------------

    def writer(self) -> Write:
        bounded = [each for each in self._bounded if not each[3].cut]
        limited = [each for each in self._limited if not each[2].cut]
        cutting = [
            (part.name, _cut(part.allowed), part.allowed.check)
            for part in self._struct.parts
            if part.allowed is not None and part.allowed.cut and self._is_single(part)
        ]
        free = self._free
        verify = self._struct.verify
        others = [(part.name, self._writer_of(part)) for part in self._others]

        def write(target: Any, value: Any) -> None:
            if verify is not None:
                verify(value)
            for name, low, high, allowed in bounded:
                number = getattr(value, name)
                if not low <= number <= high:
                    raise allowed.refusal(name, number)
                setattr(target, name, number)
            for name, fits, allowed in limited:
                single = getattr(value, name)
                if not fits(single):
                    raise allowed.refusal(name, single)
                setattr(target, name, single)
            for name in free:
                setattr(target, name, getattr(value, name))
            for name, cut, check in cutting:
                setattr(target, name, check(name, cut(getattr(value, name))))
            for name, write_one in others:
                write_one(target, getattr(value, name))

        return write

    def _writer_of(self, part: Part) -> Write:
        name = part.name
        is_optional = part.optional
        if part.repeated:
            return self._writer_of_entries(part)
        if part.struct is not None:
            fill = self._carriers[name].write
            form = part.form

            def write(target: Any, value: Any) -> None:
                if value is None and is_optional:
                    return
                inner = getattr(target, name)
                inner.SetInParent()
                fill(inner, value if form is None else form.of(value))

            return write
        if name in self._numbers:
            numbers = self._numbers[name]
            return lambda target, member: setattr(target, name, numbers[member])
        assert part.allowed is not None
        check = part.allowed.check

        def write_if_there(target: Any, value: Any) -> None:
            if value is not None:
                setattr(target, name, check(name, value))

        return write_if_there

    def _writer_of_entries(self, part: Part) -> Write:
        name = part.name
        check = _check_of_entries(part)
        if part.struct is None:
            return lambda target, values: getattr(target, name).extend(check(values))
        fill = self._carriers[name].write
        if part.is_plain:
            cls = part.struct.cls

            def write_plain(target: Any, values: Any) -> None:
                add = getattr(target, name).add
                for entry in check(values):
                    fill(add(), cls(*entry))

            return write_plain

        def write(target: Any, values: Any) -> None:
            add = getattr(target, name).add
            for entry in check(values):
                fill(add(), entry)

        return write

    # --- reading ------------------------------------------------------------------------------

    def reader(self) -> Read:
        bounded = self._bounded
        limited = self._limited
        free = self._free
        others = [(part.name, self._reader_of(part)) for part in self._others]
        cls = self._struct.cls
        verify = self._struct.verify

        def read(source: Any) -> Any:
            values = {}
            for name, low, high, allowed in bounded:
                number = getattr(source, name)
                if not low <= number <= high:
                    raise allowed.refusal(name, number)
                values[name] = number
            for name, fits, allowed in limited:
                single = getattr(source, name)
                if not fits(single):
                    raise allowed.refusal(name, single)
                values[name] = single
            for name in free:
                values[name] = getattr(source, name)
            for name, read_one in others:
                values[name] = read_one(source)
            value = cls(**values)
            if verify is not None:
                verify(value)
            return value

        return read

    def _reader_of(self, part: Part) -> Read:
        name = part.name
        if part.repeated:
            return self._reader_of_entries(part)
        if part.struct is not None:
            return self._reader_of_struct(part)
        if name in self._numbers:
            members = {number: member for member, number in self._numbers[name].items()}
            return partial(_member, name, members)
        assert part.allowed is not None
        check = part.allowed.check

        def read(source: Any) -> Any:
            return check(name, getattr(source, name)) if source.HasField(name) else None

        return read

    def _reader_of_struct(self, part: Part) -> Read:
        name = part.name
        is_optional = part.optional
        form = part.form
        take = self._carriers[name].read

        def read(source: Any) -> Any:
            if not source.HasField(name):
                if is_optional:
                    return None
                raise limits.malformed(name, None, allowed="there")
            value = take(getattr(source, name))
            return value if form is None else value.told()

        return read

    def _reader_of_entries(self, part: Part) -> Read:
        name = part.name
        check = _check_of_entries(part)
        if part.struct is None:
            return lambda source: tuple(check(getattr(source, name)))
        take = self._carriers[name].read
        is_plain = part.is_plain
        measure = _measure_of(part)
        unique = _unique_of(part)

        def read(source: Any) -> tuple[Any, ...]:
            entries = getattr(source, name)
            measure(entries)
            values = tuple(map(tuple, map(take, entries)) if is_plain else map(take, entries))
            if unique is not None:
                unique(values)
            return values

        return read


def _member(name: str, members: dict[int, Any], source: Proto) -> Any:
    number = getattr(source, name)
    if number not in members:
        raise limits.malformed(name, number, allowed=f"1 to {len(members)}")
    return members[number]


def _check_of_entries(part: Part) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return what checks the entries of a field, and returns them."""
    name = part.name
    measure = _measure_of(part)
    unique = _unique_of(part)
    allowed = part.allowed

    def check(values: Sequence[Any]) -> Sequence[Any]:
        measure(values)
        if allowed is not None:
            fits = allowed.fits
            for value in values:
                if not fits(value):
                    raise allowed.refusal(name, value)
        if unique is not None:
            unique(values)
        return values

    return check


def _measure_of(part: Part) -> Callable[[Sequence[Any]], None]:
    """Return what checks how many entries a field has."""
    name = part.name
    low = part.num_min
    high = part.num_max

    def measure(values: Sequence[Any]) -> None:
        num = len(values)
        if not low <= num <= high:
            limits.length(name, num, low=low, high=high)

    return measure


def _unique_of(part: Part) -> Callable[[Collection[Any]], None] | None:
    """Return what checks that no entry comes twice."""
    name = part.name
    by = part.unique
    if by is None:
        return None
    if not by:
        return partial(limits.unique, name)
    key: Callable[[Any], Any] = attrgetter(*by)
    if part.is_plain:
        assert part.struct is not None
        names = [each.name for each in part.struct.parts]
        key = itemgetter(*map(names.index, by))
    return lambda values: limits.unique(name, list(map(key, values)))
