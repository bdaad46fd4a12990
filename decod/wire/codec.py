"""Encoding of the core's messages as envelopes, and decoding. The only user of control.proto.

`message_schema` knows the messages, `carriers` writes and reads each.

**Reading.** Each message passes three steps, the cheapest first: `scan` counts its entries,
protobuf parses it, and a reader checks every field (`carriers`). The bytes of a batch are split
without parsing, so that a receiver can pause between two messages.

**Size.** A control message has at most 4 MiB. The limits of single fields may allow a larger one,
or more than `ENTRIES_MAX`. It is encoded, but the transport refuses to send it. A claim has room
for a run whose view fits in a message, `Claims` for some 250000 costs of links, `Routes` for 70000
relays.

**Values that are passed on.** A node tells one peer what it heard from another: hops, paths, costs.
The same quantity has the same limits in all messages, so every accepted value can be sent on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Proto

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.limits import SEAL_SIZE_MAX_BYTES
from decod.protocol.core import messages as m
from decod.protocol.core.messages.scopes import Way
from decod.wire import validate
from decod.wire.carriers import Carrier, carrier_of
from decod.wire.message_schema import BODIES
from decod.wire.scan import read_varint, scan, shape_of
from decod.wire.v1 import control_pb2, tensor_pb2
from decod.wire.v1 import control_pb2 as pb

P = TypeVar("P", bound=Proto)

NOBODY = NodeId("")


def _carriers() -> Mapping[str, Carrier]:
    fields = pb.Envelope.DESCRIPTOR.fields_by_name
    known = dict[type, Carrier]()
    return {
        name: carrier_of(struct, fields[name].message_type, known)
        for name, struct in BODIES.items()
    }


_CARRIERS = _carriers()
_BODY_NAMES: Mapping[type[Any], str] = {struct.cls: name for name, struct in BODIES.items()}


@dataclass(frozen=True, slots=True)
class Decoded:
    """A peer's message with every field checked. The core decides whether it is legal now."""

    run_id: RunId
    sender: NodeId
    term: int
    sequence: int
    message: m.Message
    way: Way | None = None
    """Set if the sender has passed the message on for another node, or if the receiver is to do
    so."""


def encode(
    run_id: RunId,
    sender: NodeId,
    term: int,
    sequence: int,
    message: m.Message,
    way: Way | None = None,
) -> pb.Envelope:
    """Return the envelope of this node's own message, or of a message that it passes on.

    Reasons are cut to one printable line of 200 characters. A whole view takes about 90 bytes a
    member, and 54 bytes an elector if the electors differ from the members. So an opening with one
    reaches the limit of 4 MiB a message at some 29000 members. A message with a `way` carries the
    way's term.

    Raises:
        AssertionError: A peer would not accept a field, which is a bug of this node.
    """
    name = _BODY_NAMES[type(message)]
    envelope = pb.Envelope(run_id=run_id, sender_id=sender, term=term, sequence=sequence)
    if way is not None:
        envelope.term = way.term
        envelope.ticket = way.ticket
        envelope.proof = way.proof
        if way.origin == sender:
            envelope.goal_id = way.goal
        else:
            envelope.origin_id = way.origin
    try:
        _fill(envelope, name, message)
    except MalformedMessageError as error:
        raise AssertionError(f"outgoing {name}: {error.what}, but {error.why}") from error
    return envelope


def content_of(message: m.Message) -> bytes:
    """Return the bytes that stand for a message wherever it comes from: equal for equal ones."""
    envelope = pb.Envelope()
    name = _BODY_NAMES[type(message)]
    _fill(envelope, name, message)
    return envelope.SerializeToString(deterministic=True)


def _fill(envelope: pb.Envelope, name: str, message: m.Message) -> None:
    body = getattr(envelope, name)
    body.SetInParent()
    _CARRIERS[name].write(body, message)


def decode(envelope: pb.Envelope, *, receiver: NodeId = NOBODY) -> Decoded:
    """Check an envelope and return its message.

    Args:
        envelope: The envelope as it came.
        receiver: This node. It is the goal of a message that another node has passed on.

    Raises:
        MalformedMessageError: A field is missing or out of range, or the envelope holds no message
            that this version knows.
    """
    run_id = validate.run_id("run_id", envelope.run_id)
    sender = validate.node_id("sender_id", envelope.sender_id)
    term = validate.iteration("term", envelope.term)
    sequence = validate.number("sequence", envelope.sequence)
    name = envelope.WhichOneof("body")
    if name is None:
        raise validate.malformed("body", None, allowed="a message that this version knows")
    message = _CARRIERS[name].read(getattr(envelope, name))
    way = _way_of(envelope, sender, receiver)
    return Decoded(run_id, sender, term, sequence, message, way)


_proof = validate.blob(SEAL_SIZE_MAX_BYTES)


def _way_of(envelope: pb.Envelope, sender: NodeId, receiver: NodeId) -> Way | None:
    if not (envelope.goal_id or envelope.origin_id):
        return None
    ticket = validate.number("ticket", envelope.ticket)
    proof = _proof("proof", envelope.proof)
    if not envelope.origin_id:
        goal = validate.node_id("goal_id", envelope.goal_id)
        return Way(sender, goal, envelope.term, ticket, proof)
    if envelope.goal_id:
        raise validate.malformed("goal_id", envelope.goal_id, allowed="nothing beside an origin")
    origin = validate.node_id("origin_id", envelope.origin_id)
    return Way(origin, receiver, envelope.term, ticket, proof)


def parse(cls: type[P], data: bytes) -> P:
    """Parse a protobuf message from a peer's bytes. Its fields are not checked yet.

    Raises:
        MalformedMessageError: protobuf can't read the bytes as a `cls`.
    """
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise MalformedMessageError(
            f"{len(data)} bytes are no {cls.DESCRIPTOR.name}",
            why="protobuf can't read them",
            fix="run the same version of decod on every node",
        ) from error


_ENVELOPE_TAG = 0x0A
"""Field 1 of DeliverRequest, length-delimited."""

ENVELOPE = shape_of(control_pb2.Envelope.DESCRIPTOR, {}, BODIES)
_HEADER = shape_of(tensor_pb2.TensorHeader.DESCRIPTOR, {}, {"envelope": ENVELOPE})


@dataclass(frozen=True, slots=True)
class Header:
    """The description of the tensor that follows."""

    decoded: Decoded
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


def read_envelope(data: bytes, *, receiver: NodeId = NOBODY) -> Decoded:
    """Read a serialized envelope that came to `receiver`.

    Raises:
        MalformedMessageError: No node of this version sends this envelope.
    """
    scan(ENVELOPE, data)
    return decode(parse(control_pb2.Envelope, data), receiver=receiver)


def read_header(data: bytes, *, receiver: NodeId = NOBODY) -> Header:
    """Read a serialized TensorHeader that came to `receiver`.

    Raises:
        MalformedMessageError: No node of this version sends this header.
    """
    scan(_HEADER, data)
    header = parse(tensor_pb2.TensorHeader, data)
    decoded = decode(header.envelope, receiver=receiver)
    crc32 = validate.integer(0, 2**32 - 1)("crc32", header.crc32)
    return Header(decoded, header.size_bytes, crc32)
