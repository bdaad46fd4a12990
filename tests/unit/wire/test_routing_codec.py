"""Messages about routing: what a peer may not say, how large they get, what may be handed on."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from decod.errors import MalformedMessageError
from decod.ids import FlowId, NodeId, RunId
from decod.limits import CAPACITY_MAX, STAGE_INDEX_MAX
from decod.planner.graph import Objective
from decod.protocol.core.effects import EffectSink
from decod.protocol.core.messages import Message
from decod.protocol.core.messages import routing_messages as m
from decod.protocol.core.messages.routing_messages import CHANGE_COST_MAX, PATH_COST_MAX
from decod.protocol.core.residual import MAX_STEPS, STEP_COST_MAX, Walk
from decod.protocol.flows.position import LINK_COST_MAX, Position
from decod.wire import codec
from decod.wire.v1 import control_pb2 as pb

RUN = RunId("r" * 26)
SENDER = NodeId("s" * 52)
FLOW = FlowId(NodeId("d" * 52), 0)
MESSAGE_SIZE_MAX_BYTES = 4 * 2**20

base32 = "abcdefghijklmnopqrstuvwxyz234567"


def node(index: int) -> NodeId:
    return NodeId(base32[index % 32] + base32[index // 32 % 32] + base32[index // 1024] + "a" * 49)


def over_the_wire(message: Message) -> Message:
    data = codec.encode(RUN, SENDER, 1, 1, message).SerializeToString()
    return codec.decode(codec.parse(pb.Envelope, data)).message


def size_bytes(message: Message) -> int:
    return codec.encode(RUN, SENDER, 1, 1, message).ByteSize()


# --- what a peer may not say ----------------------------------------------------------------


def envelope(**body: Any) -> pb.Envelope:
    return pb.Envelope(run_id=RUN, sender_id=SENDER, term=1, sequence=1, **body)


def walk(*steps: pb.WalkStep, units: int = 1) -> pb.Envelope:
    return envelope(residual_walk=pb.ResidualWalk(walk=pb.WalkSteps(steps=steps, units=units)))


def step(index: int, *, cost: float = 0.0, side: bool = True) -> pb.WalkStep:
    return pb.WalkStep(node_id=node(index), exit=side, cost=cost)


def change(*places: pb.WalkPlace, units: int = 1) -> pb.Envelope:
    return envelope(request_change=pb.RequestChange(places=places, units=units))


def place(index: int, *, side: bool = True) -> pb.WalkPlace:
    return pb.WalkPlace(node_id=node(index), exit=side)


def hop(index: int, *costs: pb.LinkCost) -> pb.Hop:
    return pb.Hop(node_id=node(index), costs=costs)


def link(index: int, cost: float = 0.0) -> pb.LinkCost:
    return pb.LinkCost(node_id=node(index), cost=cost)


HOME = pb.FlowId(data_node="d" * 52)


def claim(*hops: pb.Hop) -> pb.Envelope:
    return envelope(claim=pb.Claim(flow_id=HOME, hops=hops))


def claims(table: pb.ClaimTable | None, **changes: Any) -> pb.Envelope:
    return envelope(claims=pb.Claims(claims=table, **changes))


def table(*indexes: Sequence[int], **changes: Any) -> pb.ClaimTable:
    """Two nodes with one hop each, and claims of these indexes."""
    hops = [pb.IndexedHop(node_index=i) for i in range(2)]
    fields: dict[str, Any] = {"node_ids": [node(0), node(1)], "hops": hops}
    listed = [pb.IndexedClaim(hop_indexes=claim) for claim in indexes]
    return pb.ClaimTable(**{**fields, **changes}, claims=listed)


def indexed(*costs: pb.IndexedCost) -> list[pb.IndexedHop]:
    return [pb.IndexedHop(node_index=0, costs=costs)]


def routes(*paths: Sequence[str]) -> pb.Envelope:
    return settled(*(pb.SettledFlow(path=path, costs=[1.0] * (len(path) + 1)) for path in paths))


def settled(*flows: pb.SettledFlow) -> pb.Envelope:
    return envelope(routes=pb.Routes(routes=flows))


def install(*path: str) -> pb.Envelope:
    return envelope(install=pb.Install(flow_id=HOME, path=path))


GOOD: dict[str, pb.Envelope] = {
    "offer": envelope(draft_offer=pb.DraftOffer(units=65536, cost=4e12)),
    "no walk": envelope(residual_walk=pb.ResidualWalk()),
    "walk": walk(step(0), step(0, side=False, cost=-1e111), step(1, cost=0.0)),
    "change": change(place(0), place(1)),
    "answer": envelope(change_answer=pb.ChangeAnswer(cost=-1e113)),
    "claim": claim(hop(0, link(1, 1e9)), hop(1)),
    "claims": claims(table([0, 1], [1]), costs=[link(0)], capacity=2),
    "no claims": claims(pb.ClaimTable()),
    "routes": routes([node(0), node(1)], [node(1)]),
    "no routes": routes(),
    "install": install(node(0), node(1)),
}

BAD: dict[str, pb.Envelope] = {
    "negative view version": envelope(request_units=pb.RequestUnits(view_version=-1)),
    "view version too large": envelope(units_answer=pb.UnitsAnswer(view_version=2**48 + 1)),
    "negative sequence": envelope(draft_offer=pb.DraftOffer(sequence=-1)),
    "negative units offered": envelope(draft_offer=pb.DraftOffer(units=-1)),
    "too many units offered": envelope(draft_offer=pb.DraftOffer(units=65537)),
    "negative offer": envelope(draft_offer=pb.DraftOffer(cost=-1e-9)),
    "infinite offer": envelope(draft_offer=pb.DraftOffer(cost=math.inf)),
    "offer NaN": envelope(draft_offer=pb.DraftOffer(cost=math.nan)),
    "offer too dear": envelope(draft_offer=pb.DraftOffer(cost=4.1e12)),
    "negative request id": envelope(request_units=pb.RequestUnits(request_id=-1)),
    "too many units requested": envelope(request_units=pb.RequestUnits(units=65537)),
    "too many units given": envelope(units_answer=pb.UnitsAnswer(units=65537)),
    "negative link version": envelope(draft_units=pb.DraftUnits(link_version=-1)),
    "negative units on a link": envelope(draft_units=pb.DraftUnits(units=-1)),
    "walk without steps": walk(),
    "walk too long": walk(*(step(i) for i in range(MAX_STEPS + 1))),
    "walk without units": walk(step(0), units=0),
    "walk of too many units": walk(step(0), units=65537),
    "walk in a circle": walk(step(0), step(1), step(0)),
    "walk that begins at a cost": walk(step(0, cost=1.0)),
    "walk with too great a reward": walk(step(0, cost=-1.1e111)),
    "walk with a step too dear": walk(step(0), step(1, cost=1.1e111)),
    "walk with a step too cheap": walk(step(0), step(1, cost=1e110), step(2, cost=-1e111)),
    "walk with a cost of NaN": walk(step(0), step(1, cost=math.nan)),
    "walk with an infinite cost": walk(step(0), step(1, cost=-math.inf)),
    "walk over no node": walk(pb.WalkStep(node_id="x")),
    "negative walk sequence": envelope(residual_walk=pb.ResidualWalk(sequence=-1)),
    "change without places": change(),
    "change at one place": change(place(0)),
    "change too long": change(*(place(i) for i in range(MAX_STEPS + 1))),
    "change in an eight": change(place(0), place(1), place(0), place(2)),
    "change of no units": change(place(0), place(1), units=0),
    "change of too many units": change(place(0), place(1), units=65537),
    "change over no node": change(place(0), pb.WalkPlace(node_id="A" * 52)),
    "negative change id": envelope(change_answer=pb.ChangeAnswer(change_id=-1)),
    "answer NaN": envelope(change_answer=pb.ChangeAnswer(cost=math.nan)),
    "answer infinite": envelope(change_answer=pb.ChangeAnswer(cost=-math.inf)),
    "answer too dear": envelope(change_answer=pb.ChangeAnswer(cost=2.1e113)),
    "negative units reserved": envelope(change_answer=pb.ChangeAnswer(units=-1)),
    "too many units decided": envelope(change_decision=pb.ChangeDecision(units=65537)),
    "claim of no flow": envelope(claim=pb.Claim()),
    "negative epoch": envelope(claim=pb.Claim(flow_id=HOME, epoch=-1)),
    "claim in a circle": claim(hop(0), hop(1), hop(0)),
    "claim with too many hops": claim(*(hop(i) for i in range(4096))),
    "claim past no node": claim(pb.Hop(node_id="")),
    "hop with a link twice": claim(hop(0, link(1), link(1))),
    "hop with a link to nowhere": claim(hop(0, pb.LinkCost())),
    "hop with a negative cost": claim(hop(0, link(1, -1.0))),
    "hop with an infinite cost": claim(hop(0, link(1, math.inf))),
    "hop with a cost of NaN": claim(hop(0, link(1, math.nan))),
    "hop with a cost too high": claim(hop(0, link(1, 1.1e9))),
    "hop with a link to it twice": claim(pb.Hop(node_id=node(0), inward=[link(1), link(1)])),
    "hop with a link to it too dear": claim(pb.Hop(node_id=node(0), inward=[link(1, 1.1e9)])),
    "hop with a negative pass": claim(pb.Hop(node_id=node(0), compute_s=-1.0)),
    "hop with a pass of NaN": claim(pb.Hop(node_id=node(0), compute_s=math.nan)),
    "claims without a table": claims(None),
    "negative capacity": claims(table(), capacity=-1),
    "capacity too large": claims(table(), capacity=65537),
    "claims with a cost of a link twice": claims(table(), costs=[link(0), link(0)]),
    "claims with a link home twice": claims(table(), inward=[link(0), link(0)]),
    "claims with an endless pass": claims(table(), compute_s=math.inf),
    "too many claims": claims(table(*([[0]] * 65537))),
    "claim without hops": claims(table([])),
    "claim of too many hops": claims(table([0] * 4096)),
    "claim of an unknown hop": claims(table([2])),
    "claim of a hop below 0": claims(table([-1])),
    "claim of a hop twice": claims(table([0, 1, 0])),
    "hop at an unknown node": claims(table(hops=[pb.IndexedHop(node_index=2)])),
    "hop at a node below 0": claims(table(hops=[pb.IndexedHop(node_index=-1)])),
    "link to an unknown node": claims(table(hops=indexed(pb.IndexedCost(node_index=2)))),
    "link to a node below 0": claims(table(hops=indexed(pb.IndexedCost(node_index=-1)))),
    "link twice": claims(table(hops=indexed(pb.IndexedCost(), pb.IndexedCost()))),
    "link from an unknown node": claims(
        table(hops=[pb.IndexedHop(inward=[pb.IndexedCost(node_index=2)])])
    ),
    "link from a node twice": claims(
        table(hops=[pb.IndexedHop(inward=[pb.IndexedCost(), pb.IndexedCost()])])
    ),
    "negative pass in the table": claims(table(hops=[pb.IndexedHop(compute_s=-1.0)])),
    "link too dear": claims(table(hops=indexed(pb.IndexedCost(cost=1.1e9)))),
    "link of cost NaN": claims(table(hops=indexed(pb.IndexedCost(cost=math.nan)))),
    "node twice in the table": claims(table(node_ids=[node(0), node(0)])),
    "no node in the table": claims(table(node_ids=[node(0), "x"])),
    "too many routes": routes(*([[node(0)]] * 65537)),
    "route without relays": routes([]),
    "route in a circle": routes([node(0), node(0)]),
    "route over no node": routes([""]),
    "route without costs": settled(pb.SettledFlow(path=[node(0)])),
    "route with a cost too many": settled(pb.SettledFlow(path=[node(0)], costs=[1, 1, 1])),
    "route with a negative cost": settled(pb.SettledFlow(path=[node(0)], costs=[1, -1])),
    "route with a cost of NaN": settled(pb.SettledFlow(path=[node(0)], costs=[1, math.nan])),
    "route with a cost too high": settled(pb.SettledFlow(path=[node(0)], costs=[1, 1.1e9])),
    "negative settlement": envelope(settle=pb.Settle(epoch=-1)),
    "route too long": routes([node(i) for i in range(4096)]),
    "install without a path": install(),
    "install in a circle": install(node(0), node(1), node(0)),
    "install too long": install(*(node(i) for i in range(4096))),
    "install over no node": install("x"),
}


@pytest.mark.parametrize("name", GOOD)
def test_the_good_messages_that_the_bad_ones_vary_are_accepted(name: str) -> None:
    message = codec.decode(GOOD[name]).message
    assert over_the_wire(message) == message


@pytest.mark.parametrize("name", BAD)
def test_bad_fields_are_malformed(name: str) -> None:
    with pytest.raises(MalformedMessageError):
        codec.decode(BAD[name])


def test_own_walks_with_a_cost_missing_are_a_bug_of_ours() -> None:
    short = Walk(((node(0), True), (node(1), True)), (0.0,), 1)
    with pytest.raises(AssertionError, match="costs"):
        codec.encode(RUN, SENDER, 1, 1, m.ResidualWalk(1, 1, exit=True, walk=short))


# --- what is handed on ----------------------------------------------------------------------


def test_own_costs_are_cut_to_what_may_travel() -> None:
    """A link may be broken, and an offer rests on one that a peer has made."""
    offer = over_the_wire(m.DraftOffer(1, 1, 1, math.inf))
    assert offer == m.DraftOffer(1, 1, 1, PATH_COST_MAX)
    sent = m.Claim(1, 1, FLOW, (m.Hop(node(0), ((node(1), math.inf),)),))
    received = m.Claim(1, 1, FLOW, (m.Hop(node(0), ((node(1), LINK_COST_MAX),)),))
    assert over_the_wire(sent) == received


@pytest.mark.parametrize("objective", Objective)
def test_a_walk_of_the_dearest_links_can_be_told(objective: Objective) -> None:
    """Whatever a walk costs that a peer has told, it can be told with one's own step added."""
    position = Position(
        node_id=node(0),
        out=EffectSink(),
        data=False,
        capacity=CAPACITY_MAX,
        num_stages=1,
        previous=(),
        next=(node(1),),
        data_peers=(),
        cost_to=lambda _: math.inf,
        cost_from=lambda _: math.inf,
        objective=objective,
    )
    dearest = position.unit_cost(node(1), CAPACITY_MAX, outward=True)
    assert dearest * MAX_STEPS + position.reward < CHANGE_COST_MAX

    told = Walk(((node(0), True),), (0.0,), 1)
    for i in range(1, MAX_STEPS - 1):
        told = told.to((node(i), True), STEP_COST_MAX * 0.99, 1)
    message = m.ResidualWalk(1, 1, exit=True, walk=told.to((node(MAX_STEPS), True), dearest, 1))
    assert over_the_wire(message) == message


