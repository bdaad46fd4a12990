"""The part of the manifest that a run carries from the folder of `--init` to every export.

It holds files that lie beside the weights: the chat template, special tokens and the like.
It may come from a dishonest peer. It is only ever written into files of fixed names, beside an
exported model.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from decod.data.special_tokens import (
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
)
from decod.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import AddedToken

NOTHING = "none"
"""The text of a run that began without a folder."""

CARRIED_MAX_CHARACTERS = 96 * 1024
"""Size of the text. Within the manifest's JSON, it may grow to twice that."""

JSON_FILES = (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, GENERATION_FILE)
"""Files whose objects are carried."""

_MODEL_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9_.-]{1,96})?)?\Z")
_TOKEN_ID = re.compile(r"(0|[1-9][0-9]{0,7})\Z")
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What is carried. The constructor checks its form."""

    base_model: str = ""
    """The model's name: on the Hugging Face Hub if it is known, else that of its folder."""
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The objects in JSON files, by the files' names."""
    template: str = ""
    """The chat template, if it has a file of its own."""
    added_tokens: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tokens that the model's tokenizer has, and that of the data lacks: their flags by id."""

    def __post_init__(self) -> None:
        if not _MODEL_NAME.match(self.base_model):
            raise _refuse("base_model", self.base_model)
        for name in self.objects:
            if name not in JSON_FILES:
                raise _refuse("objects", name)
        for token_id, token in self.added_tokens.items():
            fits = token.keys() == {"content", *_FLAGS} and isinstance(token["content"], str)
            if not _TOKEN_ID.match(token_id) or not fits or not token["content"]:
                raise _refuse("added_tokens", token_id)

    def to_text(self) -> str:
        """Return the canonical text: keys sorted, no spaces, ASCII."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_text(cls, text: str) -> "Carried":
        """Return what a manifest's text says.

        Raises:
            ConfigError: It is too long, or no canonical text.
        """
        if text == NOTHING:
            return cls()
        if len(text) > CARRIED_MAX_CHARACTERS:
            raise _refuse("a text", f"of {len(text)} characters")
        try:
            carried = cls(**_checked_types(json.loads(text)))
            if carried.to_text() == text:
                return carried
        except (ValueError, TypeError, AttributeError, RecursionError):
            pass
        raise _refuse("a text", text)

    def tokens(self) -> "list[tuple[int, AddedToken]]":
        """Return the added tokens with their ids."""
        from tokenizers import AddedToken

        return [
            (int(token_id), AddedToken(each["content"], **{f: each[f] is True for f in _FLAGS}))
            for token_id, each in self.added_tokens.items()
        ]


def _checked_types(values: Any) -> dict[str, Any]:
    """Return the fields in a text, if each is of its type."""
    for name, value in values.items():
        fits = isinstance(value, str)
        if name not in ("base_model", "template"):
            fits = isinstance(value, dict) and all(isinstance(v, dict) for v in value.values())
        if not fits:
            raise _refuse(name, value)
    return dict(values)


def flags_of(token: "AddedToken") -> dict[str, Any]:
    """Return a token as `added_tokens` has it."""
    return {"content": token.content} | {name: getattr(token, name) for name in _FLAGS}


def _refuse(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"carried has {name} {ascii(value)[:80]}",
        why="a run carries the files beside a model's weights in one fixed form",
        fix="begin the run again with --init and the model's folder",
    )
