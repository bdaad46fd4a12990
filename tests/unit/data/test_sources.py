"""Reading documents: every format, and every way in which a file can be bad."""

import bz2
import gzip
import importlib.util
import io
import json
import lzma
import os
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from decod.data import sources
from decod.data.prepare import PrepareConfig, prepare
from decod.data.source_files import PACKED_SUFFIXES, find_files
from decod.data.sources import PIECE_SIZE_MAX_CHARS, Slice, read_pieces, split_document, whole
from decod.errors import DataError
from decod.installation import install_hint

TEXTS = ["one\r\ntwo\n", "žluťoučký kůň 🐎", " \n"]
# JSON and Parquet may hold the byte 0, which shows that a file is no text.
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
    if suffix == ".bz2":
        return bz2.compress(content[:5]) + bz2.compress(content[5:])
    if suffix == ".xz":
        # Streams may be padded, between them and at the end.
        return lzma.compress(content[:5]) + bytes(8) + lzma.compress(content[5:]) + bytes(4)
    if suffix == ".zst":
        # Two frames, the first without its size: both are legal and common.
        half = len(content) // 2
        unsized = zstandard.ZstdCompressor(write_content_size=False).compress(content[:half])
        return unsized + zstandard.compress(content[half:])
    return content


@pytest.mark.parametrize("suffix", ["", *PACKED_SUFFIXES])
@pytest.mark.parametrize("name", ["a.txt", "a.unknown", "README"])
def test_text_file_is_one_document(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / (name + suffix)
    path.write_bytes(pack("".join(TEXTS).encode(), suffix))
    assert read_documents(path) == ["".join(TEXTS)]


@pytest.mark.parametrize("suffix", ["", *PACKED_SUFFIXES])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "A.JSONL"])
def test_json_file_has_a_document_a_line(tmp_path: Path, name: str, suffix: str) -> None:
    lines = [json.dumps({"body": text, "id": 1}) for text in DOCUMENTS]
    path = tmp_path / (name + suffix)
    path.write_bytes(pack("\n\n".join(lines).encode(), suffix))
    assert read_documents(path, "body") == DOCUMENTS


