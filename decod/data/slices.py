"""The cut of a corpus into parts, which any process may tokenize in any order.

The cut depends on the files alone, never on the number of processes. A part takes a second or two,
so little is lost when a process is killed, and all processes end at about the same time.
"""

from collections.abc import Iterable, Iterator

from decod.data.source_files import SourceFile
from decod.data.sources import Slice, kind_of, read_pieces, require_pyarrow, whole

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
            part, num_bytes = [], 0
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
    starts, sizes = [0], [0]
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
