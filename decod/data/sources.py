"""Documents from files: plain text, JSON lines and Parquet, also compressed.

A large file is read in slices that know nothing of each other: JSON by lines, Parquet by row
groups, text by pieces; see `decod.data.encoding`. Packed files have one slice, the whole file.

Everything is read as a stream, in bounded memory. A document comes in pieces of at most
`PIECE_SIZE_MAX_CHARS` characters, and each piece is tokenized on its own. Pieces end at the end of
a line, or else before a space. The ends depend only on the document, so the same files give the
same tokens on every host.

The end of a file's name, before `.gz`, `.zst`, `.bz2` or `.xz`, decides how the file is read.
`.jsonl`, `.ndjson` and `.json` have one JSON object per line. `.parquet` has a column of strings.
Anything else is UTF-8 text, one document per file. Empty documents and blank lines are left out.
Line ends and byte order marks stay unchanged. What is no text is refused, by its name or by its
first bytes (`decod.data.source_files`).

A record is a line of JSON, a row of Parquet, or a file of text. A bad one is refused too, or left
out and reported if the caller wants that.
"""

import codecs
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeVar, cast

from decod.data.block import OnRead
from decod.data.source_files import (
    BEGINNING_SIZE_BYTES,
    BINARY,
    UNPACKING_ERRORS,
    CountingStream,
    ForeignKind,
    SourceFile,
    kind_by_beginning,
    kind_by_name,
    packed_suffix,
    unpacked,
    unreadable,
)
from decod.errors import DataError
from decod.installation import install_hint
from decod.objects import is_url

PIECE_SIZE_MAX_CHARS = 2**18
"""Limit for a tokenizer's input, because some need a hundred times the text's memory."""
LINE_SIZE_MAX_BYTES = 64 * 2**20
"""A longer line of JSON is refused, because it would have to be held as a whole."""
CONTEXT_SIZE_CHARS = 1024
"""How much of the document a tokenizer sees before and behind a piece, so that it gives the ids
that it would give for the whole document."""

_BLOCK_SIZE_BYTES = 2**18
_PARQUET_BATCH_ROWS = 256
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PARQUET_MAGIC = b"PAR1"
_BAD_CONTENT = "E-DAT-011"
_SKIP = "pass --skip-bad to leave out records without usable text"

_TEXT_ADVICE = "give one JSON object a line, and name its text with --text-field"

