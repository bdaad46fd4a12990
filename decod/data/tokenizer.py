"""Text to token ids and back, in one of two ways.

`BytesTokenizer` needs no file: it has the 256 byte values and one end token. `FileTokenizer` reads
a `tokenizer.json` of the Hugging Face `tokenizers` library, which is data, never code.

Corpora must be equal on every host, so ids may depend only on the text. Truncation and padding in a
`tokenizer.json` are switched off, and dropout is refused. Special tokens are never added to a text.
Those that are spelled out in it are encoded as plain text: a page that mentions `<|endoftext|>`
does not end there.

Both kinds can be written as a `tokenizer.json` for the folder of a model, which gives the same ids.

The end token may be stated in the folder of a model, beside its `tokenizer.json`. transformers
looks into `tokenizer_config.json`, then into `special_tokens_map.json`. Ids are in
`generation_config.json` and `config.json`. Without any of them, the token can only be guessed. The
token that begins a text is in `tokenizer.json` itself. Beside such a file, transformers ignores
`add_bos_token`.
"""

import functools
import hashlib
import itertools
import json
import stat
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from decod.data.byte_level import FastEncoder, byte_characters, fast_encoder
from decod.errors import DataError
from decod.files import find_damage, hub_advice, is_cut_json, read_beginning
from decod.installation import install_hint
from decod.texts import why_of

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "config.json"
TEMPLATE_FILE = "chat_template.jinja"

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
        if (eos := token_text(read_fields(folder / name).get("eos_token"))) is not None:
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
        raise _unfit_file(path, why_of(error)) from error
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        damage = find_damage(content)
        why = f"it is not JSON ({str(error)[:100]})" if damage is None else damage.why
        if is_cut_json(content):
            why = "it ends within its JSON: its download was cut off"
        raise _unfit_file(path, why, None if damage is None else damage.fix) from error
    if not isinstance(value, dict):
        raise _unfit_file(path, "it holds no object")
    return value


