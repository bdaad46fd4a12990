"""Streams that unpack a file while it is read, in bounded memory.

The readers of the standard library know no limit of memory for xz, and Zstandard's takes a
truncated file for a complete one.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol, cast

import zstandard
from typing_extensions import override

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
"""What the streams raise if their content is damaged."""

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
        self._packed, self._new_unpacker = packed, _UNPACKERS[suffix]
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
