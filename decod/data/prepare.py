"""Preparation of a corpus: files of text become token shards.

A corpus is built in a hidden folder inside its own, and moved into place when it is complete; the
index comes last. A preparation that fails therefore leaves an earlier corpus unchanged. A process
that is killed at the worst moment leaves a folder without an index, which does not count as a
corpus.

The same files, in the same order, with the same options give the same bytes.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from decod.data.index import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    INDEX_FILE,
    NUM_SHARDS_MAX,
    Dtype,
    Index,
    ShardEntry,
    TokenizerEntry,
    dtype_for,
    shard_file,
    write_index,
)
from decod.data.sources import OnRead, Piece, find_files, read_pieces
from decod.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from decod.durable import sync_folder, write_durably
from decod.errors import DataError, HardwareError

SHARD_TOKENS_DEFAULT = 2**26

_STAGING_FOLDER = ".preparing"
_OURS = re.compile(rf"^(shard-[0-9]{{5}}\.bin|{re.escape(TOKENIZER_FILE)})$")
# Tokenizers work on batches in parallel. This limits the memory of a batch.
_BATCH_SIZE_MAX_CHARS = 2**20
_BATCH_PIECES_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Options for turning text into tokens."""

    tokenizer: str = "bytes"
    """`bytes`, or the path of a `tokenizer.json`."""
    eos: str | None = None
    """End-of-document token of a `tokenizer.json`. None: guess it."""
    text_field: str = "text"
    """JSON field or Parquet column with the text."""
    shard_tokens: int = SHARD_TOKENS_DEFAULT
    """Largest number of tokens in a shard. The last shard holds the rest."""
    force: bool = False
    """Replace the content of the output folder."""


def prepare(
    out: Path, paths: Sequence[Path], config: PrepareConfig, *, on_read: OnRead | None = None
) -> Index:
    """Write the text of `paths` as a corpus into the folder `out`, and return its index.

    Args:
        out: The corpus's folder, created if missing.
        paths: Files and folders; see `decod.data.sources` for the kinds.
        config: Options.
        on_read: Called with the number of bytes read.

    Raises:
        DataError: A file or the tokenizer is unusable, `out` is taken, or there is no text.
        HardwareError: The disk is full.
    """
    for path in paths:
        # Unlike Path.resolve, realpath accepts circular links. Opening them gives the error.
        if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(path)):
            raise _refused(out, f"it lies in {path}, whose text is to be read", "choose another")
    files = find_files(paths)
    tokenizer, tokenizer_file = load_tokenizer(config.tokenizer, eos=config.eos)
    pieces = (
        piece
        for file in files
        for piece in read_pieces(file, text_field=config.text_field, on_read=on_read)
    )
    return write_corpus(out, pieces, (tokenizer, tokenizer_file), config)


def write_corpus(
    out: Path,
    pieces: Iterable[Piece],
    tokenizer: tuple[Tokenizer, bytes | None],
    config: PrepareConfig,
) -> Index:
    """Tokenize `pieces` into a corpus at `out`. Raises as `prepare`.

    Args:
        out: The corpus's folder, created if missing.
        pieces: The documents.
        tokenizer: Result of `load_tokenizer`.
        config: Only `shard_tokens` and `force` are used.
    """
    _check_shard_tokens(config.shard_tokens)
    try:
        with _locked(out):
            _check_free(out, force=config.force)
            staging = out / _STAGING_FOLDER
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            try:
                index = _build(staging, pieces, tokenizer, shard_tokens=config.shard_tokens)
                _move_into_place(staging, out, index)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise HardwareError(
                f"{out} cannot take the corpus",
                why=error.strerror or "the disk is full",
                fix="free some space or choose a folder on a larger disk; nothing was changed",
                code="E-HW-020",
            ) from error
        raise _refused(
            out, error.strerror or str(error), "choose a folder you may write"
        ) from error
    return index


