"""Data frames of `PushRequest` and `FetchResponse`, written and read without extra copies.

Both messages keep their bytes in field 2, so a frame without header is a tag, a length and the
bytes. Doing this by hand spares protobuf's own copy of every megabyte, each way; the result is
still the protobuf message that tensor.proto and state.proto describe.
"""

from decod.errors import MalformedMessageError

_HEAD_TAG = 0x0A  # Field 1, length-delimited.
_TAG = 0x12  # Field 2, length-delimited.
_VARINT_SIZE_MAX = 5


def data_frame(data: memoryview, *, head: bytes = b"") -> bytes:
    """Returns a serialized message that has `data` in field 2. Copies once.

    Args:
        head: A serialized message with the other fields. Two serialized messages in a row are, by
            protobuf's rules, one with all their fields.
    """
    prefix = bytearray([_TAG])
    rest = len(data)
    while rest >= 0x80:
        prefix.append(rest & 0x7F | 0x80)
        rest >>= 7
    prefix.append(rest)
    return b"".join((head, prefix, data))


def frame_data(frame: bytes | memoryview) -> memoryview:
    """Returns the bytes in a frame made by `data_frame` without head, as a view of it.

    Raises:
        MalformedMessageError: The frame holds anything else, or no bytes at all.
    """
    size, position = _varint(frame, 1)
    if frame[:1] != bytes([_TAG]) or size == 0 or position + size != len(frame):
        raise MalformedMessageError(
            f"a frame of {len(frame)} bytes holds more or less than data",
            why="only the first message of a stream has a header",
            fix="run the same version of decod on every node",
        )
    return memoryview(frame)[position:]


def split_head(frame: bytes) -> tuple[bytes, memoryview]:
    """Returns the header's part of a message that `data_frame` made, and a view of the data.

    A message that is laid out in any other way comes back whole, with no data apart: protobuf then
    reads all of it.
    """
    size, position = _varint(frame, 1)
    end = position + size
    if frame[:1] == bytes([_HEAD_TAG]) and end < len(frame):
        try:
            return frame[:end], frame_data(memoryview(frame)[end:])
        except MalformedMessageError:
            pass
    return frame, memoryview(b"")


def _varint(frame: bytes | memoryview, position: int) -> tuple[int, int]:
    """Returns the number that begins at `position`, and where it ends; 0 where there is none."""
    number = 0
    for shift in range(0, 7 * _VARINT_SIZE_MAX, 7):
        byte = frame[position] if position < len(frame) else 0
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return number, position
