"""Varints, the numbers of protobuf's wire format: seven bits a byte, the lowest first."""

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
