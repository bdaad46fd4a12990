"""Documents from files: plain text, JSON lines and Parquet, also compressed.

A large file is read in slices that know nothing of each other: JSON by lines, Parquet by row
groups, text by pieces; see `decod.data.slices`. Packed files have one slice, the whole file.

Everything is read as a stream, in bounded memory. A document comes in pieces of at most
`PIECE_SIZE_MAX_CHARS` characters, and each piece is tokenized on its own. Pieces end at the end of
a line, or else before a space. The ends depend only on the document, so the same files give the
same tokens on every host.

The end of a file's name, after `.gz` or `.zst`, decides how the file is read. `.jsonl`, `.ndjson`
and `.json` have one JSON object per line. `.parquet` has a column of strings. Anything else is
UTF-8 text, one document per file. Empty documents and blank lines are left out. Line ends and byte
order marks stay unchanged.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

import zstandard
from typing_extensions import override

from decod.data.source_files import SourceFile, unreadable
from decod.errors import DataError, install_hint
from decod.objects import is_url

PIECE_SIZE_MAX_CHARS = 2**18
"""Limit for a tokenizer's input, because some need a hundred times the text's memory."""
LINE_SIZE_MAX_BYTES = 64 * 2**20
"""A longer line of JSON is refused, because it would have to be held as a whole."""
ZSTD_WINDOW_MAX_BYTES = 2**27
"""The window that `zstd --long` and `--ultra` need. A frame with a larger one is refused."""

# Zstandard packs at most 128 KiB into 4 bytes, so one read makes at most 64 MiB. The library's
# own stream reader bounds this better but takes a truncated file for a complete one.
_ZSTD_READ_SIZE_BYTES = 2048
_BLOCK_SIZE_BYTES = 2**18
_PARQUET_BATCH_ROWS = 256
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")

Kind = Literal["text", "json", "parquet"]
OnRead = Callable[[int], None]
"""Called with the number of bytes read from disk since the last call."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document. Never empty."""

    text: str
    ends_document: bool
    begins_document: bool = True


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a file that can be read without the rest. By default, the whole file."""

    file: SourceFile
    size_bytes: int
    """What it takes of the file, roughly."""
    start: int = 0
    """Row group of a Parquet file. Byte of any other file."""
    end: int | None = None
    """In the unit of `start`. None: the file's end. A line of JSON belongs to the slice in which
    it begins. A slice of text ends where a piece ends."""


def whole(file: SourceFile) -> Slice:
    """Return the only slice of a file."""
    return Slice(file, file.size_bytes)


def kind_of(name: str) -> tuple[Kind, bool]:
    """Return how a file is read, by its name, and whether it is packed."""
    name = name.lower()
    inner = name.removesuffix(".gz").removesuffix(".zst")
    if inner.endswith(".parquet"):
        return "parquet", inner != name
    return ("json" if inner.endswith(_JSON_SUFFIXES) else "text"), inner != name


def read_pieces(part: Slice, *, text_field: str, on_read: OnRead | None = None) -> Iterator[Piece]:
    """Yield the documents of a slice, in pieces, in order.

    Args:
        part: A slice of a file.
        text_field: Name of the JSON field or Parquet column with the text.
        on_read: Called with the number of bytes read.

    Raises:
        DataError: The file is damaged or not what its name says. The message names file and line.
    """
    reader = _Reader(part, text_field, on_read or (lambda _num_bytes: None))
    # A document of text begins in its first slice, and ends in its last one.
    is_text = kind_of(part.file.name)[0] == "text"
    goes_on, is_later = is_text and part.end is not None, is_text and part.start > 0
    with reader.translated_errors():
        for chunks in reader.documents():
            for piece in split_document(chunks):
                ends = piece.ends_document and not goes_on
                yield Piece(piece.text, ends, piece.begins_document and not is_later)


def require_pyarrow() -> Any:
    """Return the module `pyarrow`, with `pyarrow.parquet`, or raise DataError if it is absent."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "Parquet files need the Python package `pyarrow`",
            why="it reads them and is not installed",
            fix=install_hint("parquet"),
            code="E-DAT-014",
        ) from error
    return pyarrow


def split_document(chunks: Iterable[str]) -> Iterator[Piece]:
    """Yield one document's pieces, which do not depend on the cut into `chunks`."""
    pending, begins = "", True
    for chunk in chunks:
        pending += chunk
        while len(pending) > PIECE_SIZE_MAX_CHARS:
            cut = _find_cut(pending)
            yield Piece(pending[:cut], ends_document=False, begins_document=begins)
            pending, begins = pending[cut:], False
    if pending:
        yield Piece(pending, ends_document=True, begins_document=begins)


