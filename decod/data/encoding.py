"""The work of one preparation, as tasks that any process may do, in any order and more than once.

A task reads files, writes one file and returns little. The file appears under its name only when it
is complete and on the disk, and its bytes depend on the task alone. So a task that was interrupted
is done again, and one that two processes do at the same time does no harm.

There are two kinds. The first turns a part of the text into tokens. The second joins tokens of
consecutive parts to a shard, when it is known where the shard begins.
"""

import functools
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt

from decod import __version__
from decod.data.index import Dtype, ShardEntry, shard_file
from decod.data.prepare_journal import NUM_PLACES_MAX, PartResult
from decod.data.shards import ShardFile
from decod.data.slices import Part
from decod.data.sources import BadRecord, OnRead, Piece, read_pieces
from decod.data.tokenizer import NO_BOS, TOKENIZER_FILE, BytesTokenizer, FileTokenizer, Tokenizer
from decod.errors import DataError
from decod.files import open_ordinary, sync_folder
from decod.files import read_pieces as read_bytes

# Tokenizers work on batches. This limits the memory of a batch.
_BATCH_SIZE_MAX_CHARS = 2**20
_BATCH_PIECES_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What the tasks of one preparation share."""

    folder: Path
    """Where the tasks write. It also holds the tokenizer's file, if it has one."""
    text_field: str
    """JSON field or Parquet column with the text."""
    skip_bad: bool
    """Leave out records that hold no usable text."""
    tokenizer_sha256: str
    eos_id: int
    bos_id: int | None
    dtype: Dtype
    release: str
    """What must be equal wherever a task runs, or the tokens may differ."""

    @property
    def item_size_bytes(self) -> int:
        """Size of a token."""
        return np.dtype(self.dtype).itemsize

    def part_path(self, part_index: int) -> Path:
        """Return the file with the tokens of a part."""
        return self.folder / f"part-{part_index:07d}.bin"


@dataclass(frozen=True, slots=True)
class Span:
    """Some bytes of a part's file."""

    part_index: int
    start: int
    end: int


def release() -> str:
    """Return the versions on which the tokens of a text depend."""
    libraries = ("tokenizers", "fastokens")
    return ", ".join([f"decod {__version__}", *(f"{name} {_version(name)}" for name in libraries)])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def encode_part(
    preparation: Preparation, part_index: int, part: Part, on_read: OnRead | None = None
) -> PartResult:
    """Write the tokens of a part. Return their number, and what was left out.

    Args:
        preparation: The preparation.
        part_index: The part's place in the corpus.
        part: What to read.
        on_read: Called with the number of bytes read.

    Raises:
        DataError: A file is unusable, or this process has other versions than the preparation.
        OSError: The disk is full, or can't be written.
    """
    _require_release(preparation)
    encoder = _encoder(preparation)
    dtype = np.dtype(preparation.dtype).newbyteorder("<")
    num_tokens = num_bad = 0
    bad: list[BadRecord] = []

    def leave_out(record: BadRecord) -> None:
        nonlocal num_bad
        num_bad += 1
        if len(bad) < NUM_PLACES_MAX:
            bad.append(record)

    pieces = (
        piece
        for each in part
        for piece in read_pieces(
            each,
            text_field=preparation.text_field,
            on_read=on_read,
            on_bad=leave_out if preparation.skip_bad else None,
        )
    )
    with (
        _published(preparation.part_path(part_index)) as path,
        path.open("wb", buffering=2**20) as file,
    ):
        for token_ids in encode(pieces, encoder):
            file.write(token_ids.astype(dtype).tobytes())
            num_tokens += token_ids.size
        file.flush()
        os.fsync(file.fileno())
    return PartResult(num_tokens=num_tokens, num_bad=num_bad, bad=tuple(bad))


def join_shard(preparation: Preparation, shard_index: int, spans: Sequence[Span]) -> ShardEntry:
    """Write a shard from the tokens of parts. Return its entry in the index.

    Args:
        preparation: The preparation.
        shard_index: The shard's place in the corpus.
        spans: The tokens, in order.

    Raises:
        OSError: The disk is full, or the files of the parts are gone.
    """
    with (
        _published(preparation.folder / shard_file(shard_index)) as path,
        ShardFile(path) as shard,
    ):
        for span in spans:
            with open_ordinary(preparation.part_path(span.part_index)) as descriptor:
                for content in read_bytes(descriptor, span.start, span.end):
                    shard.write(content)
        return shard.finish(shard_index, item_size_bytes=preparation.item_size_bytes)


def encode(pieces: Iterable[Piece], encoder: Tokenizer) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield the token ids of documents, (T,).

    The end token stands behind each document, and before it a beginning token if there is one.
    """
    eos = np.array([encoder.eos_id], np.uint32)
    bos = None if encoder.bos_id is None else np.array([encoder.bos_id], np.uint32)
    for batch in _batches(pieces):
        parts: list[npt.NDArray[np.uint32]] = []
        for piece, ids in zip(batch, _ids_of(batch, encoder), strict=True):
            if bos is not None and piece.begins_document:
                parts.append(bos)
            parts.append(ids)
            if piece.ends_document:
                parts.append(eos)
        yield np.concatenate(parts)


def _ids_of(batch: Sequence[Piece], encoder: Tokenizer) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield the ids of pieces, each as the tokenizer gives them for the whole document."""
    alone = iter(encoder.encode_batch([each.text for each in batch if each.is_whole]))
    for piece in batch:
        if piece.is_whole:
            yield next(alone)
        else:
            start = len(piece.before)
            text = piece.before + piece.text + piece.after
            yield encoder.encode_within(text, start, start + len(piece.text))


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


def _encoder(preparation: Preparation) -> Tokenizer:
    path = str(preparation.folder / TOKENIZER_FILE)
    return _load_encoder(path, preparation.tokenizer_sha256, preparation.eos_id, preparation.bos_id)


# Parsing a large tokenizer takes longer than a part.
@functools.lru_cache(maxsize=1)
def _load_encoder(path: str, sha256: str, eos_id: int, bos_id: int | None) -> Tokenizer:
    if sha256 == BytesTokenizer.sha256:
        return BytesTokenizer()
    bos = NO_BOS if bos_id is None else bos_id
    encoder = FileTokenizer(Path(path).read_bytes(), eos=eos_id, bos=bos, name=path)
    assert encoder.sha256 == sha256, (path, encoder.sha256, sha256)
    return encoder


def _require_release(preparation: Preparation) -> None:
    if release() != preparation.release:
        raise DataError(
            f"a worker has {release()}, and the command has {preparation.release}",
            why="other versions may turn a text into other tokens",
            fix="install the same versions wherever a worker runs",
            code="E-DAT-019",
        )


@contextmanager
def _published(path: Path) -> Iterator[Path]:
    """Lend a path to write to. At the end, the file there gets its right name.

    The path is random, because another process may do the same task.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)
