"""The index of a prepared corpus, and its shards: `index.json`, and files of tokens.

An index names the shards with their sizes and hashes, and the tokenizer that made them. It is
written last, so a folder with an index is a complete corpus. In a run's manifest, the hash of the
index identifies the whole corpus.

Each shard has one hash for the whole file and one for each of its blocks. The first identifies the
tokens. The others let a reader check one block without reading the rest.
A shard is cut at a fixed number of tokens.

Tokens may have marks, which say what training predicts and where documents begin. Then an item of a
shard is a uint32: the id in its lower three bytes, and the mark in the fourth. So the hash of a
block covers its marks, and whoever has a block has its marks.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from decod.data.block import Block
from decod.data.tokenizer import TokenizerKind, is_file
from decod.errors import DataError
from decod.files import read_beginning, replace_durably

DEFAULT_PATH = "default"
"""The data path in a run file that selects the default corpus."""
INDEX_FILE = "index.json"
FORMAT_VERSION: Literal[2] = 2
MARKS_FORMAT_VERSION: Literal[3] = 3
"""The version of an index with marks. Releases that know no marks refuse it."""
TARGET = 1
"""The bit of a mark that says: training predicts this token from those before it."""
BEGINS = 2
"""The bit of a mark that says: a document begins with this token."""
MARK_SHIFT = 24
"""The place of a mark in its item. Every id is below 2**24."""
BLOCK_BYTES = 256 * 2**10
"""A sequence can lie anywhere, so reading one means reading and hashing a whole block. That takes a
quarter of a millisecond. With the hashes, the index has 0.024 % of the shards' size. Blocks of a
quarter of the size would be read four times as fast, with an index four times as large."""
BLOCK_MIN_BYTES = 2**10
BLOCK_MAX_BYTES = 2**20
"""A block travels between data nodes in one message, whose limit is 4 MiB."""
NUM_SHARDS_MAX = 100_000
"""Limit because file names have five digits."""
SHARD_MAX_BYTES = 2**42

Dtype = Literal["uint16", "uint32"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

INDEX_SIZE_MAX_BYTES = 256 * 2**20
"""Enough for a terabyte of shards."""
_SHA256_DIGITS = 64
_FIRST_FORMAT_VERSION = 1
_ITEM_SIZE_BYTES: dict[Dtype, int] = {"uint16": 2, "uint32": 4}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class TokenizerEntry(_Strict):
    """The tokenizer that made the ids."""

    kind: TokenizerKind
    sha256: Sha256
    """Hash of `tokenizer.json` in the same folder; a constant for the bytes kind."""
    vocab_size: Annotated[int, Field(ge=2, le=2**24)]
    """Every id in the shards is below this."""
    eos_id: Annotated[int, Field(ge=0)]
    """Id of the token after every document."""
    bos_id: Annotated[int, Field(ge=0)] | None = None
    """Id of the token before every document. Left out of the file if there is none."""


class ShardEntry(_Strict):
    """One file of tokens."""

    # `\d` would also match digits of other scripts.
    file: Annotated[str, Field(pattern=r"^shard-[0-9]{5}\.bin$")]
    num_tokens: Annotated[int, Field(ge=1, le=2**40)]
    num_bytes: Annotated[int, Field(ge=2, le=SHARD_MAX_BYTES)]
    sha256: Sha256
    block_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})+$")]
    """Concatenated hashes of all blocks. The last block may be shorter."""


class Skipped(_Strict):
    """Records of the text that are not in the corpus, because they held no usable text."""

    num_records: Annotated[int, Field(ge=1)]
    first: tuple[str, ...]
    """The places of the first of them, and what was wrong with each."""


class ConversationCounts(_Strict):
    """What became of conversations."""

    num_conversations: int = 0
    """Conversations in the corpus."""
    num_tokens: int = 0
    """Their tokens. The others are padding."""
    num_cut: int = 0
    """Those of them that lack what comes after the last answer that fits into a window."""
    num_too_long: int = 0
    """Conversations that were left out because their first answer does not fit into a window."""
    num_unanswered: int = 0
    """Conversations that were left out because they hold no answer."""
    num_tokens_lost: int = 0
    """Tokens of all that was cut off or too long."""


class Marks(_Strict):
    """What the marks of a corpus say."""

    num_targets: Annotated[int, Field(ge=1)]
    """Number of tokens that training predicts."""
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a window, whose end no conversation crosses. None: windows may lie anywhere."""
    conversations: ConversationCounts | None = None
    """None: the corpus was made from text."""


