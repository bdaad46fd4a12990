"""Data frames of `PushRequest` and `FetchResponse`, written and read without extra copies.

Both messages keep their bytes in field 2, so a frame without header is a tag, a length and the
bytes. Doing this by hand spares protobuf's own copy of every megabyte, each way; the result is
still the protobuf message that tensor.proto and state.proto describe.
"""

from decod.errors import MalformedMessageError

_TAG = 0x12  # Field 2, length-delimited.
_VARINT_SIZE_MAX = 5


def data_frame(data: memoryview) -> bytes:
    """Returns a serialized message that has `data` in field 2 and nothing else. Copies once."""
    prefix = bytearray([_TAG])
    rest = len(data)
    while rest >= 0x80:
        prefix.append(rest & 0x7F | 0x80)
        rest >>= 7
    prefix.append(rest)
    return b"".join((prefix, data))


def frame_data(frame: bytes) -> memoryview:
    """Returns the bytes in a frame made by `data_frame`, as a view of it.

    Raises:
        MalformedMessageError: The frame holds anything else, or no bytes at all.
    """
    size, position = 0, 1
    for shift in range(0, 7 * _VARINT_SIZE_MAX, 7):
        byte = frame[position] if position < len(frame) else 0
        position += 1
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    if frame[:1] != bytes([_TAG]) or size == 0 or position + size != len(frame):
        raise MalformedMessageError(
            f"a frame of {len(frame)} bytes holds more or less than data",
            why="only the first message of a stream has a header",
            fix="run the same version of decod on every node",
        )
    return memoryview(frame)[position:]
