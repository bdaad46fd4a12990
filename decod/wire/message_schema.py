"""What the classes that travel say of their fields, read from the annotations (`decod.limits`).

This is the one description of a message. `carriers` makes its writer and its reader from it, `scan`
the count of its entries, and `scripts/gen_protos.py` its protobuf message. Fields have the same
names there. A message of the envelope is any class of `decod.protocol.core.messages.MESSAGES`; its
field in the envelope has the class's name in snake case.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NewType, Union, get_args, get_origin

from decod.ids import NodeId
from decod.limits import NODE_ID, Allowed, AtLeast, AtMost, Each, TravelsAs, Unique
from decod.protocol.core.messages import MESSAGES

_WITHOUT_LIMIT = (bool, Enum)
"""Types whose values protobuf itself checks, or the choice among the members."""


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a class that travels."""

    name: str
    of: Any
    """The type of the value, or of an entry: int, float, str, bytes, bool, an enum, or a class."""
    allowed: Allowed | None = None
    """Of a single value. None: its type says everything."""
    struct: "Struct | None" = None
    """The value, or an entry, is a message of its own."""
    optional: bool = False
    """The field may be absent, which stands for None."""
    repeated: bool = False
    """The field is a tuple of entries."""
    num_min: int = 0
    num_max: int = 1
    unique: tuple[str, ...] | None = None
    """As in `Unique`."""
    is_plain: bool = False
    """Entries are plain tuples in the core."""
    form: Any = None
    """As in `TravelsAs`."""


@dataclass(frozen=True, slots=True)
class Struct:
    """A class that travels: a message, or a part of one."""

    cls: type[Any]
    parts: tuple[Part, ...]

    @property
    def verify(self) -> Callable[[Any], None] | None:
        """The rule about several fields, if there is one."""
        return getattr(self.cls, "verify", None)


@cache
def struct_of(cls: type[Any]) -> Struct:
    """Return what a class says of its fields.

    Raises:
        TypeError: A field has no limit.
    """
    if is_dataclass(cls):
        hints: Mapping[str, Any] = {each.name: each.type for each in fields(cls)}
    else:
        hints = cls.__annotations__  # A named tuple.
    return Struct(cls, tuple(_part(cls, name, hint) for name, hint in hints.items()))


def _part(cls: type, name: str, hint: Any) -> Part:
    where = f"{cls.__name__}.{name}"
    notes, hint, optional = _opened(hint)
    more: dict[str, Any] = {"optional": optional}
    form: TravelsAs | None = notes.pop(TravelsAs, None)
    if form is not None:
        more["form"] = hint = form.cls
    elif get_origin(hint) is tuple:
        each: Each | None = notes.pop(Each, None)
        more |= {"repeated": True, "is_plain": each is not None, **_extent(where, notes, hint)}
        notes, hint, _ = _opened(get_args(hint)[0] if each is None else each.cls)
    allowed = NODE_ID if hint is NodeId else notes.pop(Allowed, None)
    if notes:
        raise TypeError(f"{where} has {', '.join(each.__name__ for each in notes)} for nothing")
    if isinstance(hint, NewType):
        hint = hint.__supertype__
    if allowed is not None or issubclass(hint, _WITHOUT_LIMIT):
        return Part(name, hint, allowed, **more)
    if hint in (int, float, str, bytes):
        raise TypeError(f"{where} has no limit")
    return Part(name, hint, struct=struct_of(hint), **more)


def _extent(where: str, notes: dict[type, Any], hint: Any) -> dict[str, Any]:
    """Return how many entries a tuple has, and which come once."""
    at_least = notes.pop(AtLeast, None)
    at_most = notes.pop(AtMost, None)
    unique: Unique | None = notes.pop(Unique, None)
    if notes:
        raise TypeError(f"{where} has {', '.join(each.__name__ for each in notes)} for nothing")
    _, *others = get_args(hint)
    if others != [...]:
        low = high = len(others) + 1
    elif at_most is None:
        raise TypeError(f"{where} is a tuple without AtMost")
    else:
        low = 0 if at_least is None else at_least.num
        high = at_most.num
    return {"num_min": low, "num_max": high, "unique": None if unique is None else unique.by}


def _opened(hint: Any) -> tuple[dict[type, Any], Any, bool]:
    """Return the notes of an annotation by their types, the bare type, and if it may be None."""
    notes = dict[type, Any]()
    optional = False
    while True:
        origin = get_origin(hint)
        if origin is Annotated:
            hint, *found = get_args(hint)
            notes = {**{type(note): note for note in found}, **notes}
        elif origin in (UnionType, Union):
            (hint,) = (each for each in get_args(hint) if each is not NoneType)
            optional = True
        else:
            return notes, hint, optional


def snake_case(name: str) -> str:
    """Return a name such as `CanTake` as `can_take`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def values_prefix(enum_name: str) -> str:
    """Return how the values of a protobuf enum begin: `AUDITED_WORK_` for `AuditedWork`."""
    return f"{snake_case(enum_name).upper()}_"


_KINDS: tuple[Any, ...] = MESSAGES
BODIES: Mapping[str, Struct] = {snake_case(cls.__name__): struct_of(cls) for cls in _KINDS}
"""All messages, by their fields in the envelope."""


def structs() -> Iterator[Struct]:
    """Yield everything that travels in an envelope, each after the messages that name it."""
    seen = set[type]()
    waiting = list(BODIES.values())
    for struct in waiting:
        if struct.cls not in seen:
            seen.add(struct.cls)
            yield struct
            waiting += [part.struct for part in struct.parts if part.struct is not None]
