"""Byte-level BPE, encoded by a faster library wherever both libraries give the same ids.

`tokenizers` defines the ids of a `tokenizer.json`. `fastokens` encodes most of these files many
times as fast. It is made for servers, and does not promise the same ids for every file and text.
So decod uses it only for tokenizers whose parts are all known here, and only for texts without
anything that the two libraries treat differently. `scripts/fuzz_tokenizers.py` compares them.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import fastokens
    import tokenizers

_LETTERS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# fastokens splits by these with code of its own. Other expressions go to a general engine, which
# may split otherwise than that of tokenizers.
SPLITS = {
    "cl100k, Llama 3": rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",
    "Qwen2, Qwen3": rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",
    "o200k": _LETTERS % (_SUFFIX + "?", _SUFFIX + "?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",
    "Tekken": _LETTERS % ("", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",
}
"""Regular expressions that cut a text into words, by the vocabularies that use them."""

# Only tokenizers takes the long s of old prints for an s when it ignores case, as in `it's`.
_LONG_S = "'\u017f"

# The libraries have tables of different releases of Unicode. In every release, NFC leaves texts of
# these characters as they are.
NFC_INERT = (
    "\0-\u02ff\u0388-\u03ce\u0400-\u0482\u048a-\u052f\u05d0-\u05ea\u2010-\u2027\u2030-\u205e"
    "\u2190-\u2328\u232b-\u27ff\u3001-\u3029\u3041-\u3096\u309b-\u30ff\u4e00-\u9fa5\uac00-\ud7a3"
    "\uff01-\uff5e\U0001f300-\U0001faff"
)
_NFC_MAY_CHANGE = re.compile(f"[^{NFC_INERT}]")

# Each is looked for in each text.
_ADDED_TOKENS_MAX = 64


def byte_characters() -> list[str]:
    """Return the characters that stand for the 256 bytes in byte-level vocabularies.

    Printable characters of Latin-1 stand for themselves, the others for those from 256 on.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


@dataclass(frozen=True, slots=True)
class FastEncoder:
    """Encodes texts as `tokenizers` does, if special tokens count as plain text."""

    _library: "fastokens.Tokenizer"
    _left_out: tuple[str, ...]
    """Strings that it does not encode."""
    _normalizes: bool
    _sizes_bytes: npt.NDArray[np.int64]
    """How many bytes of text each id stands for."""

    def knows(self, text: str) -> bool:
        """Return whether the ids of `text` are those of `tokenizers`."""
        if any(string in text for string in self._left_out):
            return False
        return not (self._normalizes and _NFC_MAY_CHANGE.search(text))

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Return the ids of texts that it knows, (T,) uint32 each. They can't be written to."""
        token_ids, ends = self._library.encode_batch_flat(list(texts))
        bounds = np.frombuffer(ends, "<u8")
        flat = np.frombuffer(token_ids, "<u4").astype(np.uint32, copy=False)
        return [flat[start:end] for start, end in itertools.pairwise(bounds)]

    def encode_with_begins(
        self, text: str
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]] | None:
        """Return the ids of a text and the byte at which each begins; None if it doesn't know."""
        if not self.knows(text):
            return None
        [ids] = self.encode_batch([text])
        ends = np.cumsum(self._sizes_bytes[ids])
        # Some tokenizers put a space before the text.
        num_added = int(ends[-1]) - len(text.encode())
        assert num_added in (0, 1), num_added
        return ids, np.maximum(ends - self._sizes_bytes[ids] - num_added, 0)


def fast_encoder(tokenizer: "tokenizers.Tokenizer") -> FastEncoder | None:
    """Return an encoder with the ids of a tokenizer. None: use the tokenizer itself.

    Args:
        tokenizer: Truncates and pads nothing, and encodes special tokens as plain text.
    """
    try:
        import fastokens
    # It has no packages for some systems.
    except ImportError:
        return None
    fields: dict[str, Any] = json.loads(tokenizer.to_str())
    if not _is_known(fields):
        return None
    added = [each["content"] for each in fields["added_tokens"] if not each["special"]]
    if len(added) > _ADDED_TOKENS_MAX:
        return None
    normalizes = fields["normalizer"] is not None
    # Such a token would also stand for its normal form.
    if normalizes and any(map(_NFC_MAY_CHANGE.search, added)):
        return None
    plain: dict[str, Any] = {
        "normalizer": None,
        "added_tokens": [],
        "post_processor": None,
        "decoder": None,
    }
    try:
        library = fastokens.Tokenizer.from_json_str(json.dumps(fields | plain))
    # It refuses what it does not implement.
    except ValueError:
        return None
    # Each character of a byte-level vocabulary stands for a byte.
    vocab: dict[str, int] = fields["model"]["vocab"]
    sizes_bytes = np.zeros(max(vocab.values()) + 1, np.int64)
    sizes_bytes[list(vocab.values())] = [len(token) for token in vocab]
    return FastEncoder(library, (*added, _LONG_S), normalizes, sizes_bytes)


def _is_known(fields: Mapping[str, Any]) -> bool:
    """Return whether all parts of a tokenizer are such that both libraries agree on them."""
    model = fields["model"]
    return (
        model["type"] == "BPE"
        and not model["dropout"]
        and not model["continuing_subword_prefix"]
        and not model["end_of_word_suffix"]
        and not model["byte_fallback"]
        # No word is unknown then.
        and model["vocab"].keys() >= set(byte_characters())
        and fields["normalizer"] in (None, {"type": "NFC"})
        and _splits_as_known(fields["pre_tokenizer"])
    )


def _splits_as_known(step: Mapping[str, Any] | None) -> bool:
    match step:
        case {"type": "ByteLevel", "use_regex": True}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": expression},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        }:
            return expression in SPLITS.values()
        case _:
            return False