def _find_cut(text: str) -> int:
    after_line = text.rfind("\n", 0, PIECE_SIZE_MAX_CHARS) + 1
    if after_line:
        return after_line
    # In most vocabularies a word includes the space before it.
    before_word = text.rfind(" ", 1, PIECE_SIZE_MAX_CHARS)
    return before_word if before_word > 0 else PIECE_SIZE_MAX_CHARS


@dataclass(slots=True)
class _Reader:
    """Reads one slice, and knows its present place for error messages."""

    part: Slice
    text_field: str
    on_read: OnRead
    line: int = 1
    """Line that is being read, from 1 for the one at byte `begin`."""
    begin: int = 0

    @property
    def name(self) -> str:
        return self.part.file.name

    def documents(self) -> Iterator[Iterable[str]]:
        """Yield each document as chunks of text. Exhaust one before you ask for the next."""
        kind, packed = kind_of(self.name)
        if kind == "parquet":
            if packed:
                raise _damaged(self.name, "Parquet files are compressed inside, not outside")
            yield from self._parquet_documents()
            return
        with self._open() as stream:
            if kind == "json":
                for line in self._lines(stream):
                    text = self._parse_line(line)
                    yield (text[i : i + 2**18] for i in range(0, len(text), 2**18))
            else:
                yield self._text_chunks(stream)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        with self.part.file.open() as file:
            raw = cast("BinaryIO", io.BufferedReader(_CountingStream(file, self.on_read)))
            name = self.name.lower()
            if name.endswith(".gz"):
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield cast("BinaryIO", unpacked)
            elif name.endswith(".zst"):
                yield io.BufferedReader(_ZstdStream(raw), _BLOCK_SIZE_BYTES)
            else:
                yield raw

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Turn errors of the libraries into a `DataError` that names file and line."""
        try:
            yield
        except DataError:
            raise
        except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as error:
            place = f"near line {self.line} of its content"
            raise _damaged(self.name, f"{place}: {_one_line(error)}") from error
        except OSError as error:
            raise unreadable(self.name, error.strerror or str(error)) from error
        # Every object store has exceptions of its own, which have no common base.
        except Exception as error:
            if is_url(self.name):
                raise unreadable(self.name, _one_line(error)) from error
            raise

    def _text_chunks(self, stream: BinaryIO) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self.begin = position = stream.seek(self.part.start) if self.part.start else 0
        while True:
            left = _BLOCK_SIZE_BYTES if self.part.end is None else self.part.end - position
            block = stream.read(min(_BLOCK_SIZE_BYTES, left))
            position += len(block)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                self.line += error.object.count(b"\n", 0, error.start)
                raise self._not_utf8(error) from error
            self.line += block.count(b"\n")
            yield text
            if not block:
                return

    def _lines(self, stream: BinaryIO) -> Iterator[bytes]:
        self.line = 0
        self.begin = position = self._seek_line(stream)
        while self.part.end is None or position < self.part.end:
            self.line += 1
            line = stream.readline(LINE_SIZE_MAX_BYTES + 1)
            if len(line) > LINE_SIZE_MAX_BYTES:
                raise self._bad_record(f"it is longer than {LINE_SIZE_MAX_BYTES} bytes")
            if not line:
                return
            position += len(line)
            if not line.isspace():
                yield line

    def _seek_line(self, stream: BinaryIO) -> int:
        """Go to the first line that begins in the slice, and return the place of its first byte."""
        if not self.part.start:
            return 0
        # A line begins at the slice's first byte if the byte before it ends one.
        position = stream.seek(self.part.start - 1)
        while line := stream.readline(_BLOCK_SIZE_BYTES):
            position += len(line)
            if line.endswith(b"\n"):
                break
        return position

    def _parse_line(self, line: bytes) -> str:
        if self.line == 1 and not self.begin:
            line = line.removeprefix(codecs.BOM_UTF8)  # Some editors put it at a file's beginning.
        try:
            record: Any = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise self._not_utf8(error) from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise self._bad_record(f"it is not JSON: {_one_line(error)}") from error
        except ValueError as error:
            raise self._bad_record("a number in it has too many digits") from error
        if not isinstance(record, dict):
            raise self._bad_record("it is not a JSON object")
        if self.text_field not in record:
            names = ", ".join(repr(name)[:40] for name in list(record)[:8]) or "none"
            raise self._bad_record(f"it has no field {self.text_field!r}; its fields: {names}")
        text = record[self.text_field]
        if not isinstance(text, str):
            raise self._bad_record(f"{self.text_field!r} is no string but {type(text).__name__}")
        # Unpaired surrogates can only come from escapes, and UTF-8 cannot represent them.
        if b"\\u" in line and not _encodable(text):
            raise self._bad_record("it holds half a surrogate pair, which is not a character")
        return text

    def _parquet_documents(self) -> Iterator[Iterable[str]]:
        pa, row = require_pyarrow(), 0
        try:
            with self.part.file.open() as stream, pa.parquet.ParquetFile(stream) as file:
                self._check_column(file.schema_arrow)
                end = file.num_row_groups if self.part.end is None else self.part.end
                for batch in file.iter_batches(
                    _PARQUET_BATCH_ROWS,
                    row_groups=range(self.part.start, end),
                    columns=[self.text_field],
                ):
                    for text in batch.column(0).to_pylist():
                        row += 1
                        if text is None:
                            place = self._rows_before(file) + row
                            raise self._bad_parquet(f"row {place} of {self.text_field!r} is null")
                        yield (text,)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._bad_parquet(f"after row {row}: {_one_line(error)}") from error
        self.on_read(self.part.size_bytes)

    def _rows_before(self, file: Any) -> int:
        return sum(file.metadata.row_group(i).num_rows for i in range(self.part.start))

    def _check_column(self, schema: Any) -> None:
        import pyarrow as pa

        if schema.names.count(self.text_field) != 1:
            names = ", ".join(repr(name)[:40] for name in schema.names[:8]) or "none"
            raise self._bad_parquet(f"no column {self.text_field!r}; its columns: {names}")
        kind = schema.field(self.text_field).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise self._bad_parquet(f"column {self.text_field!r} holds {kind}, not strings")

    def _line_in_file(self) -> int:
        """Return the present line, from 1 for the file's first. Only errors need it."""
        before, left = 0, self.begin
        with self.part.file.open() as stream:
            while left and (block := stream.read(min(left, _BLOCK_SIZE_BYTES))):
                before += block.count(b"\n")
                left -= len(block)
        return before + self.line

    def _bad_record(self, reason: str) -> DataError:
        return DataError(
            f"{self.name}, line {self._line_in_file()} cannot be used",
            why=reason,
            fix="give one JSON object a line, and name its text with --text-field",
            code="E-DAT-012",
        )

    def _bad_parquet(self, reason: str) -> DataError:
        return DataError(
            f"{self.name} cannot be used",
            why=reason,
            fix="give an intact Parquet file, and name its column of strings with --text-field",
            code="E-DAT-013",
        )

    def _not_utf8(self, error: UnicodeDecodeError) -> DataError:
        byte = error.object[error.start]
        return DataError(
            f"{self.name}, line {self._line_in_file()} is not UTF-8",
            why=f"byte 0x{byte:02x} cannot stand there ({error.reason})",
            fix="convert the file to UTF-8, or leave it out",
            code="E-DAT-011",
        )


