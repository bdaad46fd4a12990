"""What comes too often is refused while it is still bytes; what nodes send is counted right."""

from typing import Any

import pytest

from decod.errors import MalformedMessageError
from decod.ids import FlowId, Iteration, NodeId, RunId
from decod.protocol.core import messages as m
from decod.protocol.core.messages import routing_messages as routing
from decod.wire import codec, validate
from decod.wire.codec import ENVELOPE, envelopes_of, read_envelope
from decod.wire.scan import scan
from decod.wire.v1 import control_pb2
from tests.support.messages import control_messages
from tests.support.wire_shapes import field, nested, number, repeated_fields

RUN, SENDER = RunId("r" * 26), NodeId("s" * 52)
HEAD = control_pb2.Envelope(run_id=RUN, sender_id=SENDER).SerializeToString()
PING = field(16, b"")
CHAINS = list(repeated_fields(control_pb2.Envelope.DESCRIPTOR))


def serialized(message: m.Message) -> bytes:
    return codec.encode(RUN, SENDER, 1, 1, message).SerializeToString()


def test_there_are_repeated_fields_to_look_at() -> None:
    paths = {".".join(each.name for each in chain) for chain in CHAINS}
    assert {"open.opening.view.members", "claims.claims.hops.costs"} <= paths
    assert len(paths) > 30


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: ".".join(e.name for e in chain))
def test_no_repeated_field_may_come_without_end(chain: tuple[Any, ...]) -> None:
    """The name of the field is in the error, so the walk has stopped there."""
    last = chain[-1]
    packed = last.message_type is None and last.type not in (last.TYPE_STRING, last.TYPE_BYTES)
    num = validate.ENTRIES_MAX + 1
    content = field(last.number, bytes(num * 8)) if packed else field(last.number, b"") * num
    with pytest.raises(MalformedMessageError, match=f"of {last.name}:|entries:"):
        scan(ENVELOPE, HEAD + nested(chain[:-1], content))


def test_a_view_has_no_more_members_than_may_be() -> None:
    """Its own limit holds, far below that of all entries together."""
    (chain,) = (c for c in CHAINS if [e.name for e in c] == ["join", "kept"])
    assert scan(ENVELOPE, HEAD + nested(chain[:-1], field(20, b"") * 64)) == 64
    with pytest.raises(MalformedMessageError, match="more than 64 of kept"):
        scan(ENVELOPE, HEAD + nested(chain[:-1], field(20, b"") * 65))


def test_entries_of_all_fields_are_added_up() -> None:
    cost = field(2, b"")
    hop = field(2, cost * 30_000)
    with pytest.raises(MalformedMessageError, match=f"more than {validate.ENTRIES_MAX} entries"):
        scan(ENVELOPE, HEAD + field(48, field(5, hop * 9)))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (HEAD + PING + PING, "body"),
        (HEAD + PING + field(17, b""), "body"),
        (HEAD + number(3, 1) * 2, "term"),
        (HEAD + field(33, b"") + PING, "body"),
        (HEAD + field(33, field(3, b"") * 2), "opening"),
        (HEAD + number(200, 1) * 17, "unknown"),
        (HEAD + b"\x0b\x0c", "tag"),
        (HEAD + b"\x0a\x05abc", "cut short"),
        (HEAD + b"\x0a", "number"),
        (HEAD + b"\xff" * 20, "number"),
        (HEAD + field(33, b"\x1a\x40"), "cut short"),
    ],
)
def test_odd_envelopes_are_malformed(data: bytes, says: str) -> None:
    with pytest.raises(MalformedMessageError, match=says):
        scan(ENVELOPE, data)


def test_a_few_fields_of_a_later_version_are_passed_over() -> None:
    assert read_envelope(HEAD + PING + number(200, 1) * 16).message == m.Ping(0)


@pytest.mark.parametrize("message", control_messages(), ids=lambda each: type(each).__name__)
def test_what_a_node_says_is_read_as_it_was_said(message: m.Message) -> None:
    assert read_envelope(serialized(message)).message == message


def test_entries_are_counted() -> None:
    ids = tuple(NodeId(c * 52) for c in "abcd")
    hop = routing.Hop(ids[0], ((ids[1], 0.5), (ids[2], 0.5)))
    assert scan(ENVELOPE, serialized(m.Ping(1))) == 0
    assert scan(ENVELOPE, serialized(m.Differs(1, ids))) == 4
    assert scan(ENVELOPE, serialized(routing.Claim(1, 1, FlowId(ids[0], 0), (hop,)))) == 3
    flow = routing.SettledFlow(ids, (0.1,) * 5)
    assert scan(ENVELOPE, serialized(routing.Routes(1, 1, (flow,)))) == 1 + 4 + 5
    names = [a + b for a in "abcdefghijklmno" for b in "abcdefghijklmno"][:200]
    hops = [routing.Hop(NodeId(name * 26), ()) for name in names]
    claims = routing.Claims(1, 1, 200, (), tuple((hop,) for hop in hops))
    assert scan(ENVELOPE, serialized(claims)) == 4 * 200  # Names, hops, claims and indexes.
    assert scan(ENVELOPE, serialized(m.Heartbeat(Iteration(1, 1)))) == 0


def test_a_batch_is_cut_apart_without_being_parsed() -> None:
    parts = [serialized(m.Ping(index)) for index in range(3)]
    batch = b"".join(field(1, part) for part in parts)
    assert envelopes_of(batch, 3) == parts
    assert envelopes_of(b"", 3) == []
    for bad in (batch, batch[:-1], b"\x12\x00", batch + b"\x0a", field(1, b"") * 100_000):
        with pytest.raises(MalformedMessageError):
            envelopes_of(bad, 2)
