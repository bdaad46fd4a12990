"""Kinds of files that are no text, told by their names or by their first bytes.

Nothing in a file is opened or run. Some magic numbers are letters, so a text may begin with them.
They count only if there is the byte 0, too.
"""

import re
from dataclasses import dataclass

from decod.files import is_page, pointer_of

BEGINNING_SIZE_BYTES = 4096
"""Enough to tell."""

_UNPACK = "unpack it, and name the folder with its files"
_CONVERT = "convert it to text, JSON lines or Parquet"
_EXPORT = "write its text as JSON lines or Parquet"
_LFS = "run `git lfs pull` in its folder, or download the file itself"
_AGAIN = "look into it with a text editor to see what the server said, and download it again"


@dataclass(frozen=True, slots=True)
class ForeignKind:
    """What a file is instead of text."""

    what: str
    """As in `it is a tar archive`."""
    fix: str


BINARY = ForeignKind("a binary file", _CONVERT)


def _renamed(what: str, suffix: str) -> ForeignKind:
    return ForeignKind(what, f"rename it, so that its name ends in {suffix}")


_CERTAIN: tuple[tuple[bytes, ForeignKind], ...] = (
    (b"/annex/objects/", ForeignKind("a pointer of git-annex", "run `git annex get` on it")),
    (b"\x1f\x8b", _renamed("packed with gzip", ".gz")),
    (b"\x28\xb5\x2f\xfd", _renamed("packed with Zstandard", ".zst")),
    (b"\xfd7zXZ\0", _renamed("packed with xz", ".xz")),
    (b"\x04\x22\x4d\x18", ForeignKind("packed with LZ4", "unpack it")),
    (b"\x1f\x9d", ForeignKind("packed with compress", "unpack it")),
    (b"PK\x05\x06", ForeignKind("an empty zip archive", "pack it again")),
    (b"Rar!\x1a\x07", ForeignKind("a RAR archive", _UNPACK)),
    (b"7z\xbc\xaf\x27\x1c", ForeignKind("a 7z archive", _UNPACK)),
    (b"!<arch>\n", ForeignKind("an ar archive", _UNPACK)),
    (b"%PDF-", ForeignKind("a PDF document", _CONVERT)),
    (b"{\\rtf", ForeignKind("an RTF document", _CONVERT)),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", ForeignKind("an Office document", _CONVERT)),
    (b"\x89PNG", ForeignKind("a PNG image", _CONVERT)),
    (b"\xff\xd8\xff", ForeignKind("a JPEG image", _CONVERT)),
    (b"SQLite format 3\0", ForeignKind("an SQLite database", _EXPORT)),
    (b"\x93NUMPY", ForeignKind("an array of NumPy", _EXPORT)),
    (b"\x89HDF", ForeignKind("an HDF5 file", _EXPORT)),
    (b"ARROW1\0", ForeignKind("an Arrow file", _EXPORT)),
    (b"\xff\xff\xff\xff", ForeignKind("an Arrow stream", _EXPORT)),
    (b"Obj\x01", ForeignKind("an Avro file", _EXPORT)),
    (b"\x7fELF", ForeignKind("a program", _CONVERT)),
)

_IF_BINARY: tuple[tuple[int, bytes, ForeignKind], ...] = (
    (257, b"ustar", ForeignKind("a tar archive", _UNPACK)),
    (0, b"07070", ForeignKind("a cpio archive", _UNPACK)),
    (0, b"LZIP", ForeignKind("packed with lzip", "unpack it")),
    (0, b"PAR1", _renamed("a Parquet file", ".parquet")),
    (0, b"ORC", ForeignKind("an ORC file", _EXPORT)),
    (0, b"GGUF", ForeignKind("a model in the format GGUF", _EXPORT)),
    (0, b"GIF8", ForeignKind("a GIF image", _CONVERT)),
    (0, b"II*\0", ForeignKind("a TIFF image", _CONVERT)),
    (0, b"MM\0*", ForeignKind("a TIFF image", _CONVERT)),
    (0, b"BM", ForeignKind("a BMP image", _CONVERT)),
    (0, b"RIFF", ForeignKind("a RIFF file, such as WebP or WAV", _CONVERT)),
    (0, b"ID3", ForeignKind("an MP3 file", _CONVERT)),
    (0, b"OggS", ForeignKind("an Ogg file", _CONVERT)),
    (0, b"fLaC", ForeignKind("a FLAC file", _CONVERT)),
    (4, b"ftyp", ForeignKind("an MP4 file", _CONVERT)),
    (0, b"MZ", ForeignKind("a program", _CONVERT)),
    (8, b'{"', ForeignKind("a safetensors file", _EXPORT)),
)

