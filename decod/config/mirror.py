"""Strict reading of plain values into the frozen dataclasses of the owners.

Each dataclass is mirrored once as a pydantic model. The model refuses unknown keys, NaN and
infinity. It converts nothing, except an integer to a float: a string is never a number, and a bool
never an integer. The owners keep plain dataclasses and need not know of pydantic.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

T = TypeVar("T")

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

WORDS = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": 'a string in "quotes"',
    "bool_type": "true or false",
    "model_type": "a table of keys",
    "model_attributes_type": "a table of keys",
}
"""Names for the expected value, by pydantic's kind of error, in the words of a file's author."""

_PHRASES = {
    "Input should be ": "",
    "String should have ": "a string with ",
    "List should have ": "a list with ",
    " after validation": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}
"""Parts of pydantic's sentences, and their replacements after "must be" and "give"."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in the values, at a dotted key like `model.hidden_size`."""

    key: str
    what: str
    """Starts with a word that can follow a file's name and line number."""
    why: str
    fix: str


class MirrorError(Exception):
    """The values do not fit the dataclass. Callers in this package translate this error."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems[0].what)
        self.problems = problems


@cache
def _mirror(cls: Any) -> type[BaseModel]:
    hints = get_type_hints(cls)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        hint: Any = hints[field.name]
        if dataclasses.is_dataclass(hint):
            hint = _mirror(hints[field.name])
        elif isinstance(hint, type) and issubclass(hint, Enum):
            # Strict mode would demand the enum's member, but a file can only hold its value.
            hint = Annotated[hint, Field(strict=False)]
        elif hint is int:
            hint = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
        # The dataclass keeps the default: its constructor fills in fields that are left out.
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        fields[field.name] = (hint, ... if required else None)
    return create_model(cls.__name__, __config__=_STRICT, **fields)


def list_keys(cls: type, prefix: str = "") -> list[str]:
    """Return every dotted key of a dataclass and of its nested ones, tables before their keys."""
    hints = get_type_hints(cls)
    keys = []
    for field in dataclasses.fields(cls):
        keys.append(prefix + field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            keys += list_keys(hints[field.name], prefix + field.name + ".")
    return keys


def _nearest_key(key: str, keys: list[str]) -> str | None:
    """Return the known key that was most likely meant, in any table."""
    by_path = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    if by_path:
        return by_path[0]
    # A right name in the wrong table is a common slip.
    by_name = {known.rpartition(".")[2]: known for known in keys}
    match = difflib.get_close_matches(key.rpartition(".")[2], list(by_name), n=1, cutoff=0.75)
    return by_name[match[0]] if match else None


def show_value(value: object) -> str:
    """Return a value in a form for an error: short, in ASCII."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        # Python refuses to print integers of thousands of digits.
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 40 else text[:37] + "..."


def show_wanted(error: Any, words: Mapping[str, str]) -> str:
    """Describe the expected value, in words that can follow "it must be" and "give".

    Args:
        error: One error of pydantic.
        words: The descriptions of some kinds of error.
    """
    known = words.get(error["type"])
    if known is not None:
        return known
    text = str(error["msg"])
    for phrase, better in _PHRASES.items():
        text = text.replace(phrase, better)
    return text


def _problem(error: Any, cls: type) -> Problem:
    key = ".".join(str(part) for part in error["loc"])
    kind = error["type"]
    if kind == "extra_forbidden":
        keys = list_keys(cls)
        nearest = _nearest_key(key, keys)
        return Problem(
            key,
            f"unknown key {show_value(key)[1:-1]}",
            "a key that is not understood is never passed over",
            f"did you mean {nearest}?" if nearest else "remove it, or see `decod run init`",
        )
    if kind == "missing":
        return Problem(key, f"{key} is missing", "it has no default", "add it")
    wanted = show_wanted(error, WORDS)
    return Problem(
        key,
        f"{key} is {show_value(error['input'])}",
        f"it must be {wanted}",
        f"give {wanted}",
    )


def _construct(cls: type[T], values: BaseModel) -> T:
    hints = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for name in values.model_fields_set:
        value = getattr(values, name)
        arguments[name] = _construct(hints[name], value) if isinstance(value, BaseModel) else value
    return cls(**arguments)


def build(cls: type[T], values: Mapping[str, object]) -> T:
    """Make an instance of a dataclass from plain values.

    Raises:
        MirrorError: Unknown or missing keys, or values of a wrong type.
        ConfigError: The dataclass itself refuses a value in its `__post_init__`.
    """
    mirrored: Any = cls
    try:
        checked = _mirror(mirrored).model_validate(dict(values))
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise MirrorError([_problem(item, cls) for item in found]) from None
    return _construct(cls, checked)
