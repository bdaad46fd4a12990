"""Data frames of `PushRequest` and `FetchResponse`, written and read without extra copies.

Both messages keep their bytes in field 2, so a frame without header is a tag, a length and the
bytes. Doing this by hand spares protobuf's own copy of every megabyte, each way; the result is
still the protobuf message that tensor.proto and state.proto describe.
"""

from decod.errors import MalformedMessageError
from decod.wire.varint import read_varint, write_varint

_HEAD_TAG = 0x0A  # Field 1, length-delimited.
_TAG = 0x12  # Field 2, length-delimited.


def data_frame(data: memoryview, *, head: bytes = b"") -> bytes:
    """Returns a serialized message that has `data` in field 2. Copies once.

    Args:
        head: A serialized message with the other fields. Two serialized messages in a row are, by
            protobuf's rules, one with all their fields.
    """
    return b"".join((head, bytes([_TAG]), write_varint(len(data)), data))


def frame_data(frame: bytes | memoryview) -> memoryview:
    """Returns the bytes in a frame made by `data_frame` without head, as a view of it.

    Raises:
        MalformedMessageError: The frame holds anything else, or no bytes at all.
    """
    if frame[:1] == bytes([_TAG]):
        size, position = read_varint(frame, 1)
        if size and position + size == len(frame):
            return memoryview(frame)[position:]
    raise _malformed(frame, "only the first message of a stream has a header")


def split_head(frame: bytes) -> tuple[bytes, memoryview]:
    """Returns the header in the first message of a push, and a view of the data behind it.

    The header, field 1, comes first; data may follow, and nothing else.

    Raises:
        MalformedMessageError: The message is laid out in any other way.
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