def read_template(folder: Path, size_max_bytes: int = _SIZE_MAX_BYTES) -> str:
    """Return the chat template that has a file of its own, which is empty if there is none.

    Raises:
        DataError: The file can't be read (E-DAT-015).
    """
    try:
        return read_beginning(folder / TEMPLATE_FILE, size_max_bytes).decode()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, UnicodeDecodeError) as error:
        why = why_of(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise _unfit_file(folder / TEMPLATE_FILE, why) from error


def token_text(value: object) -> str | None:
    """Return the text of a token, which may be written with its flags."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _unfit_file(path: Path, why: str, fix: str | None = None) -> DataError:
    return DataError(
        f"{path} cannot be used",
        why=why,
        fix=fix or "fetch the file again, or remove it if the model does without it",
        code="E-DAT-015",
    )


if TYPE_CHECKING:
    import tokenizers

TokenizerKind = Literal["bytes", "tokenizer.json"]
TokenArray = npt.NDArray[np.uint32]

TOKENIZER_FILE = "tokenizer.json"
EOS_GUESSES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""End-of-document tokens to look for, in this order, if none is named or stated."""
NO_EOS = -1
"""A number in place of an end token's id, where nothing needs one."""
NO_BOS = "none"
"""A word in place of a token's name: documents begin with none."""

# The largest in use (250,000 entries with merges) has about 35 MB.
FILE_SIZE_MAX_BYTES = 256 * 2**20
_VOCAB_SIZE_MAX = 2**24

_SAMPLES = ("a", "the", "0", ".", "x y")
"""Texts of which a tokenizer should know one."""
_GUESS = "a guess"
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Tokenizers in other formats."""


FOLDER_FILES = (
    *(TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, GENERATION_FILE, CONFIG_FILE),
    TEMPLATE_FILE,
    *_OTHER_FILES,
)
"""The files of a model's folder that `load_tokenizer` looks at."""


class Tokenizer(Protocol):
    """The interface of both kinds."""

    kind: TokenizerKind
    sha256: str
    """Hash of everything that determines the ids: the file's bytes, or a constant for bytes."""
    vocab_size: int
    """Every id is below this."""
    eos_id: int
    """Id of the token after every document."""
    bos_id: int | None
    """Id of the token before every document; None if there is none."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without an end token."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the ids of every text, without end tokens: (T,) uint32 each."""
        ...

    def encode_within(self, text: str, start: int, end: int) -> TokenArray:
        """Return the ids of the tokens of `text` that begin in `text[start:end]`, (T,) uint32."""
        ...

    def decode(self, token_ids: Sequence[int], *, with_special: bool = False) -> str:
        """Return the text of the ids, maybe without special tokens, such as the end token.

        Ids of cut characters give U+FFFD.
        """
        ...

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of the tokens that text becomes, as a `tokenizer.json` spells them."""
        ...

    def to_json(self) -> str:
        """Return a `tokenizer.json` that gives the same ids, except for spelled-out end tokens."""
        ...

    @property
    def eos_token(self) -> str:
        """The end token's name in `to_json`."""
        ...


class BytesTokenizer:
    """One token per byte of UTF-8, and 256 as the end of a document."""

    kind: TokenizerKind = "bytes"
    sha256 = hashlib.sha256(b"decod tokenizer: UTF-8 bytes 0-255, end of document 256").hexdigest()
    vocab_size = 257
    eos_id = 256
    bos_id: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32) for text in texts]

    def encode_within(self, text: str, start: int, end: int) -> TokenArray:
        return self.encode_batch([text[start:end]])[0]

    def decode(self, token_ids: Sequence[int], *, with_special: bool = False) -> str:
        _check_ids(token_ids, vocab_size=self.vocab_size)
        end = self.eos_token.encode() if with_special else b""
        parts = (end if i == self.eos_id else bytes((i,)) for i in token_ids)
        return b"".join(parts).decode("utf-8", "replace")

    @property
    def eos_token(self) -> str:
        return EOS_GUESSES[0]

    def vocabulary(self) -> dict[str, int]:
        # As in byte-level BPE, a character stands for each byte.
        return {character: byte for byte, character in enumerate(byte_characters())}

    def to_json(self) -> str:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        # Byte-level BPE without merges.
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=self.vocabulary(), merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        end = tokenizers.AddedToken(self.eos_token, special=True, normalized=False)
        tokenizer.add_special_tokens([end])
        return tokenizer.to_str(pretty=True)


