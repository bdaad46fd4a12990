"""Reading documents: every format, and every way in which a file can be bad."""

import gzip
import json
import os
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from decod.data import sources
from decod.data.source_files import find_files
from decod.data.sources import PIECE_SIZE_MAX_CHARS, Slice, read_pieces, split_document, whole
from decod.errors import DataError

DOCUMENTS = ["one\r\ntwo\n", "žluťoučký kůň 🐎", "a\x00b", " \n"]


def slice_of(path: Path) -> Slice:
    [file] = find_files([path])
    return whole(file)


def read_documents(path: Path, text_field: str = "text") -> list[str]:
    documents = [""]
    for piece in read_pieces(slice_of(path), text_field=text_field):
        assert piece.text
        documents[-1] += piece.text
        if piece.ends_document:
            documents.append("")
    assert documents.pop() == ""
    return documents


def pack(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    if suffix == ".zst":
        # Two frames, the first without its size: both are legal and common.
        half = len(content) // 2
        unsized = zstandard.ZstdCompressor(write_content_size=False).compress(content[:half])
        return unsized + zstandard.compress(content[half:])
    return content


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.unknown", "README"])
def test_text_file_is_one_document(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / (name + suffix)
    path.write_bytes(pack("".join(DOCUMENTS).encode(), suffix))
    assert read_documents(path) == ["".join(DOCUMENTS)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "A.JSONL"])
def test_json_file_has_a_document_a_line(tmp_path: Path, name: str, suffix: str) -> None:
    lines = [json.dumps({"body": text, "id": 1}) for text in DOCUMENTS]
    path = tmp_path / (name + suffix)
    path.write_bytes(pack("\n\n".join(lines).encode(), suffix))
    assert read_documents(path, "body") == DOCUMENTS


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet_file_has_a_document_a_row(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    column = pa.array(DOCUMENTS)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2, 3, 4], "body": column}), path)
    assert read_documents(path, "body") == DOCUMENTS


@given(
    st.lists(st.text("ab \n€", max_size=40), max_size=6),
    st.integers(1, 9),
)
def test_pieces_join_to_the_document_however_it_was_read(chunks: list[str], size: int) -> None:
    text = "".join(chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_SIZE_MAX_CHARS", size)
        pieces = list(split_document(chunks))
        assert pieces == list(split_document([text]))
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text) <= size for piece in pieces)
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(
        pieces
    )


def test_long_document_is_cut_at_a_line_end_or_before_a_word() -> None:
    half = "x" * (PIECE_SIZE_MAX_CHARS // 2)
    assert [p.text for p in split_document([f"{half}\n{half} y"])] == [f"{half}\n", f"{half} y"]
    assert [p.text for p in split_document([f"{half} {half}y"])] == [half, f" {half}y"]


def test_folder_is_walked_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", ".git/x", "a/.hidden", "B.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [str(Path(file.name).relative_to(tmp_path)) for file in find_files([tmp_path])]
    assert names == ["B.txt", "a/b/c.txt", "a/z.txt", "b.txt"]


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"E-DAT-010 .*nowhere\.txt cannot be read: No such file"):
        find_files([tmp_path / "nowhere.txt"])