class _BlockHashes:
    """Hashes a stream of bytes block by block."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._open = bytearray()

    def update(self, content: bytes) -> None:
        self._open += content
        while len(self._open) >= BLOCK_BYTES:
            self._done.append(hashlib.sha256(self._open[:BLOCK_BYTES]).hexdigest())
            del self._open[:BLOCK_BYTES]

    def finish(self) -> str:
        """Return the concatenated hashes of all blocks, including a shorter last one."""
        if self._open:
            self._done.append(hashlib.sha256(self._open).hexdigest())
        return "".join(self._done)


class ShardWriter:
    """Cuts a stream of token ids into shard files with hashes."""

    def __init__(self, folder: Path, *, dtype: Dtype, shard_tokens: int) -> None:
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._done: list[ShardEntry] = []
        self._file: BinaryIO | None = None
        self._hash, self._block_hashes = hashlib.sha256(), _BlockHashes()
        self._num_tokens = 0
        """Number of tokens in the open shard."""

    def append(self, token_ids: npt.NDArray[np.uint32]) -> None:
        """Write ids, (T,), which must fit the dtype."""
        while token_ids.size:
            room = self._shard_tokens - self._num_tokens
            now, token_ids = token_ids[:room], token_ids[room:]
            content = now.astype(self._dtype).tobytes()
            if self._file is None:
                self._file = self._open_next()
            self._file.write(content)
            self._hash.update(content)
            self._block_hashes.update(content)
            self._num_tokens += now.size
            if self._num_tokens == self._shard_tokens:
                self._finish_shard()

    def finish(self) -> tuple[ShardEntry, ...]:
        """Finish the last shard and return all of them."""
        self._finish_shard()
        return tuple(self._done)

    def close(self) -> None:
        """Close the file after an error."""
        if self._file is not None:
            self._file.close()

    def _open_next(self) -> BinaryIO:
        if len(self._done) == NUM_SHARDS_MAX:
            raise DataError(
                f"the corpus needs more than {NUM_SHARDS_MAX} shards",
                why="their names have five digits",
                fix="raise --shard-tokens",
                code="E-DAT-016",
            )
        return (self._folder / shard_file(len(self._done))).open("wb", buffering=2**20)

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._done.append(
            ShardEntry(
                file=shard_file(len(self._done)),
                num_tokens=self._num_tokens,
                num_bytes=self._num_tokens * self._dtype.itemsize,
                sha256=self._hash.hexdigest(),
                block_sha256=self._block_hashes.finish(),
            )
        )
        self._hash, self._block_hashes = hashlib.sha256(), _BlockHashes()
        self._num_tokens = 0


def _build(
    folder: Path,
    pieces: Iterable[Piece],
    tokenizer: tuple[Tokenizer, bytes | None],
    *,
    shard_tokens: int,
) -> Index:
    """Write shards and tokenizer into an empty folder. Return the index, not yet written."""
    encoder, tokenizer_file = tokenizer
    dtype = dtype_for(encoder.vocab_size)
    writer = ShardWriter(folder, dtype=dtype, shard_tokens=shard_tokens)
    eos = np.array([encoder.eos_id], np.uint32)
    try:
        for batch in _batches(pieces):
            parts: list[npt.NDArray[np.uint32]] = []
            ids_of_pieces = encoder.encode_batch([piece.text for piece in batch])
            for piece, ids in zip(batch, ids_of_pieces, strict=True):
                parts.append(ids)
                if piece.ends_document:
                    parts.append(eos)
            writer.append(np.concatenate(parts))
        shards = writer.finish()
    finally:
        writer.close()
    if not shards:
        raise DataError(
            "there is no text in the given files",
            why="a corpus without tokens cannot be trained on",
            fix="check the paths; empty files, blank lines and hidden files are left out",
            code="E-DAT-017",
        )
    if tokenizer_file is not None:
        write_durably(folder / TOKENIZER_FILE, tokenizer_file)
    return Index(
        format_version=FORMAT_VERSION,
        tokenizer=TokenizerEntry(
            kind=encoder.kind,
            sha256=encoder.sha256,
            vocab_size=encoder.vocab_size,
            eos_id=encoder.eos_id,
        ),
        dtype=dtype,
        num_tokens=sum(shard.num_tokens for shard in shards),
        block_bytes=BLOCK_BYTES,
        shards=shards,
    )


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text)
        if num_chars >= _BATCH_SIZE_MAX_CHARS or len(batch) == _BATCH_PIECES_MAX:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keep a second preparation out of the folder, which is created if missing."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise _refused(out, "another preparation is writing to it", "wait until it ends") from error
    try:
        yield
    finally:
        os.close(descriptor)


def _check_free(out: Path, *, force: bool) -> None:
    names = sorted(entry.name for entry in out.iterdir() if entry.name != _STAGING_FOLDER)
    if not names or force:
        return
    if INDEX_FILE in names:
        raise _refused(out, "it already holds a corpus", "pass --force to replace it")
    raise _refused(out, f"it holds other files ({names[0]})", "choose an empty one or pass --force")


def _check_shard_tokens(shard_tokens: int) -> None:
    if not 1 <= shard_tokens <= 2**36:
        raise DataError(
            f"--shard-tokens is {shard_tokens}",
            why="a shard holds at least one token, and files of over 2**36 tokens are a slip",
            fix=f"leave it out to get {SHARD_TOKENS_DEFAULT}",
            code="E-DAT-016",
        )


def _move_into_place(staging: Path, out: Path, index: Index) -> None:
    # From here to the end the folder has no index: the old index must not describe new shards.
    (out / INDEX_FILE).unlink(missing_ok=True)
    sync_folder(out)
    for entry in list(out.iterdir()):
        if _OURS.match(entry.name):
            entry.unlink()
    for entry in list(staging.iterdir()):
        entry.replace(out / entry.name)
    sync_folder(out)
    write_index(out, index)


def _refused(out: Path, reason: str, fix: str) -> DataError:
    return DataError(f"{out} cannot take the corpus", why=reason, fix=fix, code="E-DAT-016")