class FileTokenizer:
    """A `tokenizer.json`, made deterministic."""

    kind: TokenizerKind = "tokenizer.json"

    def __init__(
        self,
        content: bytes,
        *,
        eos: str | int | None,
        name: str,
        bos: str | int | None = None,
        stated: StatedEnd | None = None,
        special_in_text: bool = False,
    ) -> None:
        """Parse `content`.

        Args:
            content: The file's bytes.
            eos: The end-of-document token, or its id. None: as `stated`, or else a guess.
            name: Name of the file in error messages.
            bos: The token before every document, its id, or `NO_BOS`. None: the one that the file
                puts before a text.
            stated: What the files beside this one state.
            special_in_text: Whether special tokens that are spelled out in a text count as such.

        Raises:
            DataError: Not a usable tokenizer, or it has no such end token.
        """
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._name = name
        self._tokenizer = _parse(content, name=name)
        added = _take_added(self._tokenizer)
        self._tokenizer.encode_special_tokens = not special_in_text
        if special_in_text:
            # Without special tokens to add, it only takes spaces off what tokens stand for.
            self._tokenizer.post_processor = None
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps, so the number of entries may be too small.
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if not 2 <= self.vocab_size <= _VOCAB_SIZE_MAX:
            raise _unusable(name, f"it has a vocabulary of {self.vocab_size} ids")
        self.eos_origin = "as given"
        """The origin of the end token, for people."""
        if isinstance(eos, int):
            self.eos_id = eos
        else:
            self.eos_id, self.eos_origin = self._find_eos(vocab, eos, stated)
        if isinstance(bos, int):
            self.bos_id: int | None = bos
        elif bos is not None and bos != NO_BOS:
            self.bos_id = _id_of(vocab, bos, "beginning-of-document", name=name)
        else:
            self.bos_id = added[0] if added and bos is None else None

    @property
    def eos_is_guess(self) -> bool:
        """Whether no file states the end token."""
        return self.eos_origin == _GUESS

    def _find_eos(
        self, vocab: dict[str, int], eos: str | None, stated: StatedEnd | None
    ) -> tuple[int, str]:
        """Return the end token's id, and where it comes from.

        Raises:
            DataError: The file has no such token.
        """
        if eos is not None:
            return _id_of(vocab, eos, "end-of-document", name=self._name), "as given"
        if stated is not None and stated.eos is not None:
            if isinstance(stated.eos, str):
                found = _id_of(vocab, stated.eos, "end-of-document", name=self._name)
                return found, f"as {stated.eos_file} says"
            if stated.eos not in vocab.values():
                raise _no_token(self._name, "end-of-document", f"with id {stated.eos}")
            return stated.eos, f"as {stated.eos_file} says"
        # Beside special tokens, an ordinary one may be spelled like that: the end of struck-out
        # HTML is `</s>`.
        special = {token.content for token in self.added_tokens().values() if token.special}
        for candidate in EOS_GUESSES:
            if candidate in (special or vocab):
                return vocab[candidate], _GUESS
        raise _no_token(self._name, "end-of-document", ", ".join(EOS_GUESSES))

    def added_tokens(self) -> "dict[int, tokenizers.AddedToken]":
        """Return the tokens that were added to the vocabulary of texts, by their ids."""
        return self._tokenizer.get_added_tokens_decoder()

    def encode(self, text: str) -> list[int]:
        return [int(token_id) for token_id in self._encode([text], None)[0]]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        return self._encode(texts, self._fast)

    def encode_within(self, text: str, start: int, end: int) -> TokenArray:
        found = None if self._fast is None else self._fast.encode_with_begins(text)
        if found is None:
            [(ids, offsets)] = self.encode_with_offsets([text])
            begins = offsets[:, 0]
            first = start
            last = end
            total = len(text)
        else:
            ids, begins = found
            first, last, total = (len(text[:place].encode()) for place in (start, end, len(text)))
        return ids[(begins >= first) & ((begins < last) | (last == total))]

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[TokenArray, npt.NDArray[np.int64]]]:
        """Return the ids of texts, (T,), and the characters that each stands for, (T, 2).

        Tokens that share a character each stand for all of it.
        """
        try:
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        # The library raises bare `Exception`, because it has no exception class of its own.
        except Exception as error:
            raise _unusable(self._name, f"it cannot encode a text: {_one_line(error)}") from error
        return [
            (np.asarray(each.ids, np.uint32), np.array(each.offsets, np.int64).reshape(-1, 2))
            for each in encodings
        ]

    def knows(self, token: str) -> bool:
        """Return whether a token is in the vocabulary."""
        return self._tokenizer.token_to_id(token) is not None

    @functools.cached_property
    def _fast(self) -> FastEncoder | None:
        # Made at first use: it takes up to a few seconds, and most processes encode no batches.
        return fast_encoder(self._tokenizer)

    def _encode(self, texts: Sequence[str], fast: FastEncoder | None) -> list[TokenArray]:
        known = [fast is not None and fast.knows(text) for text in texts]
        others = [text for text, is_known in zip(texts, known, strict=True) if not is_known]
        try:
            quick = fast.encode_batch(list(itertools.compress(texts, known))) if fast else []
            encodings = self._tokenizer.encode_batch_fast(others, add_special_tokens=False)
        # The library raises bare `Exception`, because it has no exception class of its own.
        except Exception as error:
            raise _unusable(self._name, f"it cannot encode a text: {_one_line(error)}") from error
        # numpy takes three times as long for a list.
        slow = [np.asarray(array("I", encoding.ids), np.uint32) for encoding in encodings]
        both = {True: iter(quick), False: iter(slow)}
        return [next(both[is_known]) for is_known in known]

    def decode(self, token_ids: Sequence[int], *, with_special: bool = False) -> str:
        _check_ids(token_ids, vocab_size=self.vocab_size)
        ids = [int(i) for i in token_ids]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=not with_special)
        return text

    def decode_stream(self, token_ids: Sequence[int]) -> Callable[[int], str]:
        """Return a function that takes the ids of a text one by one, and gives its next piece.

        A piece is empty while a character is not complete, and for ids that are not in the
        vocabulary.

        Args:
            token_ids: The ids before the text, which may decide whether it begins with a space.

        Raises:
            DataError: The returned function does, if the tokenizer can't decode.
        """
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(ids=list(token_ids), skip_special_tokens=True)

        def piece_of(token_id: int) -> str:
            try:
                return stream.step(self._tokenizer, token_id) or ""
            # The library raises bare `Exception`, because it has no exception class of its own.
            except Exception as error:
                raise _unusable(self._name, f"it can't decode: {_one_line(error)}") from error

        return piece_of

    @property
    def eos_token(self) -> str:
        return self._tokenizer.id_to_token(self.eos_id) or ""

    @property
    def bos_token(self) -> str:
        """The name of the token before every document; empty if there is none."""
        return "" if self.bos_id is None else self._tokenizer.id_to_token(self.bos_id) or ""

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=False)

    def to_json(self, more: "Sequence[tuple[int, tokenizers.AddedToken]]" = ()) -> str:
        """Return the text.

        Args:
            more: Added tokens that the file lacks, with their ids. Those that would get other ids
                are left out.
        """
        import tokenizers
        from tokenizers import processors

        whole = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        vocab = whole.get_vocab(with_added_tokens=True)
        for token_id, token in sorted(more, key=lambda item: item[0]):
            next_id = max(whole.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            if token.content not in vocab and token_id == next_id:
                add = whole.add_special_tokens if token.special else whole.add_tokens
                add([token])
        if self.bos_id is not None:
            bos = whole.id_to_token(self.bos_id)
            whole.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, self.bos_id)]
            )
        return whole.to_str(pretty=True)


