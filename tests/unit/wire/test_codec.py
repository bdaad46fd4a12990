"""Everything that a node can say survives the wire; nothing else gets through it."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.protocol.core import messages as m
from decod.protocol.core.messages.scopes import Way
from decod.wire import codec
from decod.wire.codec import read_envelope
from decod.wire.message_schema import Struct, structs
from decod.wire.v1 import control_pb2 as pb
from tests.support.drawn import BASE32, objects_of

RUN = RunId("r" * 26)
SENDER, RECEIVER = NodeId("s" * 52), NodeId("r" * 52)

base32 = BASE32


def over_the_wire(message: m.Message) -> codec.Decoded:
    data = codec.encode(RUN, SENDER, 3, 4, message).SerializeToString()
    return read_envelope(data)


@pytest.mark.parametrize("cls", m.MESSAGES, ids=lambda cls: cls.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_every_message_survives_the_wire(cls: type, data: st.DataObject) -> None:
    message = data.draw(objects_of(cls))
    decoded = over_the_wire(message)
    assert decoded == codec.Decoded(RUN, SENDER, 3, 4, message)
    # Not part of what is said, so it is not compared above.
    assert getattr(decoded.message, "seal", b"") == getattr(message, "seal", b"")
    assert codec.content_of(decoded.message) == codec.content_of(message)


@pytest.mark.parametrize(
    "way",
    [
        None,
        Way(SENDER, RECEIVER, 3, 7),
        Way(NodeId("o" * 52), RECEIVER, 2, 2**63 - 1),
    ],
    ids=["direct", "to be passed on", "passed on"],
)
def test_an_envelope_says_from_whom_and_to_whom_it_goes(way: Way | None) -> None:
    data = codec.encode(RUN, SENDER, 3, 4, m.Ping(1), way).SerializeToString()
    decoded = codec.decode(codec.parse(pb.Envelope, data), receiver=RECEIVER)
    term = 3 if way is None else way.term
    assert decoded == codec.Decoded(RUN, SENDER, term, 4, m.Ping(1), way)


@pytest.mark.parametrize("struct", list(structs()), ids=lambda struct: struct.cls.__name__)
def test_proto_and_class_have_the_same_fields(struct: Struct) -> None:
    """A field that is added to the core alone would be lost on its way."""
    descriptor = getattr(pb, struct.cls.__name__).DESCRIPTOR
    assert [f.name for f in descriptor.fields] == [part.name for part in struct.parts]


def test_every_kind_of_body_is_a_message_of_the_core() -> None:
    bodies = pb.Envelope.DESCRIPTOR.oneofs_by_name["body"].fields
    assert {f.message_type.name for f in bodies} == {cls.__name__ for cls in m.MESSAGES}


def envelope(**body: Any) -> pb.Envelope:
    return pb.Envelope(run_id=RUN, sender_id=SENDER, term=1, sequence=1, **body)


def join(**changes: Any) -> pb.Envelope:
    fields: dict[str, Any] = {"address": "h:1", "role": 1, "capacity": 1, "duty": 1, "reach": 1}
    return envelope(join=pb.Join(**{**fields, "manifest_sha256": "0" * 64, **changes}))


def member(index: int, **changes: Any) -> pb.Member:
    fields: dict[str, Any] = {
        "node_id": base32[index] * 52,
        "address": "10.0.0.1:7700",
        "role": pb.ROLE_DATA if index == 0 else pb.ROLE_RELAY,
        "stage_index": min(index, 1),
        "capacity": 1,
        "data_node_index": 0 if index == 0 else -1,
        "duty": pb.DUTY_NONE,
        "reach": pb.REACH_DIALLED,
    }
    return pb.Member(**{**fields, **changes})


NOW: dict[str, Any] = {
    "iteration": pb.Iteration(),
    "committed": pb.Iteration(),
    "spec": pb.AverageSpec(),
    "travelling": pb.AverageSpec(),
}


def commit(*members: pb.Member, **changes: Any) -> pb.Envelope:
    fields: dict[str, Any] = {"leader": "a" * 52, "num_stages": 2, "members": members}
    view = pb.View(**{**fields, **changes})
    opening = pb.Opening(view=view, **NOW)
    return envelope(
        open=pb.Open(closed=pb.Iteration(), outcome=pb.OUTCOME_COMMITTED, opening=opening)
    )


def opening(**changes: Any) -> pb.Envelope:
    """One whose opening has these fields too."""
    view = pb.View(leader="a" * 52, num_stages=1, members=[member(0)])
    whole = pb.Opening(view=view, **NOW, **changes)
    return envelope(open=pb.Open(closed=pb.Iteration(), outcome=pb.OUTCOME_REPEATED, opening=whole))


BAD: dict[str, pb.Envelope] = {
    "no body": envelope(),
    "run id too short": pb.Envelope(run_id="r", sender_id=SENDER, ping=pb.Ping()),
    "sender in capitals": pb.Envelope(run_id=RUN, sender_id="S" * 52, ping=pb.Ping()),
    "negative term": pb.Envelope(run_id=RUN, sender_id=SENDER, term=-1, ping=pb.Ping()),
    "goal in capitals": envelope(ping=pb.Ping(), goal_id="G" * 52),
    "origin too short": envelope(ping=pb.Ping(), origin_id="o"),
    "passed on and to be": envelope(ping=pb.Ping(), goal_id="g" * 52, origin_id="o" * 52),
    "negative ticket": envelope(ping=pb.Ping(), goal_id="g" * 52, ticket=-1),
    "no patience": envelope(suspect=pb.Suspect(node_id="n" * 52, slack=0.5)),
    "endless patience": envelope(suspect=pb.Suspect(node_id="n" * 52, slack=math.inf)),
    "no iteration": envelope(heartbeat=pb.Heartbeat()),
    "iteration too large": envelope(
        heartbeat=pb.Heartbeat(iteration=pb.Iteration(number=2**48 + 1))
    ),
    "negative attempt": envelope(can_take=pb.CanTake(iteration=pb.Iteration(attempt=-1))),
    "negative nonce": envelope(ping=pb.Ping(nonce=-1)),
    "a long list of bans": envelope(bans=pb.Bans(statement=bytes((2 << 20) + 1))),
    "stage too large": envelope(assign=pb.Assign(stage_index=4096)),
    "role unknown": join(role=7),
    "duty unknown": join(duty=7),
    "capacity 0": join(capacity=0),
    "capacity asked for negative": envelope(capacity=pb.Capacity(capacity=-1)),
    "member capacity negative": commit(member(0), member(1, capacity=-1)),
    "no port": join(address="h"),
    "port 70000": join(address="h:70000"),
    "hash in capitals": envelope(prepared=pb.Prepared(parameter_hash="A" * 64)),
    "reason too long": envelope(refuse=pb.Refuse(reason="x" * 201)),
    "three marks": opening(marks=[pb.Mark(iteration=i) for i in range(3)]),
    "marks out of order": opening(marks=[pb.Mark(iteration=i) for i in (2, 1)]),
    "origin of no kind": opening(origin=pb.Origin(lost=[1])),
    "a stage without blocks": opening(marks=[pb.Mark(cut=[2, 0])]),
    "a cut of other stages": commit(member(0), cut=[1, 2]),
    "a stage's holders twice": opening(
        origin=pb.Origin(
            source=pb.SOURCE_KEPT, lost=[1], holders=2 * [pb.StateHolders(nodes=["a" * 52])]
        )
    ),
    "negative era": envelope(can_take=pb.CanTake(iteration=pb.Iteration(era=-1))),
    "a state with half a hash": join(kept=[pb.Kept(parameter_hash="0" * 32)]),
    "reason of two lines": envelope(refuse=pb.Refuse(reason="x\ny")),
    "cost NaN": envelope(flow_cost=pb.FlowCost(data_node="a" * 52, cost_s=math.nan)),
    "cost negative": envelope(flow_cost=pb.FlowCost(data_node="a" * 52, cost_s=-1)),
    "duration infinite": envelope(flow_cost=pb.FlowCost(data_node="a" * 52, compute_s=math.inf)),
    "latency NaN": envelope(link_report=pb.LinkReport(latency_s=math.nan)),
    "latency over an hour": envelope(link_report=pb.LinkReport(latency_s=3601)),
    "bandwidth negative": envelope(link_report=pb.LinkReport(bandwidth_bytes_per_s=-1)),
    "bandwidth infinite": envelope(link_report=pb.LinkReport(bandwidth_bytes_per_s=math.inf)),
    "compute time over a day": envelope(link_report=pb.LinkReport(compute_s=86_401)),
    "bandwidth of a byway NaN": envelope(
        link_report=pb.LinkReport(
            byways=[pb.Byway(node_id="a" * 52, bandwidth_bytes_per_s=math.nan)]
        )
    ),
    "a byway twice": envelope(link_report=pb.LinkReport(byways=[pb.Byway(node_id="a" * 52)] * 2)),
    "too many byways": envelope(
        link_report=pb.LinkReport(byways=[pb.Byway(node_id=c * 52) for c in "abcdefghi"])
    ),
    "loss infinite": envelope(report=pb.Report(iteration=pb.Iteration(), loss_sum=math.inf)),
    "square sum NaN": envelope(
        reduced_part=pb.ReducedPart(averaging=pb.AveragingId(), square_sum=math.nan),
    ),
    "square sum negative": envelope(
        gradient_squares=pb.GradientSquares(
            averaging=pb.AveragingId(), square_sums=[pb.StageSquares(square_sum=-1.0)]
        )
    ),
    "a stage's squares twice": envelope(
        gradient_squares=pb.GradientSquares(
            averaging=pb.AveragingId(), square_sums=[pb.StageSquares()] * 2
        )
    ),
    "squares of no stage": envelope(
        gradient_squares=pb.GradientSquares(averaging=pb.AveragingId())
    ),
    "norm infinite": envelope(
        gradient_norm=pb.GradientNorm(averaging=pb.AveragingId(), gradient_norm=math.inf)
    ),
    "average's norm negative": envelope(
        average=pb.Average(
            averaging=pb.AveragingId(), num_parts=1, num_microbatches=1, gradient_norm=-0.5
        )
    ),
    "too many hashes": envelope(
        ready=pb.Ready(
            averaging=pb.AveragingId(), hashes=[pb.StageHash(parameter_hash="0" * 64)] * 4097
        )
    ),
    "view without members": commit(),
    "member twice": commit(member(0), member(1), member(1)),
    "leader is no member": commit(member(0), leader="b" * 52),
    "leader is a relay": commit(member(0), member(1), leader="b" * 52),
    "members unordered": commit(member(1), member(0)),
    "data node at stage 1": commit(member(0), member(1, role=1)),
    "data index twice": commit(member(0), member(1, role=1, stage_index=0, data_node_index=0)),
    "stage beyond num_stages": commit(member(0), member(1, stage_index=2)),
    "num_stages 0": commit(member(0), num_stages=0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_fields_are_malformed(name: str) -> None:
    with pytest.raises(MalformedMessageError):
        codec.decode(BAD[name])


def test_the_good_ones_that_the_bad_ones_vary_are_accepted() -> None:
    assert isinstance(codec.decode(commit(member(0), member(1), member(2))).message, m.Open)
    assert isinstance(codec.decode(join()).message, m.Join)


@given(st.binary(max_size=200))
def test_random_bytes_are_malformed_or_a_message(data: bytes) -> None:
    try:
        read_envelope(data)
    except MalformedMessageError as error:
        assert len(str(error)) < 500  # noqa: PT017 - Either outcome is right; the text is bounded.


def test_own_reasons_are_cut_to_one_printable_line() -> None:
    sent = m.Refuse("line one\nline two \x1b[31m" + "x" * 300)
    received = over_the_wire(sent).message
    assert isinstance(received, m.Refuse)
    assert received.reason.startswith("line one line two  [31mxxx")
    assert len(received.reason) == 200


def test_own_bad_fields_are_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="nonce"):
        codec.encode(RUN, SENDER, 1, 1, m.Ping(-1))