def test_pipe_and_folder_link_are_refused_instead_of_hanging(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        find_files([tmp_path])
    (tmp_path / "pipe").unlink()
    (tmp_path / "loop").symlink_to(tmp_path)
    with pytest.raises(DataError, match="link to a folder"):
        find_files([tmp_path])


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_invalid_utf8_is_refused_with_its_line(tmp_path: Path, name: str, suffix: str) -> None:
    good = b'{"text": "x"}\n'
    path = tmp_path / (name + suffix)
    path.write_bytes(pack(good * 30_000 + b'{"text": "\xff"}\n' + good, suffix))
    with pytest.raises(DataError, match=r"E-DAT-011 .*, line 30001 is not UTF-8: byte 0xff"):
        read_documents(path)


def test_text_that_ends_within_a_character_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x\n" + "€".encode()[:2])
    with pytest.raises(DataError, match="line 2 is not UTF-8"):
        read_documents(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("9" * 5000, "a number in it has too many digits"),
        ('"text"', "it is not a JSON object"),
        ('{"title": "x"}', "it has no field 'text'; its fields: 'title'"),
        ('{"text": 1}', "'text' is no string but int"),
        ('{"text": null}', "'text' is no string but NoneType"),
        (r'{"text": "\ud800"}', "it holds half a surrogate pair"),
    ],
)
def test_bad_json_line_is_refused_with_its_number(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        read_documents(path)
    assert str(caught.value).startswith(f"E-DAT-012 {path}, line 3 cannot be used: {reason}")


def test_the_mark_that_some_editors_begin_a_file_with_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"text": "y"}\n', encoding="utf-8-sig")
    assert read_documents(path) == ["x", "y"]


def test_endless_json_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LINE_SIZE_MAX_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 200}))
    with pytest.raises(DataError, match="line 1 cannot be used: it is longer than 100 bytes"):
        read_documents(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_truncated_archive_is_refused(tmp_path: Path, name: str, suffix: str) -> None:
    """Zstandard's own stream reader takes a truncated file for a complete one."""
    content = b"".join(b'{"text": "%x"}\n' % (i * 2654435761) for i in range(5000))
    packed = pack(content, suffix)
    path = tmp_path / (name + suffix)
    path.write_bytes(packed[: len(packed) - 100])
    with pytest.raises(DataError, match=r"E-DAT-011 .* cannot be unpacked: near line \d+"):
        read_documents(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("content", [b"plain text", b"\x00" * 50])
def test_file_that_is_no_archive_is_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / ("a.txt" + suffix)
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be unpacked"):
        read_documents(path)


def test_frame_that_declares_a_huge_window_is_refused(tmp_path: Path) -> None:
    """Header: magic, single segment with an 8-byte content size of 2**40, then an empty block."""
    path = tmp_path / "a.txt.zst"
    header = b"\x28\xb5\x2f\xfd" + b"\xe0" + (2**40).to_bytes(8, "little")
    path.write_bytes(header + b"\x01\x00\x00")
    with pytest.raises(DataError, match="cannot be unpacked"):
        read_documents(path)


def test_bomb_is_unpacked_in_bounded_steps(tmp_path: Path) -> None:
    """Half a gigabyte packed into kilobytes is handed out in pieces, not at once."""
    path = tmp_path / "a.txt.zst"
    compressor = zstandard.ZstdCompressor(level=3).compressobj(size=2**29)
    packed = b"".join(compressor.compress(bytes(2**24)) for _ in range(32)) + compressor.flush()
    path.write_bytes(packed)
    assert len(packed) < 2**16
    pieces = read_pieces(slice_of(path), text_field="text")
    assert [len(next(pieces).text) for _ in range(3)] == [PIECE_SIZE_MAX_CHARS] * 3


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"title": ["x"]}, "no column 'text'; its columns: 'title'"),
        ({"text": [1]}, "holds int64, not strings"),
        ({"text": ["x", None]}, "row 2 of 'text' is null"),
    ],
)
def test_unfit_parquet_column_is_refused(
    tmp_path: Path, columns: dict[str, list[object]], reason: str
) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(DataError, match=reason) as caught:
        read_documents(path)
    assert caught.value.code == "E-DAT-013"


@pytest.mark.parametrize("cut", [0, 4, 40, -4])
def test_damaged_parquet_file_is_refused(tmp_path: Path, cut: int) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x"] * 100}), path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"a\.parquet cannot be used"):
        read_documents(path)


def test_parquet_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"pip install -c constraints\.txt -e '\.\[parquet\]'"):
        read_documents(path)


def test_progress_adds_up_to_the_size_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(os.urandom(1000).hex().encode()))
    read: list[int] = []
    list(read_pieces(slice_of(path), text_field="text", on_read=read.append))
    assert sum(read) == path.stat().st_size