def load_tokenizer(
    choice: str, *, eos: str | None = None, bos: str | None = None
) -> tuple[Tokenizer, bytes | None]:
    """Return the tokenizer for a choice, and its file's bytes if it has a file.

    Args:
        choice: `bytes`, the path of a `tokenizer.json`, or that of a folder with one. The files
            beside it state the special tokens.
        eos: End-of-document token of a file. None: the stated one, or else a guess. Not for
            `bytes`.
        bos: Token before every document, or `NO_BOS`. None: as transformers does it.

    Raises:
        DataError: There is no such file, or it cannot be used.
    """
    if choice == "bytes":
        for what, value, option in (
            ("an end token", eos, "--eos"),
            ("a beginning token", None if bos == NO_BOS else bos, "--bos"),
        ):
            if value is not None:
                raise DataError(
                    f"{what} {value!r} was given for the bytes tokenizer",
                    why="that one always ends documents with its own id 256, and begins none",
                    fix=f"leave {option} out, or name a tokenizer.json with --tokenizer",
                    code="E-DAT-015",
                )
        return BytesTokenizer(), None
    path = Path(choice).expanduser()
    if path.is_dir():
        path /= TOKENIZER_FILE
    content = read_tokenizer_file(path)
    stated = stated_end(path.parent)
    return FileTokenizer(content, eos=eos, bos=bos, name=str(path), stated=stated), content