@pytest.mark.parametrize(
    "kind", ["string", "large_string", "string_view", "dictionary", "large dictionary", "json"]
)
def test_parquet_file_has_a_document_a_row(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    column = pa.array(DOCUMENTS)
    if "dictionary" in kind:
        column = column.cast("large_string" if "large" in kind else "string").dictionary_encode()
    elif kind == "json":
        column = pa.ExtensionArray.from_storage(pa.json_(pa.string()), column)
    else:
        column = column.cast(kind)
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


def test_a_file_that_is_named_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    (tmp_path / "copy.txt").write_text("text")
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.txt").symlink_to(path)
    (tmp_path / "hard.txt").hardlink_to(path)
    monkeypatch.chdir(tmp_path / "sub")
    others = [path, "../a.txt", "../sub/../a.txt", "../link.txt", "../hard.txt", ".."]
    if importlib.util.find_spec("fsspec"):
        others += [f"file://{path}", f"file://{tmp_path}/a.*"]
    for other in others:
        with pytest.raises(DataError, match=r"E-DAT-010 .* is named twice"):
            find_files([path, other])
    assert len(find_files([path, "../copy.txt", "."])) == 2


def test_an_object_that_is_named_twice_is_refused() -> None:
    store = pytest.importorskip("fsspec").filesystem("memory")
    store.pipe("/twice/a.txt", b"text")
    store.pipe("/twice/b.txt", b"text")
    for other in ("memory://twice", "memory:///twice/a.txt", "memory://twice/*.txt"):
        with pytest.raises(DataError, match=r"memory:///twice/a\.txt is named twice"):
            find_files(["memory://twice/a.txt", other])


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


def tar_of(text: bytes) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        about = tarfile.TarInfo("book.txt")
        about.size = len(text)
        tar.addfile(about, io.BytesIO(text))
    return content.getvalue()


def zip_of(*names: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in names:
            archive.writestr(name, TEXT)
    return content.getvalue()


TEXT = b"The quick brown fox.\n" * 20
WIDE = {
    f"{name}{order}{' with a mark' * marked}": ("\ufeff" * marked + TEXT.decode()).encode(
        f"{name}-{order}"
    )
    for name in ("utf-16", "utf-32")
    for order in ("LE", "BE")
    for marked in (False, True)
}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123\n"
HTML = b"\n<!DOCTYPE html>\n<html><body>Sign in</body></html>\n"
NO_TEXT = [
    ("books.tar", tar_of(TEXT), "a tar archive"),
    ("books", tar_of(TEXT), "a tar archive"),
    ("books.tar.gz", gzip.compress(tar_of(TEXT), mtime=0), "a tar archive"),
    ("books.gz", gzip.compress(tar_of(TEXT), mtime=0), "a tar archive"),
    ("books.jsonl.gz", gzip.compress(tar_of(TEXT), mtime=0), "a tar archive"),
    ("books.xz", lzma.compress(tar_of(TEXT)), "a tar archive"),
    ("books.tgz", gzip.compress(tar_of(TEXT), mtime=0), "a tar archive"),
    ("books", gzip.compress(TEXT, mtime=0), "packed with gzip"),
    ("books.txt", zstandard.compress(TEXT), "packed with Zstandard"),
    ("books.txt", bz2.compress(TEXT), "packed with bzip2"),
    ("books.txt", lzma.compress(TEXT), "packed with xz"),
    ("books.txt.gz", gzip.compress(bz2.compress(TEXT), mtime=0), "packed with bzip2"),
    ("books.zip", zip_of("a.txt"), "an archive"),
    ("books", zip_of("a.txt"), "a zip archive"),
    ("letter.doc", zip_of("[Content_Types].xml", "word/document.xml"), "an Office document"),
    ("weights.pt", zip_of("archive/data.pkl"), "a file of torch"),
    ("arrays", zip_of("a.npy"), "an archive of NumPy"),
    ("a.7z", b"7z\xbc\xaf\x27\x1c", "an archive"),
    ("a", b"7z\xbc\xaf\x27\x1c\0\x04", "a 7z archive"),
    ("a", b"Rar!\x1a\x07\x01\0", "a RAR archive"),
    ("a", b"%PDF-1.7\n%\xe2\xe3", "a PDF document"),
    ("a.rtf", b"{\\rtf1\\ansi Hello}", "an RTF document"),
    ("a", b"\x89PNG\r\n\x1a\n", "a PNG image"),
    ("a", b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG image"),
    ("a", b"GIF89a\x01\0", "a GIF image"),
    ("a.db", b"SQLite format 3\0" + bytes(80), "an SQLite database"),
    ("a", b"\x93NUMPY\x01\0", "an array of NumPy"),
    ("a.pkl", b"(lp0\nS'text'\np1\na.", "pickled, which decod never reads"),
    ("a", b"\x80\x04\x95\x0c\0", "pickled, which decod never reads"),
    ("a", b'\x08\0\0\0\0\0\0\0{"a":1}', "a safetensors file"),
    ("rows", b"PAR1\x15\x04\0", "a Parquet file"),
    ("rows", b"ARROW1\0\0", "an Arrow file"),
    ("a", b"\x7fELF\x02\x01\x01\0", "a program"),
    ("a.txt", b"\0" * 50, "a binary file"),
    ("a.jsonl", b"\x01\0\x02\0\0\0", "a binary file"),
    ("a.txt", LFS, "a pointer of Git LFS"),
    ("a.jsonl", LFS, "a pointer of Git LFS"),
    ("a.parquet", LFS, "a pointer of Git LFS"),
    ("a.jsonl.gz", LFS, "a pointer of Git LFS"),
    ("a.txt.zst", LFS, "a pointer of Git LFS"),
    ("a.jsonl", HTML, "a page of HTML"),
    ("a.parquet", HTML, "a page of HTML"),
    ("a.jsonl.xz", HTML, "a page of HTML"),
    ("a.jsonl", b'<?xml version="1.0"?>\n<Error/>', "XML, maybe a server's message"),
    *(
        (f"a.{end}", content, name[:8].upper())
        for name, content in WIDE.items()
        for end in ("txt", "jsonl")
    ),
]


@pytest.mark.parametrize(("name", "content", "what"), NO_TEXT)
def test_what_is_no_text_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, what: str
) -> None:
    """Before work begins, and also when it is read, as files in a store are."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_documents(path)
    assert str(caught.value).startswith(f"E-DAT-011 {path} is {what}")
    assert str(caught.value).endswith(", or leave it out")
    with pytest.raises(DataError) as before:
        prepare(tmp_path / "out", [path], PrepareConfig())
    assert str(before.value) == str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.txt", HTML.decode()),
        ("corpus.pt", "um texto em português"),
        ("a.txt", "BMW builds cars, MZ motorcycles."),
        ("b.txt", "PAR1, ORC, GIF89a, RIFF, ID3: magic numbers"),
        ("README.zip.txt", "how to unpack the zip"),
        ("odd.", "PK is short for Phil Katz"),
    ],
)
def test_texts_that_resemble_other_files_are_read(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_documents(path) == [text]
    prepare(tmp_path / "out", [path], PrepareConfig())


def skipped_in(path: Path) -> tuple[list[str], list[tuple[str, int, str]]]:
    """Return the texts of a file, and the unit, number and reason of each record left out."""
    bad: list[tuple[str, int, str]] = []
    pieces = read_pieces(
        slice_of(path),
        text_field="text",
        on_bad=lambda each: bad.append((each.unit, each.number, each.reason)),
    )
    return [piece.text for piece in pieces], bad


def test_bad_lines_are_left_out_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LINE_SIZE_MAX_BYTES", 100)
    path = tmp_path / "a.jsonl.gz"
    long = b'{"text": "' + b"x" * 1000 + b'"}'
    lines = [b'{"text": "a"}', long, b"", b'{"text": "\xff"}', b'{"text": null}', b'{"text": "b"}']
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    texts, bad = skipped_in(path)
    assert texts == ["a", "b"]
    assert bad == [
        ("line", 2, "it is longer than 100 bytes"),
        ("line", 4, "byte 0xff cannot stand there (invalid start byte)"),
        ("line", 5, "'text' is no string but NoneType"),
    ]


def test_bad_rows_are_left_out_and_reported(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    column = pa.array([b"a", None, b"\xff", b"", b"b"] * 2)
    text = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
    pq.write_table(pa.table({"text": text}), path, row_group_size=5)
    [file] = find_files([path])
    bad: list[tuple[str, int]] = []
    for begin in (0, 1):
        part = Slice(file, 1, begin, begin + 1)
        pieces = read_pieces(
            part, text_field="text", on_bad=lambda each: bad.append((each.unit, each.number))
        )
        assert [piece.text for piece in pieces] == ["a", "b"]
    assert bad == [("row", 2), ("row", 3), ("row", 7), ("row", 8)]


@pytest.mark.parametrize(
    "content",
    [b"\xff", b"a\n\0", tar_of(b"x" * 5000), LFS, b"MZ\0", gzip.compress(b"text", mtime=0)],
)
def test_bad_files_of_text_are_left_out_as_a_whole(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    texts, [(unit, _, reason)] = skipped_in(path)
    assert (texts, unit) == ([], "file")
    assert reason.startswith(f"{path}")


@pytest.mark.parametrize("content", [HTML, LFS, WIDE["utf-16LE"], tar_of(b"{}\n")])
def test_a_file_that_should_have_records_and_has_none_is_never_skipped(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="E-DAT-011"):
        skipped_in(path)


def test_text_with_the_byte_0_far_behind_its_beginning_is_refused_with_the_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT * 1000 + b"more\nand\0more")
    with pytest.raises(DataError, match=r"E-DAT-011 .*a\.txt, line 20002 is no text: it holds the"):
        read_documents(path)


@pytest.mark.parametrize("suffix", ["", *PACKED_SUFFIXES])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_invalid_utf8_is_refused_with_its_line(tmp_path: Path, name: str, suffix: str) -> None:
    good = b'{"text": "x"}\n'
    path = tmp_path / (name + suffix)
    path.write_bytes(pack(good * 30_000 + b'{"text": "\xff"}\n' + good, suffix))
    with pytest.raises(DataError, match=r"E-DAT-011 .*, line 30001 is not UTF-8: byte 0xff"):
        read_documents(path)


def test_text_in_another_encoding_is_not_taken_for_an_image(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("BMW fährt".encode("latin-1"))
    with pytest.raises(DataError, match="line 1 is not UTF-8: byte 0xe4"):
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


@pytest.mark.parametrize("suffix", PACKED_SUFFIXES)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_truncated_archive_is_refused(tmp_path: Path, name: str, suffix: str) -> None:
    """Zstandard's own stream reader takes a truncated file for a complete one."""
    content = b"".join(b'{"text": "%x"}\n' % (i * 2654435761) for i in range(5000))
    packed = pack(content, suffix)
    path = tmp_path / (name + suffix)
    path.write_bytes(packed[: len(packed) - 100])
    with pytest.raises(DataError, match=r"E-DAT-011 .* cannot be unpacked: near line \d+"):
        read_documents(path)


@pytest.mark.parametrize("suffix", PACKED_SUFFIXES)
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
    zeros = b"0" * 2**24
    packed = b"".join(compressor.compress(zeros) for _ in range(32)) + compressor.flush()
    path.write_bytes(packed)
    assert len(packed) < 2**16
    pieces = read_pieces(slice_of(path), text_field="text")
    assert [len(next(pieces).text) for _ in range(3)] == [PIECE_SIZE_MAX_CHARS] * 3


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"title": ["x"]}, "no column 'text'; its columns: 'title'"),
        ({"text": [1]}, "holds int64, not strings"),
        ({"text": ["x", None]}, "row 2: 'text' is null"),
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
    with pytest.raises(DataError, match=re.escape(install_hint("parquet"))):
        read_documents(path)


def test_progress_adds_up_to_the_size_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(os.urandom(1000).hex().encode()))
    read: list[int] = []
    list(read_pieces(slice_of(path), text_field="text", on_read=read.append))
    assert sum(read) == path.stat().st_size
