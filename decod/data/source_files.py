"""Files of text on disks and in object stores: how they are found, told apart, opened and unpacked.

Kinds of files that are no text are told by their names or by their first bytes. Nothing in a file
is run. Some magic numbers are letters, so a text may begin with them. They count only if there is
the byte 0, too.

Files are unpacked while they are read, in bounded memory. The readers of the standard library know
no limit of memory for xz, and Zstandard's takes a truncated file for a complete one.
"""

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import zstandard
from typing_extensions import override

from decod.errors import DataError
from decod.files import is_page, pointer_of
from decod.objects import StoreError, file_system, is_url, open_object, shown, translated
from decod.paths import absolute_path

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
    """The name of the kind, as in `it is a tar archive`."""
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


ZSTD_WINDOW_MAX_BYTES = 2**27
"""The window that `zstd --long` and `--ultra` need. A frame with a larger one is refused."""
XZ_MEMORY_MAX_BYTES = 2**28
"""Four times what `xz -9` needs. A stream that needs more is refused."""

UNPACKING_ERRORS = (
    gzip.BadGzipFile,
    EOFError,
    zlib.error,
    zstandard.ZstdError,
    lzma.LZMAError,
)
"""Errors that the streams raise if their content is damaged."""

# Zstandard packs at most 128 KiB into 4 bytes, so one read makes at most 64 MiB. bzip2 and xz
# make less.
_READ_SIZE_BYTES = 2048
_BLOCK_SIZE_BYTES = 2**18


class _Unpacker(Protocol):
    """What unpacks one stream of a file, which may hold several, one after the other."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


_UNPACKERS: dict[str, Callable[[], _Unpacker]] = {
    ".zst": lambda: zstandard.ZstdDecompressor(
        max_window_size=ZSTD_WINDOW_MAX_BYTES
    ).decompressobj(),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_MAX_BYTES),
}
PACKED_SUFFIXES = (".gz", *_UNPACKERS)
"""Ends of the names of packed files that can be read."""


def packed_suffix(name: str) -> str:
    """Return the end of a file's name that says how it is packed; empty if it is not."""
    return next((suffix for suffix in PACKED_SUFFIXES if name.lower().endswith(suffix)), "")


def unpacked(packed: BinaryIO, suffix: str) -> BinaryIO:
    """Return a stream of what a file holds.

    Args:
        packed: The file.
        suffix: How it is packed, as `packed_suffix` tells it.
    """
    if suffix == ".gz":
        return cast("BinaryIO", gzip.GzipFile(fileobj=packed))
    if suffix:
        return io.BufferedReader(_UnpackingStream(packed, suffix), _BLOCK_SIZE_BYTES)
    return packed


class CountingStream(io.RawIOBase):
    """Passes reads on, and reports their size."""

    def __init__(self, file: BinaryIO, on_read: Callable[[int], None]) -> None:
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


class _UnpackingStream(io.RawIOBase):
    """Unpacks streams one after the other. Raises `EOFError` if the last is cut off."""

    def __init__(self, packed: BinaryIO, suffix: str) -> None:
        self._packed = packed
        self._new_unpacker = _UNPACKERS[suffix]
        self._may_be_padded = suffix == ".xz"
        self._unpacker: _Unpacker | None = None
        self._num_streams = 0
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
            block = self._next_block()
            if not block:
                return 0
            if self._unpacker is None:
                self._unpacker = self._new_unpacker()
                self._num_streams += 1
            try:
                self._ready = memoryview(self._unpacker.decompress(block))
            except OSError as error:  # bzip2's, which has no class of its own.
                raise EOFError(str(error)) from error
            if self._unpacker.eof:
                self._rest = self._unpacker.unused_data
                self._unpacker = None
        num_bytes = min(len(buffer), len(self._ready))
        buffer[:num_bytes] = self._ready[:num_bytes]
        self._ready = self._ready[num_bytes:]
        return num_bytes

    def _next_block(self) -> bytes:
        """Return the next packed bytes, none at the file's end."""
        while block := self._rest or self._packed.read(_READ_SIZE_BYTES):
            self._rest = b""
            if self._unpacker is None and self._may_be_padded and self._num_streams:
                block = block.lstrip(b"\0")
            if block:
                return block
        if self._unpacker is not None:
            raise EOFError("the file ends within a packed stream")
        return b""


