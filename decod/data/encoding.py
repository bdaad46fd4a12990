"""The work of one preparation, as tasks that any process may do, in any order and more than once.

A task reads files, writes one file and returns little. The file appears under its name only when it
is complete and on the disk, and its bytes depend on the task alone. So a task that was interrupted
is done again, and one that two processes do at the same time does no harm.

There are two kinds. The first turns a part of the text into tokens. The second joins tokens of
consecutive parts to a shard, when it is known where the shard begins.

The cut of a corpus into parts depends on the files alone, never on the number of processes. A part
takes a second or two, so little is lost when a process is killed, and all processes end at about
the same time. The journal tells which parts and shards are done, so that a killed preparation goes
on. Each line is a JSON object, and is on the disk before anything relies on it. A line that a kill
cut off counts as not written.
"""

import functools
import itertools
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from decod import __version__
from decod.data.block import OnRead
from decod.data.chat import ChatConfig, encode_conversations, padding
from decod.data.index import (
    BEGINS,
    MARK_SHIFT,
    TARGET,
    ConversationCounts,
    Dtype,
    ShardEntry,
    ShardFile,
    shard_file,
)
from decod.data.source_files import SourceFile
from decod.data.sources import (
    BadRecord,
    Piece,
    Slice,
    kind_of,
    read_pieces,
    require_pyarrow,
    whole,
)
from decod.data.tokenizer import NO_BOS, TOKENIZER_FILE, BytesTokenizer, FileTokenizer, Tokenizer
from decod.errors import DataError
from decod.files import open_ordinary, sync_folder
from decod.files import read_pieces as read_bytes

NUM_PLACES_MAX = 10
"""The most records that were left out and are named."""

_FILE = "journal.jsonl"


def has_journal(folder: Path) -> bool:
    """Return whether something is done of the preparation in a folder."""
    try:
        return (folder / _FILE).stat().st_size > 0
    except OSError:
        return False


class PartResult(BaseModel):
    """The result of a part."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    num_tokens: int
    num_targets: int = 0
    """Number of tokens that training predicts, if they have marks."""
    conversations: ConversationCounts | None = None
    num_bad: int = 0
    """Number of records that were left out."""
    bad: tuple[BadRecord, ...] = ()
    """The first of them, up to `NUM_PLACES_MAX`."""


class _Record(BaseModel):
    """One line: a part that is done, a shard, or the start of the move."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    part_index: int | None = None
    part: PartResult | None = None
    shard_index: int | None = None
    shard: ShardEntry | None = None
    moving: bool = False


