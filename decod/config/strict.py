"""Strict reading of values that people write, and errors that name the place.

An owner's frozen dataclass is mirrored once as a pydantic model, which refuses unknown keys, NaN
and infinity. It converts nothing, except an integer to a float: a string is never a number, and a
bool never an integer. The owners keep plain dataclasses and need not know of pydantic. Files that
have no such owner have a `StrictModel`.
"""

import dataclasses
import difflib
import json
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from decod.errors import ConfigError
from decod.files import read_beginning
from decod.texts import no_constant, unique, why_of

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


# --- what readers of strict files have in common -------------------------------------------------
# Common parts of the readers of strict files: a base model, and the texts of errors.


def read_file(path: Path, size_max_bytes: int, *, why_large: str, fix: str, code: str) -> bytes:
    """Return a file's content.

    Args:
        path: The file.
        size_max_bytes: A larger file is refused as another kind of file.
        why_large: The error's `why` for a file that is too large.
        fix: The error's `fix` for a file that can't be read.
        code: The code of both errors.

    Raises:
        ConfigError: The file can't be read, or is too large.
    """
    try:
        content = read_beginning(path, size_max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}", why=why_of(error), fix=fix, code=code) from None
    if len(content) > size_max_bytes:
        what = f"{path} is larger than {size_max_bytes} bytes"
        raise ConfigError(what, why=why_large, fix="check the path", code=code)
    return content


class StrictModel(BaseModel):
    """Base of models that refuse unknown keys, NaN and infinity, and convert nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def list_model_keys(models: Collection[type[BaseModel]]) -> list[str]:
    """Return all keys of some models as a file spells them, sorted."""
    return sorted(
        {field.alias or name for model in models for name, field in model.model_fields.items()}
    )


def explain(
    name: str,
    error: ValidationError,
    *,
    keys: Collection[str],
    words: dict[str, str],
    code: str,
) -> ConfigError:
    """Make an error of the first problem that pydantic found.

    Args:
        name: The name of the file.
        error: The errors that pydantic found.
        keys: All keys that the file may hold, to guess the meaning of an unknown key.
        words: The names of kinds of values in the file's format, where they differ from TOML's.
        code: The code of the error.
    """
    problems = error.errors(include_url=False)
    problem: Any = problems[0]
    place = "".join(_steps(problem["loc"])).removeprefix(".")
    prefix = f"{name}: {place}" if place else name
    more = f" ({len(problems) - 1} more like this in the file)" if len(problems) > 1 else ""
    match problem["type"]:
        case "extra_forbidden":
            unknown = str(problem["loc"][-1])
            near = difflib.get_close_matches(unknown, list(keys), n=1)
            what = "unknown key"
            why = "a key that is not understood is never passed over"
            fix = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(keys)}"
        case "missing":
            what = "missing"
            why = "it has no default"
            fix = "add it"
        case _:
            wanted = show_wanted(problem, WORDS | words)
            what = f"is {show_value(problem['input'])}"
            why = f"it must be {wanted}"
            fix = f"give {wanted}"
    return ConfigError(f"{prefix}: {what}{more}", why=why, fix=fix, code=code)


def _steps(location: Sequence[int | str]) -> Iterator[str]:
    for step in location:
        yield f"[{step}]" if isinstance(step, int) else f".{show_value(step)[1:-1]}"


# Reading of JSON files that people write: strict, with every error's file and place.

FILE_SIZE_MAX_BYTES = 64 << 20
"""Room for about a million links."""

STDIN: Final = Path("-")

# A table of keys is an object in JSON.
_JSON_WORDS = dict.fromkeys(("model_type", "model_attributes_type"), "an object {}") | {
    "list_type": "a list []"
}

_File = TypeVar("_File", bound=StrictModel)


def name_of(path: Path) -> str:
    """Return the name of a file in errors."""
    return "standard input" if path == STDIN else str(path)


def read_json(
    path: Path, model: type[_File], keys: Collection[str], *, guide: str = "docs/research/lab.md"
) -> _File:
    """Return a file's content. `-` stands for the standard input.

    Args:
        path: The file.
        model: Its form.
        keys: All keys that it may hold, to guess the meaning of an unknown key.
        guide: The document that describes it, for errors.

    Raises:
        ConfigError: E-CFG-050 unreadable, E-CFG-051 not JSON or, by its name, TOML, E-CFG-052 a key
            is missing, unknown or of a wrong type or size.
    """
    return check_json(name_of(path), _parse(path, _read_bytes(path), guide), model, keys)


def check_json(name: str, values: Any, model: type[_File], keys: Collection[str]) -> _File:
    """Return values from JSON in the form of a model.

    Args:
        name: Where they are from, for errors.
        values: The values.
        model: Their form.
        keys: All keys that they may hold.

    Raises:
        ConfigError: E-CFG-052, as in `read_json`.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explain(name, error, keys=keys, words=_JSON_WORDS, code="E-CFG-052") from None


def _read_bytes(path: Path) -> bytes:
    try:
        if path == STDIN:
            content = sys.stdin.buffer.read(FILE_SIZE_MAX_BYTES + 1)
        else:
            content = read_beginning(path, FILE_SIZE_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {name_of(path)}",
            why=why_of(error),
            fix="check the path, or give - for the standard input",
            code="E-CFG-050",
        ) from None
    if len(content) > FILE_SIZE_MAX_BYTES:
        raise ConfigError(
            f"{name_of(path)} is larger than {FILE_SIZE_MAX_BYTES} bytes",
            why="hosts and links of that size are beyond what can be planned",
            fix="check the path, or leave out links that are too expensive to use",
            code="E-CFG-050",
        )
    return content


def _parse(path: Path, content: bytes, guide: str) -> Any:
    place = name_of(path)
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        if kind == "TOML":
            return tomllib.loads(content.decode("utf-8"))
        return json.loads(
            content.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant
        )
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        place = f"{place}:{line}"
        why = f"byte 0x{content[error.start]:02x} is not UTF-8"
    except json.JSONDecodeError as error:
        place = f"{place}:{error.lineno}:{error.colno}"
        why = error.msg[:1].lower() + error.msg[1:] if content.strip() else "the file is empty"
    except RecursionError:
        why = "brackets are nested too deeply"
    except ValueError as error:
        # Raised by one of the two hooks, by TOML, or by an integer of thousands of digits.
        why = str(error)[:200]
    raise ConfigError(
        f"{place}: not valid {kind}",
        why=why,
        fix=f"write {'tables' if kind == 'TOML' else 'one JSON object'}, as in {guide}",
        code="E-CFG-051",
    )