# What object stores call the version of an object, or the time of its last change.
_VERSION_FIELDS = (
    "ETag",
    "etag",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when it was listed."""

    name: str
    """Absolute path, or URL."""
    size_bytes: int
    """0 if the store doesn't tell."""
    version: str
    """Another string after every change of the file. May be empty if the store doesn't tell."""

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Lend the file for reading and seeking, without a buffer.

        Raises:
            DataError: It can't be opened, or has changed since it was listed.
        """
        if is_url(self.name):
            with _translated(self.name):
                stream = open_object(self.name)
            with stream:
                yield stream
            return
        with open(self.name, "rb", buffering=0) as file:
            if _described(self.name, os.fstat(file.fileno())) != self:
                raise DataError(
                    f"{self.name} has changed since the command began",
                    why="the corpus would mix text of two versions",
                    fix="run the same command again, while nobody writes to the file",
                    code="E-DAT-010",
                )
            yield file


def find_files(names: Sequence[str | Path]) -> list[SourceFile]:
    """Return the files to read, in the given order. A folder becomes its files, sorted.

    Inside folders, names that start with a dot are left out.

    Args:
        names: Paths and URLs of files and folders. In a URL, `*` stands for any part of a name.

    Raises:
        DataError: A file is missing, unreadable, neither a file nor a folder, or named twice.
    """
    files: list[SourceFile] = []
    for name in [os.fspath(name) for name in names]:
        if is_url(name):
            files.extend(_find_objects(name))
            continue
        try:
            files.extend(_walk(Path(os.path.normpath(absolute_path(Path(name))))))
        except OSError as error:
            raise unreadable(name, error.strerror or str(error)) from error
    _require_once(files)
    return files


def unreadable(name: str | Path, reason: str) -> DataError:
    """Return the error for a file that can't be found or read."""
    return DataError(
        f"{name} cannot be read",
        why=reason,
        fix="give files or folders that exist and that you may read",
        code="E-DAT-010",
    )


def _require_once(files: Sequence[SourceFile]) -> None:
    """Refuse files that are named twice, also by another path, a link, or a URL."""
    seen: dict[object, SourceFile] = {}
    for file in files:
        first = seen.setdefault(_identity(file), file)
        if first is not file:
            other = f", also as {shown(first.name)}" if first.name != file.name else ""
            raise DataError(
                f"{shown(file.name)} is named twice{other}",
                why="a run would train on its text twice as often as on the other text",
                fix="name each file once, and no folder that holds a file named already; copy the "
                "file if you want its text twice",
                code="E-DAT-010",
            )


def _identity(file: SourceFile) -> object:
    """Return what all names of a file have in common."""
    scheme, _, path = file.name.rpartition("://")
    if scheme not in ("", "file", "local"):
        return file.name
    try:
        status = os.stat(path if scheme else file.name)
    except OSError:
        return file.name
    # Some network file systems give the same number to several files.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _walk(path: Path) -> Iterator[SourceFile]:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        for child in sorted(path.iterdir(), key=lambda child: child.name):
            if not child.name.startswith("."):
                # A link to a folder may lead back up, and the walk would never end.
                if child.is_symlink() and child.is_dir():
                    raise unreadable(child, "it is a link to a folder")
                yield from _walk(child)
    elif stat.S_ISREG(status.st_mode):
        yield _described(str(path), status)
    else:
        raise unreadable(path, "it is neither a file nor a folder")


def _described(path: str, status: os.stat_result) -> SourceFile:
    return SourceFile(path, status.st_size, f"{status.st_mtime_ns}")


def _find_objects(url: str) -> list[SourceFile]:
    with _translated(url):
        where, root = file_system(url)
        found: dict[str, dict[str, Any]] = {}
        for path, about in _matches(where, root).items():
            if about["type"] == "file":
                found[path] = about
            else:
                inside = where.find(path, detail=True)
                found |= {file: inside[file] for file in inside if not _hidden(file, path)}
    if not found:
        raise unreadable(url, "there is no such file, and no folder with files")
    # By parts, as `_walk` sorts folder by folder.
    return [
        SourceFile(
            where.unstrip_protocol(path),
            found[path].get("size") or 0,
            " ".join(
                str(found[path][field]) for field in _VERSION_FIELDS if found[path].get(field)
            ),
        )
        for path in sorted(found, key=lambda path: path.split("/"))
    ]


def _matches(where: Any, root: str) -> dict[str, dict[str, Any]]:
    """Return what a store tells of files and folders that a name with `*` may stand for."""
    if where.isfile(root):
        return {root: where.info(root)}
    if "*" not in root:
        return {root: {"type": "directory"}}
    # For paths, a shell does this. It also leaves out hidden names.
    found = where.glob(root, detail=True)
    base = root.partition("*")[0].rpartition("/")[0]
    return {path: found[path] for path in found if not _hidden(path, base)}


def _hidden(path: str, root: str) -> bool:
    return any(part.startswith(".") for part in path.removeprefix(root).split("/"))


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        with translated(url):
            yield
    except StoreError as error:
        raise unreadable(url, error.why) from error