def test_as_many_relays_as_the_longest_pipeline_has_fit_on_a_path() -> None:
    assert m.HOPS_MAX == STAGE_INDEX_MAX
    path = tuple(node(i) for i in range(m.HOPS_MAX))
    install = m.Install(1, 1, FLOW, path)
    assert over_the_wire(install) == install


# --- size -----------------------------------------------------------------------------------


def pipeline(*, stages: int, width: int) -> list[list[m.Hop]]:
    """For each stage, the hops of its relays: links lead to all relays of the next."""
    ids = [[node(stage * width + i) for i in range(width)] for stage in range(stages + 1)]
    return [
        [
            m.Hop(
                relay,
                tuple((peer, 0.1 + i) for i, peer in enumerate(after)),
                tuple((peer, 0.2 + i) for i, peer in enumerate(before[:16])),
                0.3,
            )
            for relay in before
        ]
        for before, after in pairwise(ids)
    ]


def test_the_longest_walks_are_small() -> None:
    places = tuple((node(i), True) for i in range(MAX_STEPS))
    walk = Walk(places, tuple(-0.1 * i for i in range(MAX_STEPS)), 65536)
    assert size_bytes(m.ResidualWalk(2**48, 2**62, exit=True, walk=walk)) < 9000
    assert size_bytes(m.RequestChange(2**48, 2**62, places, True, 65536)) < 9000


