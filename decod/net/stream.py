"""Bytes on their way: frames of streams, and tensors that fill their memory."""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from isal import isal_zlib

from decod.clocks import Stopwatch
from decod.errors import MalformedMessageError
from decod.net.door import Context
from decod.net.net_limits import Limits
from decod.wire.scan import read_varint, write_varint

# --- frames --------------------------------------------------------------------------------------
# Data frames of `FetchResponse` and of streams like it, written and read without extra copies.
#
# They keep their bytes in field 2, so a frame is a tag, a length and the bytes. Writing frames by
# hand saves protobuf's copy of every megabyte, in both directions. The result is still the protobuf
# message that state.proto describes.

_TAG = 0x12  # Field 2, length-delimited.


def data_frame(data: memoryview) -> bytes:
    """Return a serialized message that has `data` in field 2. The bytes are copied once."""
    return b"".join((bytes([_TAG]), write_varint(len(data)), data))


def frame_data(frame: bytes | memoryview) -> memoryview:
    """Return a view of the bytes in a frame that `data_frame` made.

    Raises:
        MalformedMessageError: The frame holds other fields, or no bytes at all.
    """
    if frame[:1] == bytes([_TAG]):
        size, position = read_varint(frame, 1)
        if size and position + size == len(frame):
            return memoryview(frame)[position:]
    raise MalformedMessageError(
        f"a frame of {len(frame)} bytes does not hold what it should",
        why="it holds one field with bytes, and nothing else",
        fix="run the same version of decod on every node",
    )


async def next_message(context: Context) -> bytes | None:
    """Return the next message of a client's stream, or None at its end."""
    message: object = await context.read()
    return message if isinstance(message, bytes) else None


# --- whole tensors --------------------------------------------------------------------------------

# The checksum of a tensor up to this size takes a few milliseconds. A thread would cost more.
_INLINE_CHECKSUM_MAX_BYTES = 32 * 1024 * 1024


async def crc32_of(data: memoryview, watch: Stopwatch) -> int:
    """Return zlib's CRC-32. Very large tensors are read in a thread, not on the loop."""
    if len(data) <= _INLINE_CHECKSUM_MAX_BYTES:
        with watch.measure("serialize"):
            return isal_zlib.crc32(data)
    return await asyncio.to_thread(isal_zlib.crc32, data)


def frames_of(data: memoryview, frame_size_bytes: int, watch: Stopwatch) -> Iterator[bytes]:
    """Yield `data` as serialized frames. Each frame is copied only when it is asked for."""
    for start in range(0, len(data), frame_size_bytes):
        with watch.measure("copy"):
            frame = data_frame(data[start : start + frame_size_bytes])
        yield frame


class IncomingRegion(Protocol):
    """Memory for a tensor that arrives. It has one owner, the last of which calls `release`."""

    @property
    def view(self) -> memoryview:
        """The bytes."""

    def release(self) -> None:
        """Give the memory back. What is in it is undefined then."""


class IncomingTensor:
    """A tensor whose region is filled in order, and checked.

    Args:
        region: Its memory.
        size_bytes: Of the tensor, and of the region, from the header.
        crc32: CRC-32 of the whole tensor, from the header.
        watch: Measures copies and checksums; None to measure nothing.
    """

    def __init__(
        self,
        region: IncomingRegion,
        *,
        size_bytes: int,
        crc32: int,
        watch: Stopwatch | None = None,
    ) -> None:
        self.region = region
        self.size_bytes = size_bytes
        self._view = region.view
        assert len(self._view) == size_bytes, f"{len(self._view)} != {size_bytes}"
        self._watch = watch or Stopwatch()
        self._crc32 = crc32
        self._computed = 0
        self._position = 0

    @property
    def position(self) -> int:
        """Bytes that have arrived."""
        return self._position

    @property
    def intact(self) -> bool:
        """Return whether the checksum is right. Valid only once everything has arrived."""
        return self._computed == self._crc32

    def begin_again(self) -> None:
        """Forget what has arrived: all of it comes again."""
        self._position = self._computed = 0

    def arrived(self, num_bytes: int) -> None:
        """The next bytes are in their place."""
        end = self._position + num_bytes
        with self._watch.measure("serialize"):
            data = self._view[self._position : end]
            self._computed = isal_zlib.crc32(data, self._computed)
        self._position = end


# --- broken streams ------------------------------------------------------------------------------
# Tensors whose stream broke off. They are kept a while, since their senders go on with them.


class BrokenTensors:
    """The tensors that wait for their senders. It owns the memory of each.

    Args:
        limits: How many are kept, and how long.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: dict[bytes, tuple[IncomingTensor, asyncio.TimerHandle]] = {}

    def keep(self, header: bytes, tensor: IncomingTensor) -> None:
        """Keep a tensor. If there are too many, the one that was kept first makes room.

        Args:
            header: Bytes of the header, which a sender repeats. They name the sender and the
                message, and hold the checksum.
            tensor: What has arrived.
        """
        self._drop(header)
        while len(self._kept) >= self._limits.broken_max:
            self._drop(next(iter(self._kept)))
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._limits.broken_kept_s, self._drop, header)
        self._kept[header] = (tensor, timer)

    def take(self, header: bytes) -> IncomingTensor | None:
        """Return what has arrived of a tensor that a sender goes on with, and forget it."""
        tensor, timer = self._kept.pop(header, (None, None))
        if timer is not None:
            timer.cancel()
        return tensor

    def _drop(self, header: bytes) -> None:
        tensor = self.take(header)
        if tensor is not None:
            tensor.region.release()

    def close(self) -> None:
        """Give all memory back."""
        for header in list(self._kept):
            self._drop(header)
