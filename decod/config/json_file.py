"""Reading of JSON files that people write: strict, with every error's file and place."""

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from decod.config.strict import StrictModel, explain
from decod.errors import ConfigError
from decod.files import read_beginning
from decod.texts import no_constant, unique, why_of

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
        ConfigError: E-CFG-050 unreadable, E-CFG-051 not JSON, E-CFG-052 a key is missing, unknown
            or of a wrong type or size.
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
    try:
        return json.loads(
            content.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant
        )
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        place, why = f"{place}:{line}", f"byte 0x{content[error.start]:02x} is not UTF-8"
    except json.JSONDecodeError as error:
        place = f"{place}:{error.lineno}:{error.colno}"
        why = error.msg[:1].lower() + error.msg[1:] if content.strip() else "the file is empty"
    except RecursionError:
        why = "brackets are nested too deeply"
    except ValueError as error:
        # Raised by one of the two hooks, or by an integer of thousands of digits.
        why = str(error)[:200]
    raise ConfigError(
        f"{place}: not valid JSON",
        why=why,
        fix=f"write one JSON object, as in {guide}",
        code="E-CFG-051",
    )
