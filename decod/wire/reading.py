"""Reading of a peer's bytes into checked messages.

Each message passes three steps, the cheapest first: `scan` counts its entries, protobuf parses it,
and a reader checks every field (`carriers`). The bytes of a batch are split without parsing, so
that a receiver can pause between two messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from decod.ids import NodeId
from decod.wire import codec, validate
from decod.wire.message_schema import BODIES
from decod.wire.scan import scan, shape_of
from decod.wire.v1 import control_pb2, tensor_pb2
from decod.wire.varint import read_varint

_ENVELOPE_TAG = 0x0A
"""Field 1 of DeliverRequest, length-delimited."""

ENVELOPE = shape_of(control_pb2.Envelope.DESCRIPTOR, {}, BODIES)
_HEADER = shape_of(tensor_pb2.TensorHeader.DESCRIPTOR, {}, {"envelope": ENVELOPE})


@dataclass(frozen=True, slots=True)
class Header:
    """The description of the tensor that follows."""

    decoded: codec.Decoded
    size_bytes: int
    """The size that the peer gives. Not checked."""
    crc32: int


def envelopes_of(batch: bytes, num_max: int) -> list[bytes]:
    """Return the serialized envelopes of a serialized DeliverRequest.

    Raises:
        MalformedMessageError: There are more than `num_max`, or the bytes are no DeliverRequest.
    """
    return list(_cut(batch, num_max))


def _cut(batch: bytes, num_max: int) -> Iterator[bytes]:
    position = num = 0
    while position < len(batch):
        if batch[position] != _ENVELOPE_TAG:
            raise validate.malformed("tag", batch[position], allowed="that of an envelope")
        size, begin = read_varint(batch, position + 1)
        position = begin + size
        num = num + 1
        if position > len(batch):
            raise validate.malformed("envelope", "cut short", allowed="whole")
        if num > num_max:
            raise validate.malformed("envelopes", f"{num} or more", allowed=f"at most {num_max}")
        yield batch[begin:position]


def read_envelope(data: bytes, *, receiver: NodeId = codec.NOBODY) -> codec.Decoded:
    """Read a serialized envelope that came to `receiver`.

    Raises:
        MalformedMessageError: No node of this version sends this envelope.
    """
    scan(ENVELOPE, data)
    return codec.decode(codec.parse(control_pb2.Envelope, data), receiver=receiver)


def read_header(data: bytes, *, receiver: NodeId = codec.NOBODY) -> Header:
    """Read a serialized TensorHeader that came to `receiver`.

    Raises:
        MalformedMessageError: No node of this version sends this header.
    """
    scan(_HEADER, data)
    header = codec.parse(tensor_pb2.TensorHeader, data)
    decoded = codec.decode(header.envelope, receiver=receiver)
    crc32 = validate.integer(0, 2**32 - 1)("crc32", header.crc32)
    return Header(decoded, header.size_bytes, crc32)
