"""Common parts of the readers of strict files: a base model, and the texts of errors."""

import difflib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from decod.config.mirror import WORDS, show_value, show_wanted
from decod.errors import ConfigError
from decod.files import read_beginning
from decod.texts import why_of


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
            what, why = "unknown key", "a key that is not understood is never passed over"
            fix = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(keys)}"
        case "missing":
            what, why, fix = "missing", "it has no default", "add it"
        case _:
            wanted = show_wanted(problem, WORDS | words)
            what = f"is {show_value(problem['input'])}"
            why, fix = f"it must be {wanted}", f"give {wanted}"
    return ConfigError(f"{prefix}: {what}{more}", why=why, fix=fix, code=code)


def _steps(location: Sequence[int | str]) -> Iterator[str]:
    for step in location:
        yield f"[{step}]" if isinstance(step, int) else f".{show_value(step)[1:-1]}"
