"""Everything that a node can say survives the wire; nothing else gets through it."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.errors import MalformedMessageError
from decod.ids import AveragingId, FlowId, Iteration, MicrobatchId, NodeId, RunId
from decod.limits import SEAL_SIZE_MAX_BYTES
from decod.protocol.core import messages as m
from decod.protocol.core.average_spec import BITS, AverageSpec
from decod.protocol.core.era import Kept, Mark, Origin, Source, StateHolders
from decod.protocol.core.messages import election as em
from decod.protocol.core.messages import gwtf
from decod.protocol.core.messages import negotiation as routing
from decod.protocol.core.messages.averaging import StageAverages
from decod.protocol.core.messages.forwarding import Way
from decod.protocol.core.messages.negotiation import PATH_COST_MAX
from decod.protocol.core.messages.replay import Average
from decod.protocol.core.messages.rounds import BeginRound, Standing
from decod.protocol.core.messages.servers import Holding
from decod.protocol.core.residual import MAX_STEPS, Place, Walk
from decod.protocol.core.view import Duty, Member, Opening, Reach, Role, View
from decod.protocol.core.view_change import ElectorChange, ViewChange
from decod.protocol.flows.position import LINK_COST_MAX
from decod.protocol.links.failure_detector import SLACK_MAX
from decod.wire import codec, validate
from decod.wire.reading import read_envelope
from decod.wire.schema import Struct, structs
from decod.wire.v1 import control_pb2 as pb
from tests.support.audited import of_audits
from tests.support.round_messages import begun_rounds, of_rounds
from tests.support.servers_messages import holdings, of_servers

RUN = RunId("r" * 26)
SENDER, RECEIVER = NodeId("s" * 52), NodeId("r" * 52)

base32 = "abcdefghijklmnopqrstuvwxyz234567"
node_ids = st.text(base32, min_size=52, max_size=52).map(NodeId)
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
versions = st.integers(0, 2**48)
numbers = st.integers(0, 2**63 - 1)
counts = st.integers(0, 2**31 - 1)
stages = st.integers(0, 4095)
flows = st.integers(0, 65536)
names = st.text("abcxyz0189-", max_size=32)
durations = st.floats(0, allow_nan=False, allow_infinity=False)
specs = st.builds(AverageSpec, st.integers(0, 1024), st.integers(0, 1 << 20), st.sampled_from(BITS))
slow = st.dictionaries(node_ids, st.integers(0, 15), max_size=4).map(lambda of: tuple(of.items()))
travelled = st.dictionaries(stages, versions, max_size=4).map(lambda of: tuple(of.items()))
reasons = st.text(max_size=200).map(validate.clip_reason)
addresses = st.one_of(
    st.builds("10.1.2.{}:{}".format, st.integers(0, 255), st.integers(1, 65535)),
    st.builds("[2001:db8::{:x}]:{}".format, st.integers(1, 65535), st.integers(1, 65535)),
)
iterations = st.builds(Iteration, versions, counts, counts)
stage_hashes = st.lists(st.tuples(stages, hashes), max_size=3, unique_by=lambda one: one[0]).map(
    tuple
)
marks = st.lists(
    st.builds(Mark, versions, stage_hashes), max_size=2, unique_by=lambda mark: mark.iteration
).map(lambda found: tuple(sorted(found, key=lambda mark: mark.iteration)))
holders = st.builds(
    StateHolders, stages, st.lists(node_ids, min_size=1, max_size=3, unique=True).map(tuple)
)
origins = st.builds(
    Origin,
    st.sampled_from(Source),
    st.lists(stages, min_size=1, max_size=3, unique=True).map(tuple),
    versions,
    st.lists(holders, max_size=3, unique_by=lambda one: one.stage_index).map(tuple),
)
kept = st.lists(st.builds(Kept, stages, versions, hashes), max_size=3).map(tuple)


@st.composite
def views(draw: st.DrawFn) -> View:
    num_stages = draw(st.integers(1, 5))
    ids = draw(st.lists(node_ids, min_size=1, max_size=6, unique=True))
    num_data = draw(st.integers(1, len(ids))) if num_stages > 1 else len(ids)
    members = [
        Member(
            node_id=node_id,
            address=draw(addresses),
            role=Role.DATA if i < num_data else Role.RELAY,
            stage_index=0 if i < num_data else draw(st.integers(1, num_stages - 1)),
            capacity=draw(st.integers(1 if i < num_data else 0, 65536)),
            data_node_index=i if i < num_data else -1,
            since_iteration=draw(versions),
            name=draw(names),
            duty=draw(st.sampled_from(Duty)) if i >= num_data else Duty.NONE,
            reach=draw(st.sampled_from(Reach)) if i >= num_data else Reach.PASSES_ON,
        )
        for i, node_id in enumerate(ids)
    ]
    return View.of(
        members,
        version=draw(versions),
        leader=ids[0],
        term=draw(versions),
        num_stages=num_stages,
    )


openings = st.builds(
    Opening,
    iterations,
    iterations,
    views(),
    st.booleans(),
    numbers,
    st.lists(node_ids, max_size=4, unique=True).map(tuple),
    marks,
    st.none() | origins,
    st.none() | iterations,
    versions,
    specs,
    specs,
    slow,
    travelled,
)
elector_changes = st.lists(node_ids, min_size=1, max_size=6, unique=True).map(
    lambda ids: ElectorChange(ids[0], tuple(ids[1:3]), tuple(ids[3:]))
)


@st.composite
def view_changes(draw: st.DrawFn, *, electors: bool = True) -> ViewChange:
    nodes = draw(st.lists(node_ids, max_size=3, unique=True))
    new = draw(views()).members
    gone = tuple(node for node in nodes if node not in {m.node_id for m in new})
    told = draw(st.none() | elector_changes) if electors else None
    base, result = draw(st.lists(hashes, min_size=2, max_size=2, unique=True))
    return ViewChange(base, result, gone, new, told)


@st.composite
def opens(draw: st.DrawFn, opens_of: st.SearchStrategy[m.Open]) -> m.Open:
    """Openings with a whole view, or with a change."""
    message, change = draw(opens_of), draw(st.none() | view_changes())
    if change is None:
        return message
    told = dataclasses.replace(message.opening, view=message.opening.view.outline, electors=())
    return dataclasses.replace(message, opening=told, change=change)


@st.composite
def mends(draw: st.DrawFn, mends_of: st.SearchStrategy[m.Mend]) -> m.Mend:
    message, change = draw(mends_of), draw(st.none() | view_changes(electors=False))
    if change is None:
        return message
    return dataclasses.replace(message, view=message.view.outline, change=change)


loads = st.builds(m.NodeLoad, node_ids, flows, flows, numbers, st.text("abc_-", max_size=32), kept)

places = st.tuples(node_ids, st.booleans())
link_costs = st.lists(
    st.tuples(node_ids, st.floats(0, LINK_COST_MAX)), max_size=3, unique_by=lambda cost: cost[0]
).map(tuple)
hops = st.builds(routing.Hop, node_ids, link_costs, link_costs, st.floats(0, 86_400))
paths = st.lists(node_ids, min_size=1, max_size=3, unique=True).map(tuple)


def hop_lists(*, min_size: int) -> st.SearchStrategy[tuple[routing.Hop, ...]]:
    lists = st.lists(hops, min_size=min_size, max_size=3, unique_by=lambda hop: hop.node_id)
    return lists.map(tuple)


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    on_it: list[Place] = draw(st.lists(places, min_size=1, max_size=MAX_STEPS, unique=True))
    steps = st.floats(-1e110, 1e110) | st.floats(-10, 10)
    costs = [0.0]
    for _ in on_it[1:]:
        costs.append(costs[-1] + draw(steps))
    return Walk(tuple(on_it), tuple(costs), draw(st.integers(1, 65536)))


@st.composite
def claim_lists(draw: st.DrawFn) -> tuple[tuple[routing.Hop, ...], ...]:
    """Claims share hops, as they do where they meet."""
    pool = draw(hop_lists(min_size=1))
    claims = st.lists(st.sampled_from(pool), min_size=1, unique_by=lambda hop: hop.node_id)
    return tuple(draw(st.lists(claims.map(tuple) | hop_lists(min_size=1), max_size=4)))


next_hops = st.builds(gwtf.NextHop, node_ids, counts)
link_uses = st.builds(gwtf.LinkUse, st.floats(0, LINK_COST_MAX), flows)
peer_flows = st.builds(
    gwtf.PeerFlow,
    counts,
    numbers,
    node_ids,
    node_ids,
    st.floats(0, LINK_COST_MAX),
    next_hops,
    st.booleans(),
)


@st.composite
def settled_flows(draw: st.DrawFn) -> routing.SettledFlow:
    path = draw(paths)
    num = len(path) + 1
    costs = draw(st.lists(st.floats(0, LINK_COST_MAX), min_size=num, max_size=num))
    return routing.SettledFlow(path, tuple(costs))


BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "reach": st.sampled_from(Reach),
    "iteration": iterations,
    "averaging": st.builds(AveragingId, iterations, versions),
    "committed": iterations,
    "closed": iterations,
    "outcome": st.sampled_from(m.Outcome),
    "state_at": iterations,
    "donors": views().map(lambda view: view.members),
    "base": versions,
    "base_hash": st.just("") | hashes,
    "num_parts": st.integers(100, 65535),
    "kept": kept,
    "with_kept": st.booleans(),
    "microbatch": st.builds(MicrobatchId, versions, st.integers(0, 65535), counts),
    "opening": openings,
    "loads": st.lists(loads, max_size=5).map(tuple),
    "hashes": st.lists(st.tuples(stages, hashes), max_size=5).map(tuple),
    "votes": st.lists(st.tuples(node_ids, hashes), max_size=4).map(tuple),
    "nodes": st.lists(node_ids, min_size=1, max_size=4, unique=True).map(tuple),
    "address": addresses,
    "role": st.sampled_from(Role),
    "capacity": st.integers(1, 65536),
    **of_audits(node_ids, counts),
    **of_servers(node_ids, counts, durations),
    **of_rounds(node_ids, addresses, hashes),
    "seal": st.binary(max_size=SEAL_SIZE_MAX_BYTES),
    "stage_index": stages,
    "manifest_sha256": hashes,
    "parameter_hash": hashes,
    "incarnation": numbers,
    "name": names,
    "data_node_index": st.integers(-1, 65535),
    "reason": reasons,
    "failure": reasons,
    "refusal": reasons,
    "node_id": node_ids,
    "data_node": node_ids,
    "nonce": numbers,
    "bans": numbers,
    "version": numbers,
    "statement": st.binary(max_size=1000),
    **dict.fromkeys(("failed", "begun", "at_once"), st.booleans()),
    "view_version": versions,
    "request_id": numbers,
    "query_id": numbers,
    "term": versions,
    "view_term": versions,
    "confirmed_term": versions,
    **dict.fromkeys(("granted", "silent"), st.booleans()),
    "leader": st.none() | node_ids,
    "num_unpaired": flows,
    "latency_s": st.floats(0, 3600),
    "bandwidth_bytes_per_s": st.floats(0, 1e15),
    "compute_s": durations,
    "byways": st.lists(
        st.tuples(node_ids, st.floats(0, 1e15)), max_size=8, unique_by=lambda byway: byway[0]
    ).map(tuple),
    **dict.fromkeys(("num_committed", "num_deferred", "num_reread"), counts),
    "num_local": numbers,
    "num_ahead": st.integers(0, 65535),
    "overlapped": st.booleans(),
    "phase": st.integers(0, 65535),
    "folded": st.dictionaries(stages, st.tuples(counts, numbers), max_size=4).map(
        lambda shares: tuple((stage, *share) for stage, share in shares.items())
    ),
    "averages": st.dictionaries(
        stages, st.tuples(counts, st.floats(0, 1 << 20), durations, counts), max_size=4
    ).map(lambda of: tuple(StageAverages(stage, *told) for stage, told in of.items())),
    "spec": specs,
    "ahead_spec": specs,
    "missing": st.lists(st.integers(0, 65535), max_size=4, unique=True).map(tuple),
    "slow": slow,
    "travelled": travelled,
    "rates": st.dictionaries(node_ids, st.floats(0, 1e15), max_size=4).map(
        lambda of: tuple(of.items())
    ),
    "num_microbatches": counts,
    "num_tokens": numbers,
    "digest": numbers,
    "part": st.integers(0, 65535),
    "loss": st.floats(allow_nan=False, allow_infinity=False),
    "loss_sum": st.floats(allow_nan=False, allow_infinity=False),
    "square_sum": durations,
    "gradient_norm": durations,
    "square_sums": st.lists(
        st.tuples(stages, durations), min_size=1, max_size=5, unique_by=lambda one: one[0]
    ).map(tuple),
    "flow_id": st.builds(FlowId, node_ids, counts),
    "cost_s": durations,
    "sequence": numbers,
    "link_version": numbers,
    "change_id": numbers,
    "epoch": numbers,
    "units": flows,
    "cost": st.floats(0, PATH_COST_MAX),
    **dict.fromkeys(("agreed", "over", "exit"), st.booleans()),
    "walk": st.none() | walks(),
    "places": st.lists(places, min_size=2, max_size=MAX_STEPS, unique=True).map(tuple),
    "is_closed": st.booleans(),
    "hops": hop_lists(min_size=0),
    "costs": link_costs,
    "claims": claim_lists(),
    "routes": st.lists(settled_flows(), max_size=4).map(tuple),
    "path": paths,
    "path_version": versions,
    "owing": st.just(()) | paths,
    "view": views(),
    "view_hash": st.just("") | hashes,
    "change": st.none(),
    "number": counts,
    "next": next_hops,
    "other": node_ids,
    "other_number": counts,
    "other_version": numbers,
    "other_next": next_hops,
    "less": link_uses,
    "more": link_uses,
    "upstream": node_ids,
    "made": st.booleans(),
    "ticket": numbers,
    "arrived": st.booleans(),
    "slack": st.floats(1, SLACK_MAX),
    "again_s": st.floats(0, 86_400),
    "answer": st.booleans(),
    "flows": st.lists(peer_flows, max_size=4, unique_by=lambda flow: flow.number).map(tuple),
}
SPECIAL: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (m.Join, "stage_index"): st.none() | stages,
    (Standing, "committed"): st.none() | BY_NAME["averaging"],
    (Standing, "averaging"): st.booleans(),
    (em.LeaderIs, "address"): st.none() | addresses,
    (m.Capacity, "capacity"): flows,
    (m.FlowAnswer, "flow_id"): st.none() | BY_NAME["flow_id"],
    (m.FlowAnswer, "cost_s"): durations | st.just(math.inf),
    (m.FlowCost, "cost_s"): durations | st.just(math.inf),
    (routing.DraftUnits, "outward"): st.booleans(),
    (gwtf.RequestRedirect, "more"): st.tuples(link_uses, link_uses),
    (m.FlowAnswer, "path"): st.just(()) | paths,
    (routing.RequestChange, "units"): st.integers(1, 65536),
    (routing.ChangeAnswer, "cost"): st.floats(-1e113, 1e113),
    (routing.Claims, "capacity"): flows,
    (routing.Claims, "inward"): link_costs,
    (routing.Claims, "compute_s"): st.floats(0, 86_400),
    (m.LinkReport, "compute_s"): st.floats(0, 86_400),
    (Average, "part"): st.integers(0, 99),
}


def messages_of(cls: type) -> st.SearchStrategy[Any]:
    fields = {
        f.name: SPECIAL.get((cls, f.name), BY_NAME.get(f.name, st.nothing()))
        for f in dataclasses.fields(cls)
    }
    built = st.builds(cls, **fields)
    if cls is Holding:
        return holdings(BY_NAME["averaging"], BY_NAME["microbatch"])
    dependent = {m.Open: opens, m.Mend: mends, BeginRound: begun_rounds}.get(cls)
    return built if dependent is None else dependent(built)


def over_the_wire(message: m.Message) -> codec.Decoded:
    data = codec.encode(RUN, SENDER, 3, 4, message).SerializeToString()
    return read_envelope(data)


@pytest.mark.parametrize("cls", m.MESSAGES, ids=lambda cls: cls.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_every_message_survives_the_wire(cls: type, data: st.DataObject) -> None:
    message = data.draw(messages_of(cls))
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
    "origin of no loss": opening(origin=pb.Origin(source=pb.SOURCE_KEPT)),
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