def is_file(path: Path) -> bool:
    """Return whether a path is a file.

    Raises:
        OSError: The path can't be examined, or its links are circular. `Path.is_file` would say no.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_tokenizer_file(path: Path) -> bytes:
    """Return a tokenizer file's bytes, or raise `DataError` if it is absent or far too large."""
    try:
        if not is_file(path):
            raise _absent(path)
        content = read_beginning(path, FILE_SIZE_MAX_BYTES + 1)
    except OSError as error:
        raise _unusable(str(path), f"it cannot be read ({error.strerror})") from error
    if len(content) > FILE_SIZE_MAX_BYTES:
        raise _unusable(str(path), f"it is larger than {FILE_SIZE_MAX_BYTES} bytes")
    return content


def _parse(content: bytes, *, name: str) -> "tokenizers.Tokenizer":
    try:
        fields: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        if is_cut_json(content):
            why = "it is not JSON to its end: its download was cut off"
            raise _unusable(name, why, "fetch the file again") from error
        if (damage := find_damage(content)) is not None:
            raise _unusable(name, f"it is not JSON: {damage.why}", damage.fix) from error
        raise _unusable(name, f"it is not JSON ({_one_line(error)})") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model"), dict):
        raise _unusable(name, "it has no `model` object")
    if fields["model"].get("dropout"):
        raise _unusable(name, "its merges have dropout, so the same text gives different ids")
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"{name} needs the Python package `tokenizers`",
            why="it is not installed",
            fix=f"{install_hint()}, or use --tokenizer bytes",
            code="E-DAT-014",
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    # The library raises bare `Exception`, because it has no exception class of its own.
    except Exception as error:
        raise _unusable(name, _one_line(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _take_added(tokenizer: "tokenizers.Tokenizer") -> list[int]:
    """Make a tokenizer add nothing to a text. Return the token that it has put before one, if any.

    It may have put something behind a text as well, where decod puts its end token.
    """
    ids: list[int] = []
    # What ends a text is not wanted twice, and a BOS that is wanted is put before documents.
    if tokenizer.num_special_tokens_to_add(is_pair=False):
        for sample in _SAMPLES:
            encoding = tokenizer.encode(sample)
            if 0 in (mask := list(encoding.special_tokens_mask)):
                # Two tokens or more before a text are of no model that decod trains.
                ids = list(encoding.ids[:1]) if mask.index(0) == 1 else []
                break
        tokenizer.post_processor = None
    return ids


def _id_of(vocab: dict[str, int], token: str, which: str, *, name: str) -> int:
    if token in vocab:
        return vocab[token]
    raise _no_token(name, which, repr(token))


def _no_token(name: str, which: str, tried: str) -> DataError:
    option = "--eos" if which.startswith("end") else "--bos"
    return DataError(
        f"tokenizer {name} has no {which} token {tried}",
        why="documents are joined with one, so that the model learns where they end",
        fix=f"pass the right one with {option} TOKEN (see `added_tokens` in the file)",
        code="E-DAT-015",
    )


def _check_ids(token_ids: Sequence[int], *, vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise DataError(
                f"token id {token_id} is not in the vocabulary of {vocab_size}",
                why="it has no text",
                fix="use the tokenizer that the tokens were made with",
                code="E-DAT-023",
            )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _unusable(name: str, reason: str, fix: str | None = None) -> DataError:
    return DataError(
        f"tokenizer {name} cannot be used",
        why=reason,
        fix=fix or "give `bytes`, or a `tokenizer.json` of the Hugging Face tokenizers library",
        code="E-DAT-015",
    )


def _absent(path: Path) -> DataError:
    """Return the error for a tokenizer that is not there, maybe because it is of another kind."""
    others = [name for name in _OTHER_FILES if (path.parent / name).exists()]
    if path.name == TOKENIZER_FILE and others:
        folder = path.parent
        return _unusable(
            str(path),
            f"there is no such file, only {others[0]}, which decod does not read",
            f"let transformers write one: AutoTokenizer.from_pretrained({str(folder)!r})"
            f".save_pretrained({str(folder)!r})",
        )
    advice = hub_advice(str(path))
    if advice is not None and (path.suffix != ".json" or len(path.parts) > 2):
        return _unusable(str(path), "there is no such file or folder", advice)
    return _unusable(str(path), "there is no such file")
