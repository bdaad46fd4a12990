"""Shapes that a message can have on the wire, whether or not a node would send it.

Fields are taken from the descriptors, so a field that is added later is tried, too. Every repeated
field of every request is filled in several ways: very often with nothing, often with a little,
seldom with much. Other shapes repeat a field that should come once, nest groups, alternate between
the bodies of an envelope, or alter a node's own messages.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from decod.ids import AveragingId, FlowId, Iteration, NodeId, RunId
from decod.net import channel
from decod.net.dht_datagram import GREETING_SIZE_BYTES, run_tag
from decod.net.net_limits import LIMITS, MIB
from decod.net.tensor_stream import HEAD
from decod.protocol.core import messages as m
from decod.protocol.core.messages import routing_messages as routing
from decod.protocol.core.view import Member, Opening, Role, View
from decod.wire import codec
from decod.wire.scan import write_varint
from decod.wire.v1 import control_pb2, enroll_pb2, membership_pb2, state_pb2, tensor_pb2
from tests.support.messages import control_messages
from tests.support.sending import tensor_head, tensor_piece

FULL = 4 * MIB
"""Largest size of a message."""

_LENGTH = 2
_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"

REQUESTS: dict[str, Any] = {
    f"/{channel.CONTROL_SERVICE}/Deliver": control_pb2.DeliverRequest,
    f"/{channel.ENROLL_SERVICE}/Hello": enroll_pb2.HelloRequest,
    f"/{channel.STATE_SERVICE}/Describe": state_pb2.DescribeRequest,
    f"/{channel.STATE_SERVICE}/Fetch": state_pb2.FetchRequest,
    f"/{channel.STATE_SERVICE}/Release": state_pb2.ReleaseRequest,
    f"/{channel.STATE_SERVICE}/ReadStatus": state_pb2.ReadStatusRequest,
}
"""The request of each method."""

DELIVER = next(iter(REQUESTS))
TENSORS = "tensors"
"""In a method's place: connections for tensors."""


@dataclass(frozen=True, slots=True)
class Throw:
    """Something to send, once or many times at once."""

    name: str
    method: str
    """Path of the method; empty for datagrams; or `TENSORS`."""
    messages: tuple[bytes, ...]
    """Messages of one call, datagrams, or bytes over one connection."""
    num_calls: int = 1
    names_run: bool = True
    """Whether the call names its run."""


def throws(rng: random.Random, run_id: RunId, *, size_bytes: int = FULL) -> Iterator[Throw]:
    """Yield throws of every shape, as from a node that is not a member.

    Args:
        rng: Source of everything that is not systematic.
        run_id: The run whose nodes are thrown at.
        size_bytes: Size of large messages.
    """
    made = _Maker(rng, run_id, size_bytes)
    for method, cls in REQUESTS.items():
        for name, data in made.requests(cls):
            yield Throw(f"{cls.__name__}: {name}", method, (data,))
    for name, envelope in made.envelopes():
        yield Throw(f"envelope: {name}", DELIVER, (field(1, envelope),))
        header = field(1, envelope) + b"\x10\x08"
        yield Throw(f"header: {name}", TENSORS, (tensor_head(header), tensor_piece(bytes(100))))
    for name, data in made.requests(tensor_pb2.TensorHeader):
        yield Throw(f"TensorHeader: {name}", TENSORS, (tensor_head(data),))
    yield from made.batches()
    yield from made.tensors()
    yield from made.crowds()
    yield from made.datagrams()


def field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field."""
    return write_varint(number << 3 | _LENGTH) + write_varint(len(content)) + content


def number(number: int, value: int) -> bytes:
    """Return a field with a varint."""
    return write_varint(number << 3) + write_varint(value)


def _filled(piece: bytes, size_bytes: int) -> bytes:
    return piece * (size_bytes // len(piece))


def nested(chain: tuple[Any, ...], content: bytes) -> bytes:
    """Return a message in which `content` lies in the last field of a chain of nested fields."""
    for each in reversed(chain):
        content = field(each.number, content)
    return content


def fields_of(descriptor: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield, outermost first, the fields that lead to each field of a message, at any depth.

    Only repeated fields and messages are included.
    """
    for each in descriptor.fields:
        chain = (*above, each)
        if each.is_repeated or each.message_type is not None:
            yield chain
        if each.message_type is not None:
            yield from fields_of(each.message_type, chain)