class PrepareJournal:
    """The work of a preparation that is done. As a context, it closes its file.

    Args:
        folder: The preparation's folder, which may hold an earlier journal.
    """

    def __init__(self, folder: Path) -> None:
        self.parts: dict[int, PartResult] = {}
        """The parts that are done, by index."""
        self.shards: dict[int, ShardEntry] = {}
        """Entries of the shards that are done, by index."""
        self.moving = False
        """Whether the corpus is complete, and its files may have begun to move into place."""
        self._file = (folder / _FILE).open("a+b")
        self._read()
        sync_folder(folder)

    @property
    def empty(self) -> bool:
        """Whether nothing is done."""
        return not self.parts

    def add_part(self, part_index: int, part: PartResult) -> None:
        """Note that a part's file is complete."""
        self._append(_Record(part_index=part_index, part=part))

    def add_shard(self, shard_index: int, shard: ShardEntry) -> None:
        """Note that a shard's file is complete."""
        self._append(_Record(shard_index=shard_index, shard=shard))

    def begin_move(self) -> None:
        """Note that the files of the corpus move into place from now on."""
        self._append(_Record(moving=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.close()

    def _append(self, record: _Record) -> None:
        line = record.model_dump_json(exclude_defaults=True) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._take(record)

    def _take(self, record: _Record) -> None:
        if record.part_index is not None and record.part is not None:
            self.parts[record.part_index] = record.part
        if record.shard_index is not None and record.shard is not None:
            self.shards[record.shard_index] = record.shard
        self.moving = self.moving or record.moving

    def _read(self) -> None:
        self._file.seek(0)
        end = 0
        for line in self._file.readlines():
            try:
                record = _Record.model_validate_json(line, strict=True)
            except ValidationError:
                break
            if not line.endswith(b"\n"):
                break
            self._take(record)
            end += len(line)
        self._file.truncate(end)


PART_SIZE_BYTES = 16 * 2**20
"""Size of a part, as far as files can be cut."""

Part = tuple[Slice, ...]
"""Slices of one or more files, in order."""


def cut_file(
    file: SourceFile, size_bytes: int = PART_SIZE_BYTES, *, skip_bad: bool = False
) -> list[Slice]:
    """Return a file's slices, each of about `size_bytes`.

    JSON and Parquet are not read. Text is, because where a piece of a document ends depends on the
    piece before.

    Args:
        file: The file.
        size_bytes: Size of a slice.
        skip_bad: Don't cut text that is bad. It is left out when it is read.

    Raises:
        DataError: The file can't be read, or is not what its name says.
    """
    kind, packed = kind_of(file.name)
    if packed or file.size_bytes <= size_bytes:
        return [whole(file)]
    if kind == "parquet":
        return _cut_rows(file, size_bytes)
    if kind == "json":
        starts = list(range(0, file.size_bytes, size_bytes))
    else:
        starts = list(_text_starts(file, size_bytes, skip_bad=skip_bad))
    ends = [*starts[1:], file.size_bytes]
    return _slices(file, starts, [end - start for start, end in zip(starts, ends, strict=True)])


def group(slices: Iterable[Slice], size_bytes: int = PART_SIZE_BYTES) -> Iterator[Part]:
    """Yield parts of at least `size_bytes`, except for the last."""
    part: list[Slice] = []
    num_bytes = 0
    for each in slices:
        part.append(each)
        num_bytes += each.size_bytes
        if num_bytes >= size_bytes:
            yield tuple(part)
            part = []
            num_bytes = 0
    if part:
        yield tuple(part)


def _text_starts(file: SourceFile, size_bytes: int, *, skip_bad: bool) -> Iterator[int]:
    """Yield where the slices of a document of text begin: behind the last line of a piece.

    Read alone, the slice gives the same pieces: no two neighbours of them fit into one piece, for
    then the first would have ended at the later line end.
    """
    position = start = 0
    yield start
    on_bad = (lambda _record: None) if skip_bad else None
    for piece in read_pieces(whole(file), text_field="", on_bad=on_bad):
        position += len(piece.text.encode())
        if position - start >= size_bytes and piece.text.endswith("\n") and not piece.ends_document:
            start = position
            yield start


def _cut_rows(file: SourceFile, size_bytes: int) -> list[Slice]:
    pa = require_pyarrow()
    try:
        with file.open() as stream, pa.parquet.ParquetFile(stream) as parquet:
            rows = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
            shares = [row_group.total_byte_size for row_group in rows]
    except (pa.ArrowException, OSError, ValueError):
        # Whoever reads the file gets the same error, and says more about it.
        return [whole(file)]
    # Row groups give their size before compression.
    ratio = file.size_bytes / max(1, sum(shares))
    starts = [0]
    sizes = [0]
    for row_group, share in enumerate(shares):
        if sizes[-1] >= size_bytes:
            starts.append(row_group)
            sizes.append(0)
        sizes[-1] += round(share * ratio)
    return _slices(file, starts, sizes)


def _slices(file: SourceFile, starts: list[int], sizes: list[int]) -> list[Slice]:
    ends = [*starts[1:], None]
    return [
        Slice(file, size, start, end) for size, start, end in zip(sizes, starts, ends, strict=True)
    ]


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
    document_masks: bool
    """Whether tokens get marks that say where documents begin."""
    chat: ChatConfig | None
    """How conversations become tokens. None: the files hold text."""
    last_part: int = 0
    """The last part of the corpus."""
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
    libraries = ("tokenizers", "fastokens", "jinja2")
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
    num_tokens = num_targets = num_bad = 0
    bad: list[BadRecord] = []
    counts = Counter[str]()

    def leave_out(record: BadRecord) -> None:
        nonlocal num_bad
        num_bad += 1
        if len(bad) < NUM_PLACES_MAX:
            bad.append(record)

    on_bad = leave_out if preparation.skip_bad else None
    stream: Iterator[npt.NDArray[np.uint32]]
    if preparation.chat is None:
        name = preparation.text_field
        texts = (
            read_pieces(each, text_field=name, on_read=on_read, on_bad=on_bad) for each in part
        )
        pieces = itertools.chain.from_iterable(texts)
        stream = encode(pieces, encoder, marked=preparation.document_masks)
    else:
        assert isinstance(encoder, FileTokenizer)
        chat = preparation.chat
        stream = encode_conversations(part, chat, encoder, counts, on_read=on_read, on_bad=on_bad)
        if part_index == preparation.last_part:
            stream = itertools.chain(stream, [padding(1, preparation.eos_id)])
    with (
        _published(preparation.part_path(part_index)) as path,
        path.open("wb", buffering=2**20) as file,
    ):
        for items in stream:
            file.write(items.astype(dtype).tobytes())
            num_tokens += items.size
            num_targets += int(np.count_nonzero(items >> MARK_SHIFT & TARGET))
        file.flush()
        os.fsync(file.fileno())
    return PartResult(
        num_tokens=num_tokens,
        num_targets=num_targets,
        conversations=ConversationCounts(**counts) if preparation.chat else None,
        num_bad=num_bad,
        bad=tuple(bad),
    )


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


def encode(
    pieces: Iterable[Piece], encoder: Tokenizer, *, marked: bool = False
) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield the token ids of documents, (T,).

    The end token stands behind each document, and before it a beginning token if there is one.

    Args:
        pieces: The documents.
        encoder: The tokenizer.
        marked: Add marks to the ids: all tokens are targets, except for a document's first.
    """
    eos = np.array([encoder.eos_id], np.uint32)
    bos = None if encoder.bos_id is None else np.array([encoder.bos_id], np.uint32)
    for batch in _batches(pieces):
        parts: list[npt.NDArray[np.uint32]] = []
        begins: list[int] = []
        num_tokens = 0
        for piece, ids in zip(batch, _ids_of(batch, encoder), strict=True):
            if piece.begins_document:
                begins.append(num_tokens)
                num_tokens += bos is not None
            num_tokens += ids.size + piece.ends_document
            if bos is not None and piece.begins_document:
                parts.append(bos)
            parts.append(ids)
            if piece.ends_document:
                parts.append(eos)
        items = np.concatenate(parts)
        if marked:
            marks = np.full(items.size, TARGET << MARK_SHIFT, np.uint32)
            marks[[place for place in begins if place < items.size]] = BEGINS << MARK_SHIFT
            items |= marks
        yield items


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
            batch = []
            num_chars = 0
    if batch:
        yield batch


def _encoder(preparation: Preparation) -> Tokenizer:
    path = str(preparation.folder / TOKENIZER_FILE)
    ends = (preparation.eos_id, preparation.bos_id)
    is_chat = preparation.chat is not None
    return _load_encoder(path, preparation.tokenizer_sha256, *ends, special_in_text=is_chat)


# Parsing a large tokenizer takes longer than a part.
@functools.lru_cache(maxsize=1)
def _load_encoder(
    path: str, sha256: str, eos_id: int, bos_id: int | None, *, special_in_text: bool
) -> Tokenizer:
    if sha256 == BytesTokenizer.sha256:
        return BytesTokenizer()
    bos = NO_BOS if bos_id is None else bos_id
    content = Path(path).read_bytes()
    encoder = FileTokenizer(
        content, eos=eos_id, bos=bos, name=path, special_in_text=special_in_text
    )
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