class _CountingStream(io.RawIOBase):
    """Passes reads on, and reports their size."""

    def __init__(self, file: BinaryIO, on_read: OnRead) -> None:
        self._file = file
        self._on_read = on_read

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        num_bytes: int = cast("io.RawIOBase", self._file).readinto(buffer) or 0
        self._on_read(num_bytes)
        return num_bytes

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    @override
    def tell(self) -> int:
        return self._file.tell()


class _ZstdStream(io.RawIOBase):
    """Unpacks Zstandard frames one after the other. Raises `ZstdError` if the last is cut off."""

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._library = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MAX_BYTES)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._rest = b""
        """Bytes read from the file but not yet unpacked."""
        self._ready = memoryview(b"")
        """Bytes unpacked but not yet handed out."""

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._rest or self._packed.read(_ZSTD_READ_SIZE_BYTES)
            if not block:
                if self._frame is not None:
                    raise zstandard.ZstdError("the file ends within a frame")
                return 0
            if self._frame is None:
                self._frame = self._library.decompressobj()
            self._ready = memoryview(self._frame.decompress(block))
            self._rest = b""
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
        num_bytes = min(len(buffer), len(self._ready))
        buffer[:num_bytes] = self._ready[:num_bytes]
        self._ready = self._ready[num_bytes:]
        return num_bytes


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _damaged(name: str, reason: str) -> DataError:
    return DataError(
        f"{name} cannot be unpacked",
        why=reason,
        fix="fetch the file again; it is damaged, incomplete, or not what its name says",
        code="E-DAT-011",
    )
