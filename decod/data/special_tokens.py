"""The end token that the folder of a model states, beside its `tokenizer.json`.

transformers looks into `tokenizer_config.json`, then into `special_tokens_map.json`. Ids are in
`generation_config.json` and `config.json`. Without any of them, the token can only be guessed.

The token that begins a text is in `tokenizer.json` itself. Beside such a file, transformers ignores
`add_bos_token`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decod.errors import DataError
from decod.files import find_damage, is_cut_json, read_beginning
from decod.texts import why_of

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "config.json"

_SIZE_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedEnd:
    """The end token that a folder states."""

    eos: str | int | None = None
    """The token's text or id; None if no file states one."""
    eos_file: str = ""
    """The file that states it."""


def stated_end(folder: Path) -> StatedEnd:
    """Return the end token that the files of a folder state.

    Raises:
        DataError: One of the files is damaged (E-DAT-015).
    """
    for name in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE):
        if (eos := _token(read_fields(folder / name).get("eos_token"))) is not None:
            return StatedEnd(eos=eos, eos_file=name)
    for name in (GENERATION_FILE, CONFIG_FILE):
        if ids := eos_ids(read_fields(folder / name)):
            return StatedEnd(eos=ids[0], eos_file=name)
    return StatedEnd()


def eos_ids(fields: dict[str, Any]) -> list[int]:
    """Return the ids that end a text, by a `generation_config.json` or `config.json`."""
    given = fields.get("eos_token_id")
    return [each for each in (given if isinstance(given, list) else [given]) if type(each) is int]


def read_fields(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, which is empty if there is no such file.

    Raises:
        DataError: The file can't be read, or holds something else (E-DAT-015).
    """
    try:
        content = read_beginning(path, _SIZE_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _unusable(path, why_of(error)) from error
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        damage = find_damage(content)
        why = f"it is not JSON ({str(error)[:100]})" if damage is None else damage.why
        if is_cut_json(content):
            why = "it ends within its JSON: its download was cut off"
        raise _unusable(path, why, None if damage is None else damage.fix) from error
    if not isinstance(value, dict):
        raise _unusable(path, "it holds no object")
    return value


def _token(value: object) -> str | None:
    """Return the text of a token, which may be written with its flags."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _unusable(path: Path, why: str, fix: str | None = None) -> DataError:
    return DataError(
        f"{path} cannot be used",
        why=why,
        fix=fix or "fetch the file again, or remove it if the model does without it",
        code="E-DAT-015",
    )
