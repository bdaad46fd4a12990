"""A job and its result on their way to another process of this host and back: by their fields.

A `Request` is a job with the places of its tensors, which lie where both processes reach them.

The types of a dataclass say all that there is to check, with limits as `decod.limits` has them. A
field that is missing, unknown or of another type is refused, as are negative whole numbers: all are
counts or positions. Both ends are
our own, but a slip there must end in an error and not in a wrong tensor.

    bool, int, float, str    as they are
    bytes                    as hexadecimal digits
    an enum                  as its member's value
    a tuple                  as an array
    a dataclass              as an object of its fields
    Any, dict                as it is, unchecked
"""

import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from decod.errors import ShapeError
from decod.limits import Allowed


def misplaced(what: str) -> ShapeError:
    """Return the error for a tensor that is not where a process says."""
    return ShapeError(
        what,
        why="the node process and its compute process disagree about their shared memory",
        fix="report it with both logs: this is an error in decod",
        code="E-TRN-008",
    )


class FormError(ValueError):
    """A value is not what its type says. The text says which, and is short."""


@dataclass(slots=True, eq=False)
class Region:
    """The place of a tensor: a piece of the memory that processes of a host share, or a file."""

    offset: int
    num_bytes: int
    path: str = ""
    """The file of a large state. Empty: the tensor lies in the memory."""

    def reference(self) -> dict[str, int | str]:
        """Return the form in which a message names this region."""
        place: dict[str, int | str] = {"offset": self.offset, "num_bytes": self.num_bytes}
        return {**place, "path": self.path} if self.path else place

    @classmethod
    def parse(cls, value: object) -> "Region":
        """Return the region that a message names.

        Raises:
            ShapeError: `value` is no object with an offset and a size of at least 0.
        """
        if isinstance(value, dict):
            numbers = (value.get("offset"), value.get("num_bytes"))
            path = value.get("path", "")
            if all(type(number) is int and number >= 0 for number in numbers) and (
                isinstance(path, str)
            ):
                return cls(value["offset"], value["num_bytes"], path)
        raise misplaced(f"a region is given as {str(value)[:100]}")


JobT = TypeVar("JobT", covariant=True)

_MEMBERS = frozenset({"job", "kind", "fields", "inputs", "outputs"})


@dataclass(frozen=True, slots=True)
class Request(Generic[JobT]):
    """A job that another process is to run."""

    job: JobT
    inputs: Sequence[Region] = ()
    """Where the tensors are that it reads."""
    outputs: Sequence[Region] = ()
    """Where those go that it writes."""

    def message(self, number: int) -> dict[str, Any]:
        """Return the form in which it travels, with a number that its reply repeats."""
        return {
            "job": number,
            "kind": kind_of(type(self.job)),
            "fields": fields_of(self.job),
            "inputs": [region.reference() for region in self.inputs],
            "outputs": [region.reference() for region in self.outputs],
        }

    @classmethod
    def parse(cls, message: Mapping[str, Any], job_class: type[JobT]) -> "Request[JobT]":
        """Return the job of a message, checked.

        Raises:
            FormError: The message is malformed.
            ShapeError: So is a region in it.
        """
        if not _MEMBERS.issuperset(message):
            raise FormError(f"a job with {', '.join(map(str, message))[:100]}")
        job = parsed(job_class, message.get("fields", {}))
        return cls(job, _regions(message, "inputs"), _regions(message, "outputs"))

    def expect(self, num_inputs: int | None, num_outputs: int) -> None:
        """Refuse a job with another number of regions. None allows any number of inputs.

        Raises:
            FormError: It has another number.
        """
        if num_inputs not in (None, len(self.inputs)) or num_outputs != len(self.outputs):
            raise FormError(f"{len(self.inputs)} inputs and {len(self.outputs)} outputs")


def _regions(message: Mapping[str, Any], name: str) -> list[Region]:
    values = message.get(name, [])
    if not isinstance(values, list):
        raise FormError(f"{name} is no list")
    return [Region.parse(value) for value in values]


def line_of(message: Mapping[str, Any]) -> bytes:
    """Return a request or a reply as it goes over a socket: JSON, in one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


_Method = TypeVar("_Method", bound=Callable[..., Any])

_MARK = "_runs"


def runs(*job_classes: type) -> Callable[[_Method], _Method]:
    """Mark a method as the one that runs jobs of these classes. A runner has one for each."""

    def mark(method: _Method) -> _Method:
        setattr(method, _MARK, job_classes)
        return method

    return mark


def methods_of(runner: object) -> dict[type, Callable[..., Any]]:
    """Return the methods of an object that are marked, by the classes of jobs that they run.

    A subclass's method goes before one of a base class that runs the same jobs.
    """
    found: dict[type, Callable[..., Any]] = {}
    for base in reversed(type(runner).__mro__):
        for name, member in vars(base).items():
            for job_class in getattr(member, _MARK, ()):
                found[job_class] = getattr(runner, name)
    return found


_T = TypeVar("_T")
_Read = Callable[[Any], Any]
_Write = Callable[[Any], Any] | None
"""None: JSON knows the type."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How a dataclass is written and read."""

    writers: tuple[tuple[str, _Write], ...]
    readers: tuple[tuple[str, _Read], ...]