class Index(_Strict):
    """A prepared corpus. The constructor checks that its parts agree."""

    format_version: Literal[2, 3]
    tokenizer: TokenizerEntry
    dtype: Dtype
    """Dtype of the items in the shards, little-endian: uint16 for tokens without marks and a
    vocabulary of up to 65,536."""
    num_tokens: Annotated[int, Field(ge=1)]
    """Sum over the shards."""
    block_bytes: Annotated[int, Field(ge=BLOCK_MIN_BYTES, le=BLOCK_MAX_BYTES, multiple_of=4)]
    """Size of every block except a shard's last."""
    shards: Annotated[tuple[ShardEntry, ...], Field(min_length=1, max_length=NUM_SHARDS_MAX)]
    skipped: Skipped | None = None
    """The records that were left out. Absent from the file if that is nothing."""
    marks: Marks | None = None
    """Absent from the file if the tokens have no marks."""

    @model_validator(mode="after")
    def _parts_agree(self) -> "Index":
        if self.tokenizer.eos_id >= self.tokenizer.vocab_size:
            raise ValueError("tokenizer.eos_id is outside the vocabulary")
        if (self.tokenizer.bos_id or 0) >= self.tokenizer.vocab_size:
            raise ValueError("tokenizer.bos_id is outside the vocabulary")
        if self.dtype != dtype_for(self.tokenizer.vocab_size, marked=self.marks is not None):
            raise ValueError(f"dtype {self.dtype} does not fit tokenizer.vocab_size and marks")
        for shard_index, shard in enumerate(self.shards):
            if shard.file != shard_file(shard_index):
                raise ValueError(f"shards[{shard_index}].file is {shard.file}, out of order")
            if shard.num_bytes != shard.num_tokens * self.item_size_bytes:
                raise ValueError(f"{shard.file} has num_bytes that do not fit its num_tokens")
            if len(shard.block_sha256) != self.num_blocks(shard) * _SHA256_DIGITS:
                raise ValueError(f"{shard.file} has more or fewer hashes than blocks")
        if sum(shard.num_tokens for shard in self.shards) != self.num_tokens:
            raise ValueError("num_tokens is not the sum over the shards")
        return self

    @model_validator(mode="after")
    def _marks_agree(self) -> "Index":
        if (self.format_version == MARKS_FORMAT_VERSION) != (self.marks is not None):
            raise ValueError("format_version does not fit marks")
        if (length := self.sequence_length) is not None and (self.num_tokens - 1) % length:
            raise ValueError("num_tokens does not fit marks.sequence_length")
        return self

    @property
    def item_size_bytes(self) -> int:
        """Size of one token."""
        return _ITEM_SIZE_BYTES[self.dtype]

    @property
    def sequence_length(self) -> int | None:
        """The only length of sequences that the corpus can be read in. None: any."""
        return None if self.marks is None else self.marks.sequence_length

    @property
    def sha256(self) -> str:
        """Hash of the corpus's content, independent of the file's spacing and key order.

        The hashes of blocks, the version and what was skipped are left out, because they say
        nothing more about the tokens. A run can therefore continue with a corpus that another
        release prepared again.
        """
        fields = self.model_dump(
            mode="json",
            exclude={
                "block_bytes": True,
                "shards": {"__all__": {"block_sha256": True}},
                "skipped": True,
                "marks": {"conversations": True},
            },
            exclude_none=True,
        )
        fields["format_version"] = _FIRST_FORMAT_VERSION
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("utf-8")).hexdigest()

    def ids(self, items: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the token ids in items, of the same shape and dtype."""
        return items if self.marks is None else items & ((1 << MARK_SHIFT) - 1)

    def num_blocks(self, shard: ShardEntry) -> int:
        """Return the number of a shard's blocks."""
        return -(-shard.num_bytes // self.block_bytes)

    def block_at(self, shard_index: int, offset: int) -> Block:
        """Return the block that holds the byte of a shard at `offset`."""
        start = offset // self.block_bytes * self.block_bytes
        size_bytes = min(self.block_bytes, self.shards[shard_index].num_bytes - start)
        return Block(shard_index, start, size_bytes)

    def block_sha256(self, block: Block) -> str:
        """Return the hash of one of this index's blocks."""
        start = block.offset // self.block_bytes * _SHA256_DIGITS
        return self.shards[block.shard_index].block_sha256[start : start + _SHA256_DIGITS]


class _Versioned(BaseModel):
    """The one field that every version of the index has."""

    format_version: int


def dtype_for(vocab_size: int, *, marked: bool = False) -> Dtype:
    """Return the smallest format that holds every id below `vocab_size`, and maybe a mark."""
    return "uint16" if vocab_size <= 2**16 and not marked else "uint32"


def shard_file(shard_index: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{shard_index:05d}.bin"


def read_index(folder: Path) -> Index:
    """Return a folder's index.

    Raises:
        DataError: The folder has no index, or an invalid one.
    """
    path = folder / INDEX_FILE
    try:
        if not is_file(path):
            raise _no_index(folder)
        content = read_beginning(path, INDEX_SIZE_MAX_BYTES + 1)
    except OSError as error:
        raise _invalid(str(path), f"it cannot be read ({error.strerror})") from error
    return parse_index(content, str(path))


def parse_index(content: bytes, name: str) -> Index:
    """Return the index in the bytes of a file of this name.

    Raises:
        DataError: It is invalid.
    """
    if len(content) > INDEX_SIZE_MAX_BYTES:
        raise _invalid(name, f"it is larger than {INDEX_SIZE_MAX_BYTES} bytes")
    try:
        return Index.model_validate_json(content, strict=True)
    except ValidationError as error:
        _refuse_other_version(name, content)
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise _invalid(name, f"{place}: {first['msg']}" if place else first["msg"]) from error


def write_index(folder: Path, index: Index) -> None:
    """Replace a folder's index, completely or not at all, and wait until the disk has it."""
    text = json.dumps(index.model_dump(mode="json", exclude_none=True), indent=1) + "\n"
    replace_durably(folder / INDEX_FILE, text.encode("utf-8"))


def _refuse_other_version(name: str, content: bytes) -> None:
    """Raise DataError if an index is of a later version, or of 1, which had no hashes of blocks."""
    # The caller reports every other defect.
    with suppress(ValidationError):
        version = _Versioned.model_validate_json(content).format_version
        if version == _FIRST_FORMAT_VERSION:
            place = name.rpartition("/")[0]
            raise DataError(
                f"{name} is of format version {version}, and this release reads {FORMAT_VERSION}",
                why="it has no hashes of blocks, so damage could not be noticed while training",
                fix=f"decod data prepare --force {place} PATH... with the same files and "
                "options: the tokens will be the same, and runs can go on with them",
                code="E-DAT-020",
            )
        if version > MARKS_FORMAT_VERSION:
            raise DataError(
                f"{name} is of format version {version}, and this release reads up to "
                f"{MARKS_FORMAT_VERSION}",
                why="a later release of decod prepared it",
                fix="update decod on this host",
                code="E-DAT-020",
            )


def _no_index(folder: Path) -> DataError:
    what = f"{folder} has no {INDEX_FILE}"
    fix = f"decod data prepare {folder} PATH..."
    why = "it is not a prepared corpus, or its preparation was interrupted"
    if folder.is_file():
        what = f"{folder} is a file"
        why = "a corpus is a folder, which holds prepared text"
        fix = f"decod data prepare OUT {folder}, and give the folder OUT"
    elif not folder.exists():
        why = "there is no such folder"
    return DataError(what, why=why, fix=fix, code="E-DAT-020")


def _invalid(name: str, reason: str) -> DataError:
    return DataError(
        f"{name} is not a valid index",
        why=reason,
        fix="prepare the corpus again, or copy the folder again from its source",
        code="E-DAT-020",
    )


class ShardFile:
    """One shard while it is written. As a context, it closes the file.

    Args:
        path: The file, which is created or replaced.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=2**20)
        self._hash = hashlib.sha256()
        self._block_hash = hashlib.sha256()
        self._block_hashes: list[str] = []
        self.num_bytes = 0

    def write(self, content: bytes) -> None:
        """Append some bytes."""
        self._file.write(content)
        self._hash.update(content)
        left = memoryview(content)
        while left:
            room = BLOCK_BYTES - self.num_bytes % BLOCK_BYTES
            block = left[:room]
            left = left[room:]
            self._block_hash.update(block)
            self.num_bytes += len(block)
            if self.num_bytes % BLOCK_BYTES == 0:
                self._finish_block()

    def finish(self, shard_index: int, *, item_size_bytes: int) -> ShardEntry:
        """Wait until the disk has the bytes, and return their entry in the index."""
        if self.num_bytes % BLOCK_BYTES:
            self._finish_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        return ShardEntry(
            file=shard_file(shard_index),
            num_tokens=self.num_bytes // item_size_bytes,
            num_bytes=self.num_bytes,
            sha256=self._hash.hexdigest(),
            block_sha256="".join(self._block_hashes),
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _finish_block(self) -> None:
        self._block_hashes.append(self._block_hash.hexdigest())
        self._block_hash = hashlib.sha256()


class ShardWriter:
    """Cuts a stream of token ids into shard files."""

    def __init__(self, folder: Path, *, dtype: Dtype, shard_tokens: int) -> None:
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_bytes = shard_tokens * self._dtype.itemsize
        self._done: list[ShardEntry] = []
        self._shard: ShardFile | None = None

    def append(self, token_ids: npt.NDArray[np.uint32]) -> None:
        """Write ids, (T,), which must fit the dtype."""
        content = token_ids.astype(self._dtype).tobytes()
        while content:
            if self._shard is None:
                require_few(len(self._done) + 1)
                self._shard = ShardFile(self._folder / shard_file(len(self._done)))
            room = self._shard_bytes - self._shard.num_bytes
            self._shard.write(content[:room])
            content = content[room:]
            if self._shard.num_bytes == self._shard_bytes:
                self._finish_shard()

    def finish(self) -> tuple[ShardEntry, ...]:
        """Finish the last shard and return all of them."""
        self._finish_shard()
        return tuple(self._done)

    def close(self) -> None:
        """Close the file after an error."""
        if self._shard is not None:
            self._shard.close()

    def _finish_shard(self) -> None:
        if self._shard is None:
            return
        with self._shard as shard:
            self._shard = None
            entry = shard.finish(len(self._done), item_size_bytes=self._dtype.itemsize)
            self._done.append(entry)


def require_few(num_shards: int) -> None:
    """Raise DataError if a corpus can't have so many shards."""
    if num_shards > NUM_SHARDS_MAX:
        raise DataError(
            f"the corpus needs more than {NUM_SHARDS_MAX} shards",
            why="their names have five digits",
            fix="raise --shard-tokens",
            code="E-DAT-016",
        )