# The first that occurs in a zip archive says what made it.
_ZIPS = (
    (b"[Content_Types].xml", ForeignKind("an Office document", _CONVERT)),
    (b"application/epub+zip", ForeignKind("an EPUB book", _CONVERT)),
    (b"application/vnd.oasis", ForeignKind("an OpenDocument file", _CONVERT)),
    (b"data.pkl", ForeignKind("a file of torch", _EXPORT)),
    (b".npy", ForeignKind("an archive of NumPy", _EXPORT)),
)

# Only names that no text has: `.pt`, `.ar` and `.so` are languages, too.
_BY_NAME: dict[str, ForeignKind] = {
    suffix: ForeignKind(what, fix)
    for what, fix, suffixes in (
        ("a tar archive", _UNPACK, "tar tgz tbz tbz2 txz tzst"),
        ("an archive", _UNPACK, "zip 7z rar jar whl"),
        ("packed with a program that decod does not know", "unpack it", "lz4 lzma lzo z"),
        ("a document with layout", _CONVERT, "pdf docx xlsx pptx odt epub mobi"),
        ("an image", _CONVERT, "png jpg jpeg gif webp tif tiff bmp heic"),
        ("sound or video", _CONVERT, "mp3 mp4 m4a ogg flac wav mkv webm avi mov"),
        ("an array of NumPy", _EXPORT, "npy npz"),
        ("pickled, which decod never reads", _EXPORT, "pkl pickle pth"),
        ("a model", _EXPORT, "safetensors gguf onnx"),
        ("a database or table", _EXPORT, "sqlite sqlite3 h5 hdf5 arrow feather orc avro tfrecord"),
    )
    for suffix in suffixes.split()
}

_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32LE"),
    (b"\0\0\xfe\xff", "UTF-32BE"),
    (b"\xff\xfe", "UTF-16LE"),
    (b"\xfe\xff", "UTF-16BE"),
)


def kind_by_name(name: str) -> ForeignKind | None:
    """Return what a file of this name is, if that is no text."""
    _, dot, suffix = name.lower().rpartition("/")[2].rpartition(".")
    return _BY_NAME.get(suffix) if dot else None


def kind_by_beginning(beginning: bytes, *, has_records: bool) -> ForeignKind | None:
    """Return what a file is that begins with some bytes, if that is no text.

    Args:
        beginning: The first bytes of the file, unpacked.
        has_records: Whether it should have lines of JSON or be Parquet, and so no text of its own.
    """
    if (program := pointer_of(beginning)) is not None:
        return ForeignKind(f"a pointer of {program}", _LFS)
    for magic, kind in _CERTAIN:
        if beginning.startswith(magic):
            return kind
    if beginning.startswith(b"PK\x03\x04"):
        found = (kind for mark, kind in _ZIPS if mark in beginning)
        return next(found, ForeignKind("a zip archive", _UNPACK))
    if re.match(rb"\x80[\x02-\x05]", beginning):
        return ForeignKind("pickled, which decod never reads", _EXPORT)
    if re.match(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", beginning):
        return _renamed("packed with bzip2", ".bz2")
    if not _is_text(beginning):
        return _kind_of_binary(beginning)
    if has_records and is_page(beginning):
        return ForeignKind("a page of HTML", _AGAIN)
    if has_records and beginning.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<"):
        return ForeignKind("XML, maybe a server's message about an error", _AGAIN)
    return None


def _is_text(beginning: bytes) -> bool:
    """Return whether there is nothing that UTF-8 text does not have, except for a cut-off end."""
    try:
        beginning.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(beginning) - 3:
            return False
    return b"\0" not in beginning


def _kind_of_binary(beginning: bytes) -> ForeignKind | None:
    for mark, encoding in _MARKS:
        if beginning.startswith(mark):
            return _encoded(encoding)
    if b"\0" not in beginning:
        return None  # Maybe text in an encoding of one byte a character.
    for offset, magic, kind in _IF_BINARY:
        if beginning.startswith(magic, offset):
            return kind
    encoding = _wide_encoding(beginning)
    return _encoded(encoding) if encoding else BINARY


def _encoded(encoding: str) -> ForeignKind:
    return ForeignKind(
        f"{encoding} and not UTF-8", f"convert it: iconv -f {encoding} -t UTF-8 FILE > NEW"
    )


def _wide_encoding(content: bytes) -> str:
    """Return the encoding of two or four bytes a character that text with NULs has, or nothing.

    A part of the characters must be of the first 256, as spaces and line ends are.
    """
    for width, name in ((4, "UTF-32"), (2, "UTF-16")):
        usable = content[: len(content) // width * width]
        for order in ("LE", "BE"):
            try:
                text = usable.decode(f"{name}-{order}", "strict" if width == 4 else "ignore")
            except UnicodeDecodeError:
                continue
            plain = sum(character in "\t\n\r" or " " <= character <= "\xff" for character in text)
            if text and "\0" not in text and plain * 50 >= len(text):
                return name + order
    return ""