_KINDS: dict[type, str] = {}
_FORMS: dict[type, _Form] = {}
"""Of classes that were asked for."""


def kind_of(job_class: type) -> str:
    """Return the name of a class of jobs in messages and logs, such as `embed_backward`."""
    kind = _KINDS.get(job_class)
    if kind is None:
        name = re.sub(r"(?<=.)([A-Z])", r"_\1", job_class.__name__)
        kind = _KINDS[job_class] = name.lower()
    return kind


def fields_of(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields as `json.dumps` takes them."""
    form = _FORMS.get(type(value)) or _form_of(type(value))
    return {
        name: getattr(value, name) if write is None else write(getattr(value, name))
        for name, write in form.writers
    }


def parsed(kind: type[_T], values: Any) -> _T:
    """Return the dataclass whose `fields_of` came as JSON.

    Raises:
        FormError: It is no such dataclass.
    """
    readers = (_FORMS.get(kind) or _form_of(kind)).readers
    found = {}
    name = ""
    try:
        if type(values) is not dict or len(values) != len(readers):
            raise _other_fields(kind, values)
        for name, read in readers:
            found[name] = read(values[name])
    except KeyError:
        raise _other_fields(kind, values) from None
    except FormError as error:
        raise FormError(f"{name}: {error}" if name else str(error)) from None
    return kind(**found)


def _other_fields(kind: type, values: Any) -> FormError:
    wanted = ", ".join(each.name for each in fields(kind)) or "no fields"
    named = ", ".join(map(str, values)) if isinstance(values, dict) else str(values)
    return FormError(f"{kind.__name__} has {wanted}, not {named[:100]}")


def _form_of(kind: type) -> _Form:
    hints = get_type_hints(kind, include_extras=True)
    forms = {each.name: _of_type(hints[each.name]) for each in fields(kind)}
    writers = tuple((name, write) for name, (write, _) in forms.items())
    readers = tuple((name, read) for name, (_, read) in forms.items())
    form = _FORMS[kind] = _Form(writers, readers)
    return form


def _of_type(hint: Any) -> tuple[_Write, _Read]:
    """Return what writes a value of a type, and what reads it."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        write, read = _of_type(arguments[0])
        for limit in arguments[1:]:
            # How many entries a tuple has only matters between hosts.
            read = _limited(read, limit) if isinstance(limit, Allowed) else read
        return write, read
    if origin in (Union, types.UnionType):
        (some,) = (each for each in arguments if each is not types.NoneType)
        write, read = _of_type(some)
        # None is written as it is.
        writes = write and (lambda value: None if value is None else write(value))
        return writes, lambda value: None if value is None else read(value)
    if origin is tuple:
        return _of_tuple(arguments)
    if origin is dict:
        return None, _read_object
    if hint is Any:
        return None, lambda value: value
    hint = getattr(hint, "__supertype__", hint)  # Of an id.
    if hint in _PLAIN:
        return _PLAIN[hint]
    if issubclass(hint, Enum):
        return (lambda member: member.value), _enum_reader(hint)
    return fields_of, lambda values: parsed(hint, values)


def _of_tuple(arguments: tuple[Any, ...]) -> tuple[_Write, _Read]:
    if arguments[1:] == (...,):
        write, read = _of_type(arguments[0])
        writes = write and (lambda values: [write(value) for value in values])
        return writes, lambda values: tuple([read(value) for value in _array(values)])
    forms = [_of_type(each) for each in arguments]
    assert all(write is None for write, _ in forms), "it needs a class"
    readers = [read for _, read in forms]

    def read_each(values: Any) -> tuple[Any, ...]:
        if len(_array(values)) != len(readers):
            raise _wrong(values)
        return tuple([read(value) for read, value in zip(readers, values, strict=True)])

    return None, read_each


def _limited(read: _Read, limit: Allowed) -> _Read:
    """Return what reads a value within a limit."""

    def read_limited(value: Any) -> Any:
        found = read(value)
        if not limit.fits(found):
            raise _wrong(value)
        return found

    return read_limited


def _enum_reader(kind: type[Enum]) -> _Read:
    members = {member.value: member for member in kind}

    def read(value: Any) -> Enum:
        if type(value) is not str or value not in members:
            raise _wrong(value)
        return members[value]

    return read


def _read_int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise _wrong(value)
    return value


def _read_float(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise _wrong(value)
    return float(value)


def _read_str(value: Any) -> str:
    if type(value) is not str:
        raise _wrong(value)
    return value


def _read_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _wrong(value)
    return value


def _read_bytes(value: Any) -> bytes:
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise _wrong(value) from None


def _read_object(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise _wrong(value)
    return value


def _array(value: Any) -> list[Any]:
    if type(value) is not list:
        raise _wrong(value)
    return value


def _wrong(value: Any) -> FormError:
    return FormError(f"{str(value)[:100]} can't be")


_PLAIN: Mapping[Any, tuple[_Write, _Read]] = {
    int: (None, _read_int),
    float: (None, _read_float),
    str: (None, _read_str),
    bool: (None, _read_bool),
    bytes: (bytes.hex, _read_bytes),
}