Kind = Literal["text", "json", "parquet"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document. Never empty."""

    text: str
    ends_document: bool
    before: str = ""
    """The text before it in the document, up to `CONTEXT_SIZE_CHARS`."""
    after: str = ""
    """The text behind it in the document, up to `CONTEXT_SIZE_CHARS`."""

    @property
    def begins_document(self) -> bool:
        return not self.before

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole document."""
        return not self.before and not self.after


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that holds no usable text."""

    file: str
    reason: str
    unit: Literal["file", "line", "row"] = "file"
    number: int = 0
    """The number of the row in the file, or of the line, from 1 for the one at byte `begin`."""
    begin: int = 0


OnBad = Callable[[BadRecord], object]
"""Called with each record that is left out."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a file that can be read without the rest. By default, the whole file."""

    file: SourceFile
    size_bytes: int
    """The bytes that the slice takes of the file, roughly."""
    start: int = 0
    """Row group of a Parquet file. Byte of any other file."""
    end: int | None = None
    """The end, in the unit of `start`. None: the file's end. A line of JSON belongs to the slice in
    which it begins. A slice of text ends where a piece ends."""


def whole(file: SourceFile) -> Slice:
    """Return the only slice of a file."""
    return Slice(file, file.size_bytes)


def kind_of(name: str) -> tuple[Kind, bool]:
    """Return how a file is read, by its name, and whether it is packed."""
    inner = _inner_name(name)
    if inner.endswith(".parquet"):
        return "parquet", inner != name.lower()
    return ("json" if inner.endswith(_JSON_SUFFIXES) else "text"), inner != name.lower()


def read_pieces(
    part: Slice,
    *,
    text_field: str,
    on_read: OnRead | None = None,
    on_bad: OnBad | None = None,
) -> Iterator[Piece]:
    """Yield the documents of a slice, in pieces, in order.

    Args:
        part: A slice of a file.
        text_field: Name of the JSON field or Parquet column with the text.
        on_read: Called with the number of bytes read.
        on_bad: Called with each bad record, which is left out. None: a bad record is an error.

    Raises:
        DataError: The file is damaged or not what its name says. The message names file and line.
    """
    reader = _Reader(part, text_field, on_read or (lambda _num_bytes: None), on_bad)
    with reader.translated_errors():
        for chunks in reader.documents():
            yield from split_document(chunks, reader.before, reader.after)


def read_records(
    part: Slice,
    parse: Callable[[dict[str, Any]], T],
    columns: Sequence[str],
    advice: str,
    on_read: OnRead | None = None,
    on_bad: OnBad | None = None,
) -> Iterator[T]:
    """Yield what each line of JSON or row of Parquet of a slice becomes, in order.

    Args:
        part: A slice of a file that is no text.
        parse: Makes something of a record. Raises `BadRecordError` if there is nothing to make.
        columns: The columns of a Parquet file that it may want.
        advice: What a user can do about a bad record.
        on_read: Called with the number of bytes read.
        on_bad: As for `read_pieces`.

    Raises as `read_pieces`, and what `parse` raises.
    """
    reader = _Reader(part, "", on_read or (lambda _num_bytes: None), on_bad, advice)
    with reader.translated_errors():
        yield from reader.records(parse, columns)


def foreign_kind(file: SourceFile) -> ForeignKind | None:
    """Return what a file is that is no text, by its name or its first bytes.

    Raises:
        DataError: It can't be read or unpacked.
    """
    reader = _Reader(whole(file), "", lambda _num_bytes: None)
    with reader.translated_errors():
        return reader.foreign_kind()


def is_foreign(name: str, kind: ForeignKind) -> DataError:
    """Return the error for a file that is no text."""
    return DataError(
        f"{name} is {kind.what}",
        why="decod would train on its bytes as if they were text",
        fix=f"{kind.fix}, or leave it out",
        code=_BAD_CONTENT,
    )


def lines_before(file: SourceFile, end: int) -> int:
    """Return the number of lines of a file that end before a byte. It reads all of them."""
    num_lines = 0
    left = end
    with file.open() as stream:
        while left and (block := stream.read(min(left, _BLOCK_SIZE_BYTES))):
            num_lines += block.count(b"\n")
            left -= len(block)
    return num_lines


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


def split_document(chunks: Iterable[str], before: str = "", after: str = "") -> Iterator[Piece]:
    """Yield one document's pieces, which do not depend on the cut into `chunks`.

    Args:
        chunks: The document's text, or the text of some of its pieces.
        before: The document's text before that.
        after: The document's text behind that.
    """
    pending = ""

    def cut_off(size_max_chars: int) -> Iterator[Piece]:
        nonlocal pending, before
        while len(pending) > size_max_chars:
            cut = _find_cut(pending) if len(pending) > PIECE_SIZE_MAX_CHARS else len(pending)
            text = pending[:cut]
            pending = pending[cut:]
            following = (pending[:CONTEXT_SIZE_CHARS] + after)[:CONTEXT_SIZE_CHARS]
            yield Piece(text, ends_document=not following, before=before, after=following)
            before = (before + text[-CONTEXT_SIZE_CHARS:])[-CONTEXT_SIZE_CHARS:]

    for chunk in chunks:
        pending += chunk
        # The text behind a piece must be there, too.
        yield from cut_off(PIECE_SIZE_MAX_CHARS + CONTEXT_SIZE_CHARS)
    yield from cut_off(0)


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
    on_bad: OnBad | None = None
    advice: str = _TEXT_ADVICE
    """What a user can do about a bad record."""
    line: int = 1
    """Line that is being read, from 1 for the one at byte `begin`."""
    begin: int = 0
    before: str = ""
    """The text that the document of a slice holds before the slice."""
    after: str = ""
    """The text that the document holds behind the slice."""

    @property
    def name(self) -> str:
        return self.part.file.name

    def documents(self) -> Iterator[Iterable[str]]:
        """Yield each document as chunks of text. Exhaust one before you ask for the next."""
        kind, _ = kind_of(self.name)
        if kind == "parquet":
            for text in self._rows([self.text_field], self._text_in_row):
                if text:
                    yield (text,)
            return
        if kind == "text" and self.on_bad is not None and self._is_bad_text(self.on_bad):
            self.on_read(self.part.size_bytes)
            return
        with self._open() as stream:
            if kind == "json":
                for text in self._parsed(stream, self._text_in_record):
                    yield (text[i : i + 2**18] for i in range(0, len(text), 2**18))
            else:
                self._look_around(stream)
                yield self._text_chunks(stream)

    def records(self, parse: Callable[[dict[str, Any]], T], columns: Sequence[str]) -> Iterator[T]:
        """Yield what each record becomes."""
        kind, _ = kind_of(self.name)
        assert kind != "text", self.name
        if kind == "parquet":
            yield from self._rows(columns, parse)
            return
        with self._open() as stream:
            yield from self._parsed(stream, lambda record, _line: parse(record))

    def foreign_kind(self) -> ForeignKind | None:
        """Return what the file is, if that shows and is no text."""
        kind, packed = kind_of(self.name)
        named = kind_by_name(_inner_name(self.name))
        if named is not None:
            return named
        if packed and kind == "parquet":
            return None
        with self._open() as stream:
            return _kind_of(stream.read(BEGINNING_SIZE_BYTES), kind)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        with self.part.file.open() as file:
            raw = cast("BinaryIO", io.BufferedReader(CountingStream(file, self.on_read)))
            with unpacked(raw, packed_suffix(self.name)) as stream:
                yield stream

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Turn errors of the libraries into a `DataError` that names file and line."""
        try:
            yield
        except DataError:
            raise
        except UNPACKING_ERRORS as error:
            foreign = self._foreign_outside()
            if foreign is not None:
                raise is_foreign(self.name, foreign) from error
            place = f"near line {self.line} of its content"
            raise _damaged(self.name, f"{place}: {_one_line(error)}") from error
        except OSError as error:
            raise unreadable(self.name, error.strerror or str(error)) from error
        # Every object store has exceptions of its own, which have no common base.
        except Exception as error:
            if is_url(self.name):
                raise unreadable(self.name, _one_line(error)) from error
            raise

    def _foreign_outside(self) -> ForeignKind | None:
        """Return what a file is that should be packed and is not, if that shows."""
        with self.part.file.open() as file:
            beginning = file.read(BEGINNING_SIZE_BYTES)
        kind = kind_by_beginning(beginning, has_records=True)
        # A damaged file may well begin as it should.
        if kind is None or kind is BINARY or packed_suffix(self.name) in kind.fix:
            return None
        return kind

    def _is_bad_text(self, on_bad: OnBad) -> bool:
        """Return whether a slice of text is bad, and report it. Tokens of a part would stay."""
        reader = _Reader(self.part, self.text_field, lambda _num_bytes: None)
        try:
            with reader.translated_errors(), reader._open() as stream:
                for _ in reader._text_chunks(stream):
                    pass
        except DataError as error:
            if error.code != _BAD_CONTENT:
                raise
            on_bad(BadRecord(self.name, f"{error.what}: {error.why}"))
            return True
        return False

    def _text_chunks(self, stream: BinaryIO) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self.begin = position = stream.seek(self.part.start) if self.part.start else 0
        while True:
            left = _BLOCK_SIZE_BYTES if self.part.end is None else self.part.end - position
            block = stream.read(min(_BLOCK_SIZE_BYTES, left))
            if not position:
                self._require_text(block, "text")
            position += len(block)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                self.line += error.object.count(b"\n", 0, error.start)
                raise self._not_utf8(error) from error
            if "\0" in text:
                self.line += text.count("\n", 0, text.index("\0"))
                raise self._not_text("it holds the byte 0, which no text does")
            self.line += block.count(b"\n")
            yield text
            if not block:
                return

    def _look_around(self, stream: BinaryIO) -> None:
        """Read what stands before and behind a slice of text."""
        # No character takes more than four bytes. One may be cut at the outer end.
        size_bytes = 4 * CONTEXT_SIZE_CHARS
        if start := self.part.start:
            content = stream.read(start - stream.seek(max(0, start - size_bytes)))
            self.before = content.decode("utf-8", "ignore")[-CONTEXT_SIZE_CHARS:]
        if self.part.end is not None:
            stream.seek(self.part.end)
            content = stream.read(size_bytes)
            self.after = content.decode("utf-8", "ignore")[:CONTEXT_SIZE_CHARS]
            stream.seek(0)

    def _require_text(self, beginning: bytes, kind: Kind) -> None:
        foreign = kind_by_name(_inner_name(self.name)) or _kind_of(beginning, kind)
        if foreign is not None:
            raise is_foreign(self.name, foreign)

    def _lines(self, stream: BinaryIO) -> Iterator[bytes]:
        self.line = 0
        self.begin = position = self._seek_line(stream)
        is_first = not position
        while self.part.end is None or position < self.part.end:
            self.line += 1
            line = stream.readline(LINE_SIZE_MAX_BYTES + 1)
            position += len(line)
            if len(line) > LINE_SIZE_MAX_BYTES:
                self._leave_out(f"it is longer than {LINE_SIZE_MAX_BYTES} bytes")
                while line and not line.endswith(b"\n"):
                    line = stream.readline(_BLOCK_SIZE_BYTES)
                    position += len(line)
                continue
            if not line:
                return
            if not line.isspace():
                if is_first:
                    self._require_text(line[:BEGINNING_SIZE_BYTES], "json")
                    is_first = False
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

    def _parsed(self, stream: BinaryIO, parse: Callable[[dict[str, Any], bytes], T]) -> Iterator[T]:
        """Yield what each line of JSON becomes, unless it is left out."""
        for line in self._lines(stream):
            if self.line == 1 and not self.begin:
                # Some editors put it at a file's beginning.
                line = line.removeprefix(codecs.BOM_UTF8)  # noqa: PLW2901
            try:
                value = parse(_record_in(line), line)
            except UnicodeDecodeError as error:
                if self.on_bad is None:
                    raise self._not_utf8(error) from error
                self._leave_out(_why_not_utf8(error))
            except BadRecordError as error:
                self._leave_out(str(error), error)
            else:
                yield value

    def _text_in_record(self, record: dict[str, Any], line: bytes) -> str:
        if self.text_field not in record:
            raise BadRecordError(f"it has no field {self.text_field!r}; {fields_of(record)}")
        text = record[self.text_field]
        if not isinstance(text, str):
            raise BadRecordError(f"{self.text_field!r} is no string but {type(text).__name__}")
        # Unpaired surrogates can only come from escapes, and UTF-8 cannot represent them.
        if b"\\u" in line:
            require_encodable(text)
        return text

    def _text_in_row(self, row: dict[str, Any]) -> str:
        if row[self.text_field] is None:
            raise BadRecordError(f"{self.text_field!r} is null")
        return cast("str", row[self.text_field])

    def _rows(self, columns: Sequence[str], parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
        """Yield what each row of a Parquet file becomes, unless it is left out."""
        if kind_of(self.name)[1]:
            raise _damaged(self.name, "Parquet files are compressed inside, not outside")
        pa = require_pyarrow()
        row = 0
        try:
            with self.part.file.open() as stream:
                self._require_parquet(stream)
                with pa.parquet.ParquetFile(stream) as file:
                    for values in self._values(file, self._checked(columns, file.schema_arrow)):
                        row += 1
                        try:
                            value = parse(values())
                        except UnicodeDecodeError as error:
                            reason = f"it is not UTF-8: {_why_not_utf8(error)}"
                            self._leave_out_row(file, row, reason)
                        except BadRecordError as error:
                            self._leave_out_row(file, row, str(error))
                        else:
                            yield value
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._bad_parquet(f"after row {row}: {_one_line(error)}") from error
        self.on_read(self.part.size_bytes)

    def _require_parquet(self, stream: BinaryIO) -> None:
        beginning = stream.read(BEGINNING_SIZE_BYTES)
        stream.seek(0)
        if not beginning.startswith(_PARQUET_MAGIC):
            self._require_text(beginning, "parquet")

    def _values(self, file: Any, columns: list[str]) -> Iterator[Callable[[], dict[str, Any]]]:
        """Yield functions that return the values of a row, by column."""
        end = file.num_row_groups if self.part.end is None else self.part.end
        groups = range(self.part.start, end)
        for batch in file.iter_batches(_PARQUET_BATCH_ROWS, row_groups=groups, columns=columns):
            for row in zip(*(batch.column(name) for name in columns), strict=True):
                yield lambda row=row: {  # type: ignore[misc]
                    name: value.as_py() for name, value in zip(columns, row, strict=True)
                }

    def _leave_out_row(self, file: Any, row: int, reason: str) -> None:
        row += sum(file.metadata.row_group(i).num_rows for i in range(self.part.start))
        if self.on_bad is None:
            fix = _SKIP if self.text_field else f"{self.advice}; or {_SKIP}"
            raise self._bad_parquet(f"row {row}: {reason}", fix=fix)
        self.on_bad(BadRecord(self.name, reason, "row", row))

    def _checked(self, columns: Sequence[str], schema: Any) -> list[str]:
        """Return those of some columns that a file has."""
        if self.text_field:
            self._check_column(schema)
        found = [name for name in columns if schema.names.count(name) == 1]
        if not found:
            wanted = ", ".join(columns)
            raise self._bad_parquet(f"it has none of the columns {wanted}", fix=self.advice)
        return found

    def _check_column(self, schema: Any) -> None:
        import pyarrow as pa

        if schema.names.count(self.text_field) != 1:
            names = ", ".join(repr(name)[:40] for name in schema.names[:8]) or "none"
            raise self._bad_parquet(f"no column {self.text_field!r}; its columns: {names}")
        kind = schema.field(self.text_field).type
        while inner := _type_within(kind):
            kind = inner
        types = pa.types
        is_string = (types.is_string, types.is_large_string, types.is_string_view)
        if not any(check(kind) for check in is_string):
            raise self._bad_parquet(f"column {self.text_field!r} holds {kind}, not strings")

    def _leave_out(self, reason: str, cause: Exception | None = None) -> None:
        """Report the present line as bad.

        Raises:
            DataError: Bad lines are not left out.
        """
        if self.on_bad is not None:
            self.on_bad(BadRecord(self.name, reason, "line", self.line, self.begin))
            return
        raise DataError(
            f"{self.name}, line {self._line_in_file()} cannot be used",
            why=reason,
            fix=f"{self.advice}; or {_SKIP}",
            code="E-DAT-012",
        ) from cause

    def _line_in_file(self) -> int:
        """Return the present line, from 1 for the file's first. Only errors need it."""
        return lines_before(self.part.file, self.begin) + self.line

    def _bad_parquet(self, reason: str, fix: str = "") -> DataError:
        return DataError(
            f"{self.name} cannot be used",
            why=reason,
            fix=fix
            or "give an intact Parquet file, and name its column of strings with --text-field",
            code="E-DAT-013",
        )

    def _not_text(self, reason: str) -> DataError:
        return DataError(
            f"{self.name}, line {self._line_in_file()} is no text",
            why=reason,
            fix="convert the file to text in UTF-8, or leave it out",
            code=_BAD_CONTENT,
        )

    def _not_utf8(self, error: UnicodeDecodeError) -> DataError:
        return DataError(
            f"{self.name}, line {self._line_in_file()} is not UTF-8",
            why=_why_not_utf8(error),
            fix="convert the file to UTF-8, or leave it out",
            code=_BAD_CONTENT,
        )


class BadRecordError(Exception):
    """Says why a record holds nothing usable."""


def fields_of(record: Mapping[str, object]) -> str:
    """Return a list of a record's fields, for an error."""
    return "its fields: " + (", ".join(repr(name)[:40] for name in list(record)[:8]) or "none")


def require_encodable(text: str) -> None:
    """Refuse a text with half a surrogate pair. Raises BadRecordError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        why = "it holds half a surrogate pair, which is not a character"
        raise BadRecordError(why) from error


def _record_in(line: bytes) -> dict[str, Any]:
    """Return the object in a line of JSON.

    Raises:
        UnicodeDecodeError: The line is not UTF-8.
        BadRecordError: It holds no object.
    """
    content = line.decode("utf-8")
    try:
        record: Any = json.loads(content)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRecordError(f"it is not JSON: {_one_line(error)}") from error
    except ValueError as error:
        raise BadRecordError("a number in it has too many digits") from error
    if not isinstance(record, dict):
        raise BadRecordError("it is not a JSON object")
    return record


def _inner_name(name: str) -> str:
    """Return a file's name in lower case, without the ends that say how it is packed."""
    name = name.lower()
    while suffix := packed_suffix(name):
        name = name.removesuffix(suffix)
    return name


def _kind_of(beginning: bytes, kind: Kind) -> ForeignKind | None:
    if kind == "parquet" and beginning.startswith(_PARQUET_MAGIC):
        return None
    return kind_by_beginning(beginning[:BEGINNING_SIZE_BYTES], has_records=kind != "text")


def _type_within(kind: Any) -> Any:
    """Return the type of the values that Arrow stores another way, or None if it does not."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return kind.value_type
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else None


def _why_not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} cannot stand there ({error.reason})"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _damaged(name: str, reason: str) -> DataError:
    return DataError(
        f"{name} cannot be unpacked",
        why=reason,
        fix="fetch the file again; it is damaged, incomplete, or not what its name says",
        code=_BAD_CONTENT,
    )
