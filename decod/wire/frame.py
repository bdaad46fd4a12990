"""Data frames of `PushRequest` and `FetchResponse`, written and read without extra copies.

Both messages keep their bytes in field 2, so a frame without a header is a tag, a length and the
bytes. Writing frames by hand saves protobuf's copy of every megabyte, in both directions. The
result is still the protobuf message that tensor.proto and state.proto describe.
"""

from decod.errors import MalformedMessageError
from decod.wire import validate

_SIZE_MAX_BYTES = 10


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the number that begins at `position`, and the position after it.

    Raises:
        MalformedMessageError: No whole number begins there.
    """
    piece = data[position : position + _SIZE_MAX_BYTES]
    number = 0
    for index, byte in enumerate(piece):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, position + index + 1
    raise validate.malformed("a number", bytes(piece), allowed="whole")


def write_varint(number: int) -> bytes:
    """Return a number as a varint. `number` must not be negative."""
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


_HEAD_TAG = 0x0A  # Field 1, length-delimited.
_TAG = 0x12  # Field 2, length-delimited.


def data_frame(data: memoryview, *, head: bytes = b"") -> bytes:
    """Return a serialized message that has `data` in field 2.

    Args:
        data: The bytes. They are copied once.
        head: A serialized message with the other fields. By protobuf's rules, two concatenated
            messages are one message with the fields of both.
    """
    return b"".join((head, bytes([_TAG]), write_varint(len(data)), data))


def frame_data(frame: bytes | memoryview) -> memoryview:
    """Return a view of the bytes in a frame that `data_frame` made without a head.

    Raises:
        MalformedMessageError: The frame holds other fields, or no bytes at all.
    """
    if frame[:1] == bytes([_TAG]):
        size, position = read_varint(frame, 1)
        if size and position + size == len(frame):
            return memoryview(frame)[position:]
    raise _malformed(frame, "only the first message of a stream has a header")


def split_head(frame: bytes) -> tuple[bytes, memoryview]:
    """Return the header in the first message of a push, and a view of the data after it.

    The header is field 1 and comes first. Only data may follow.

    Raises:
        MalformedMessageError: The message has another layout.
    """
    if frame[:1] != bytes([_HEAD_TAG]):
        raise _malformed(frame, "the first message of a stream begins with a header")
    size, position = read_varint(frame, 1)
    end = position + size
    if end > len(frame):
        raise _malformed(frame, "its header is cut short")
    rest = memoryview(frame)[end:]
    return frame[position:end], frame_data(rest) if rest else rest


def _malformed(frame: bytes | memoryview, why: str) -> MalformedMessageError:
    return MalformedMessageError(
        f"a frame of {len(frame)} bytes does not hold what it should",
        why=why,
        fix="run the same version of decod on every node",
    )