@pytest.mark.slow
def test_a_claim_through_twenty_thousand_relays_fits_into_a_message() -> None:
    hops = tuple(stage[0] for stage in pipeline(stages=20, width=1000))
    claim = m.Claim(1, 1, FLOW, hops)
    assert size_bytes(claim) < MESSAGE_SIZE_MAX_BYTES / 3
    assert over_the_wire(claim) == claim


def test_claims_that_meet_say_hops_once() -> None:
    """So 64 flows through 12 stages of 300 relays fit, and 640 over 100 relays are small."""
    stages = pipeline(stages=12, width=300)
    apart = tuple(tuple(stage[i] for stage in stages) for i in range(64))
    costs = tuple((hop.node_id, 0.1) for hop in stages[0])
    message = m.Claims(1, 1, 64, costs, apart)
    assert MESSAGE_SIZE_MAX_BYTES * 0.7 < size_bytes(message) < MESSAGE_SIZE_MAX_BYTES

    narrow = pipeline(stages=10, width=10)
    together = tuple(tuple(stage[i % 10] for stage in narrow) for i in range(640))
    message = m.Claims(1, 1, 640, (), together)
    assert size_bytes(message) < 50_000
    assert over_the_wire(message) == message


def test_routes_of_four_thousand_flows_fit_into_a_message() -> None:
    path = tuple(node(i) for i in range(16))
    assert (
        size_bytes(m.Routes(1, 1, (m.SettledFlow(path, (0.1,) * (len(path) + 1)),) * 4096))
        < MESSAGE_SIZE_MAX_BYTES
    )


def test_a_table_of_claims_looks_like_this() -> None:
    first = m.Hop(node(0), ((node(1), 2.5),), (), 0.5)
    last = m.Hop(node(1), (), ((node(0), 2.5),))
    message = m.Claims(3, 4, 2, (), ((first, last), (last,)), ((node(1), 1.5),), 0.25)
    wire = codec.encode(RUN, SENDER, 1, 1, message).claims
    assert wire == pb.Claims(
        view_version=3,
        epoch=4,
        capacity=2,
        inward=[pb.LinkCost(node_id=node(1), cost=1.5)],
        compute_s=0.25,
        claims=pb.ClaimTable(
            node_ids=[node(0), node(1)],
            hops=[
                pb.IndexedHop(
                    node_index=0,
                    costs=[pb.IndexedCost(node_index=1, cost=2.5)],
                    compute_s=0.5,
                ),
                pb.IndexedHop(node_index=1, inward=[pb.IndexedCost(node_index=0, cost=2.5)]),
            ],
            claims=[pb.IndexedClaim(hop_indexes=[0, 1]), pb.IndexedClaim(hop_indexes=[1])],
        ),
    )