def repeated_fields(descriptor: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the chains of `fields_of` that end with a repeated field."""
    return (chain for chain in fields_of(descriptor) if chain[-1].is_repeated)


def _node_id(index: int) -> NodeId:
    digits = "".join(_BASE32[index >> shift & 31] for shift in (0, 5, 10, 15, 20))
    return NodeId(digits + "a" * 47)


class _Maker:
    def __init__(self, rng: random.Random, run_id: RunId, size_bytes: int) -> None:
        self._rng = rng
        self._run_id = run_id
        self._size_bytes = size_bytes
        self._sender = _node_id(rng.randrange(1 << 20))

    # --- any request --------------------------------------------------------------------------

    def requests(self, cls: Any) -> Iterator[tuple[str, bytes]]:
        rng, size = self._rng, self._size_bytes
        yield "nothing", b""
        yield "random bytes", rng.randbytes(rng.randrange(1, size))
        yield "zeros", bytes(size)
        yield "groups, one in another", b"\x0b" * size
        yield "groups, one after another", _filled(b"\x0b\x0c", size)
        yield "unknown numbers", _filled(number(200, rng.randrange(128)), size)
        yield "unknown bytes", _filled(field(200, b""), size)
        yield "one unknown field", field(200, bytes(size - 20))
        yield "an endless number", b"\x08" + b"\xff" * (size - 1)
        yield "a length beyond the end", b"\x0a" + write_varint(2**40) + bytes(100)
        for each in cls.DESCRIPTOR.fields:
            empty = write_varint(each.number << 3 | _LENGTH) + b"\0"
            yield f"{each.name} again and again", _filled(empty, size)
            yield f"{each.name}, one large", field(each.number, b"a" * (size - 20))
            yield f"{each.name} as a number", _filled(number(each.number, 1), size)

    # --- envelopes ----------------------------------------------------------------------------

    def envelopes(self) -> Iterator[tuple[str, bytes]]:
        for chain in fields_of(control_pb2.Envelope.DESCRIPTOR):
            path = ".".join(each.name for each in chain)
            for name, content in self._fillings(chain[-1]):
                yield f"{path}, {name}", self._head() + nested(chain[:-1], content)
        yield from self._odd_envelopes()
        for message in self._large_messages():
            yield f"a true {type(message).__name__}", self._envelope(message)

    def _fillings(self, each: Any) -> Iterator[tuple[str, bytes]]:
        rng, size = self._rng, self._size_bytes - 200
        if not each.is_repeated:
            yield "again and again", _filled(field(each.number, b""), size)
            return
        if each.message_type is None and each.type != each.TYPE_STRING:
            yield "packed", field(each.number, _filled(bytes([0, 1, rng.randrange(128)]), size))
            yield "unpacked", _filled(number(each.number, 1), size)
            return
        small = rng.randbytes(rng.randrange(1, 8)) if each.message_type is None else b"\x08\x01"
        yield "many empty", _filled(field(each.number, b""), size)
        yield "many small", _filled(field(each.number, small), rng.randrange(1, size))
        yield "few large", field(each.number, bytes(size // 3)) * 3

    def _odd_envelopes(self) -> Iterator[tuple[str, bytes]]:
        rng, size, head = self._rng, self._size_bytes - 200, self._head()
        bodies = [
            field(each.number, b"")
            for each in control_pb2.Envelope.DESCRIPTOR.oneofs_by_name["body"].fields
        ]
        yield "bodies in turn", head + _filled(b"".join(rng.sample(bodies, 2)), size)
        yield "all bodies", head + _filled(b"".join(bodies), size)
        yield "term again and again", head + _filled(number(3, 1), size)
        yield "a long run id", field(1, ("é" * (size // 2)).encode())
        for message in rng.sample(control_messages(), 10):
            true = self._envelope(message)
            position = rng.randrange(len(true))
            altered = true[:position] + rng.randbytes(rng.randrange(1, 9)) + true[position + 1 :]
            yield f"an altered {type(message).__name__}", altered
            yield f"a {type(message).__name__} cut short", true[:position]
            yield f"a {type(message).__name__} many times", _filled(true, size)

    def _head(self) -> bytes:
        return self._envelope(m.Ping(0))[: -len(field(16, b"")) - 1]

    def _envelope(self, message: m.Message) -> bytes:
        return codec.encode(self._run_id, self._sender, 1, 1, message).SerializeToString()

    def _large_messages(self) -> Iterator[m.Message]:
        """Yield messages that a large run could send, as large as they may be."""
        num = self._size_bytes // 160
        ids = [_node_id(index) for index in range(num)]
        members = [_member(node_id, index) for index, node_id in enumerate(ids[: num // 2])]
        view = View.of(members, version=1, leader=ids[0], term=1, num_stages=3)
        opening = Opening(Iteration(2, 1), Iteration(1, 1), view)
        yield m.Open(Iteration(1, 1), m.Outcome.COMMITTED, opening, loss=1.0, num_tokens=1)
        yield m.UtilisationAnswer(
            1, Iteration(1, 1), tuple(m.NodeLoad(i, 1, 1, 1, "") for i in ids)
        )
        yield m.Ready(AveragingId(Iteration(1, 1), 1), (), votes=tuple((i, "0" * 64) for i in ids))
        costs = tuple((node_id, 0.5) for node_id in ids[: num // 8])
        hop = routing.Hop(ids[0], costs, costs)
        flow = FlowId(ids[0], 0)
        yield routing.Claim(1, 1, flow, (hop,))
        claims = tuple((routing.Hop(ids[0], ((ids[1], float(i)),)),) for i in range(num // 2))
        yield routing.Claims(1, 1, 2, costs, claims)
        path = tuple(ids[:100])
        settled = routing.SettledFlow(path, (0.5,) * 101)
        yield routing.Routes(1, 1, (settled,) * (num // 60))

    # --- more than one ------------------------------------------------------------------------

    def batches(self) -> Iterator[Throw]:
        """Yield calls with many envelopes, each of which is valid."""
        true = field(1, self._envelope(m.Ping(1)))
        foreign = codec.encode(RunId("x" * 26), self._sender, 1, 1, m.Ping(1)).SerializeToString()
        length = LIMITS.batch_length_max
        yield Throw("a full batch", DELIVER, (true * length,))
        yield Throw("too long a batch", DELIVER, (_filled(true, self._size_bytes),))
        yield Throw("a batch of another run", DELIVER, (field(1, foreign) * length,))
        kept = m.Join("127.0.0.1:1", Role.RELAY, 1, None, "0" * 64, 1, "mallory")
        yield Throw("a batch of offers", DELIVER, (field(1, self._envelope(kept)) * length,))
        # The largest envelope that is still read within the event loop.
        costs = routing.Claim(1, 1, FlowId(_node_id(1), 0), (_costly_hop(100),))
        share = field(1, self._envelope(costs))
        yield Throw("a batch of dear messages", DELIVER, (share * length,))

    def tensors(self) -> Iterator[Throw]:
        """Yield what begins with a valid header, and what follows none of the rules."""
        rng = self._rng
        message = rng.choice(
            [
                m.LinkProbe(),
                m.ReducedPart(AveragingId(Iteration(1, 1), 1), 1),
                m.ReducePart(AveragingId(Iteration(1, 1), 1), 1, 1, 1),
            ]
        )
        header = tensor_pb2.TensorHeader(
            envelope=codec.encode(self._run_id, self._sender, 1, 1, message),
            size_bytes=rng.choice([0, 1, MIB, 2**40, -1]),
        )
        head, piece = tensor_head(header.SerializeToString()), tensor_piece(bytes(MIB))
        yield Throw("a tensor that goes on and on", TENSORS, (head, *[piece] * 64))
        yield Throw("a tensor of nothing", TENSORS, (head, *[tensor_piece(b"")] * 1000))
        yield Throw("heads again and again", TENSORS, (head,) * 1000)
        yield Throw("heads that are taken up again", TENSORS, (tensor_head(head, 255),) * 1000)
        yield Throw("a piece without a head", TENSORS, (piece, head))
        yield Throw("a head without an end", TENSORS, (HEAD.pack(2**32 - 1, 0), bytes(64 * MIB)))
        yield Throw("no bytes of ours", TENSORS, (rng.randbytes(self._size_bytes),))

    def crowds(self) -> Iterator[Throw]:
        """Yield many calls at once."""
        ids = {"run_id": self._run_id, "sender_id": self._sender}
        for method, cls in REQUESTS.items():
            known = {key: ids[key] for key in ids if key in cls.DESCRIPTOR.fields_by_name}
            data = cls(**known).SerializeToString()
            name = cls.__name__
            yield Throw(f"{name}: many calls", method, (data,), num_calls=300)
            yield Throw(f"{name}: many calls of no run", method, (data,), 300, names_run=False)
            full = bytes(self._size_bytes)
            yield Throw(f"{name}: many large calls", method, (full,), num_calls=24)
        batch = field(1, self._envelope(m.Ping(1))) * LIMITS.batch_length_max
        yield Throw("many full batches", DELIVER, (batch,), num_calls=24)
        tensor = tensor_head(self._envelope(m.LinkProbe()))
        yield Throw("many tensors", TENSORS, (tensor,), num_calls=300)
        empty = _filled(field(1, b""), self._size_bytes)
        yield Throw("many batches of nothing", DELIVER, (empty,), num_calls=3)
        large = next(iter(self._large_messages()))
        yield Throw("many large views", DELIVER, (field(1, self._envelope(large)),), num_calls=6)

    # --- datagrams ----------------------------------------------------------------------------

    def datagrams(self) -> Iterator[Throw]:
        rng = self._rng
        tag = run_tag(self._run_id)
        ids = rng.randbytes(12)
        heads = [b"\x00" + ids + tag, b"\x01" + ids, b"\x02" + rng.randbytes(20), b"\x03" + ids]
        bodies = {
            "arrays, one in another": b"\x91" * 1179,
            "maps, one in another": b"\x81\xa1a" * 393,
            "many arrays": b"\xdc\x04\x90" + b"\x90" * 1168,
            "an array that claims to be long": b"\xdd\xff\xff\xff\xff" + b"\x00" * 1174,
            "a map that claims to be long": b"\xdf\xff\xff\xff\xff" + b"\x00" * 1174,
            "bytes that claim to be long": b"\xc6\xff\xff\xff\xff" + bytes(1174),
            "instants": b"\x9f" + b"\xc7\x0c\xff" + b"\xff" * 1160,
            "random": rng.randbytes(1179),
        }
        statement = membership_pb2.Statement(kind="dht introduction", body=bytes(32))
        introductions = {
            "of nobody": statement.SerializeToString(),
            "with fields again and again": _filled(b"\x1a\0", 420),
            "with one long field": field(2, bytes(400)),
            "nested": _filled(b"\x0b", 420),
            "that claims to be long": b"\x12" + write_varint(2**40),
        }
        for name, introduction in introductions.items():
            bodies[f"introduction {name}"] = len(introduction).to_bytes(2, "big") + introduction
        for name, body in bodies.items():
            for size in (GREETING_SIZE_BYTES, 1200):
                packets = tuple((heads[i % 4] + body).ljust(size, b"\0")[:size] for i in range(100))
                yield Throw(f"datagrams: {name}, {size} bytes", "", packets)
        sizes = (rng.randrange(1, 1400) for _ in range(200))
        yield Throw("datagrams: random", "", tuple(map(rng.randbytes, sizes)))


def _member(node_id: NodeId, index: int) -> Member:
    return Member(
        node_id=node_id,
        address="127.0.0.1:1",
        role=Role.RELAY if index else Role.DATA,
        stage_index=1 + index % 2 if index else 0,
        capacity=1,
        data_node_index=-1 if index else 0,
        since_iteration=0,
        name="",
    )


def _costly_hop(num: int) -> routing.Hop:
    return routing.Hop(_node_id(0), tuple((_node_id(i), 0.5) for i in range(num)))
