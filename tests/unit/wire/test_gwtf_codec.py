"""Messages of GWTF's own search: what a peer may not say, how large they get, what is handed on."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from decod.errors import MalformedMessageError
from decod.ids import FlowId, NodeId, RunId
from decod.protocol.core.messages import Message
from decod.protocol.core.messages import routing_messages as m
from decod.protocol.flows.position import LINK_COST_MAX
from decod.wire import codec
from decod.wire.v1 import control_pb2 as pb

RUN = RunId("r" * 26)
SENDER = NodeId("s" * 52)
FLOW = FlowId(NodeId("d" * 52), 0)
MESSAGE_SIZE_MAX_BYTES = 4 * 2**20

base32 = "abcdefghijklmnopqrstuvwxyz234567"


def node(index: int) -> NodeId:
    a, b, c, d = (base32[index >> shift & 31] for shift in (0, 5, 10, 15))
    return NodeId(a + b + c + d + "a" * 48)


def over_the_wire(message: Message) -> Message:
    data = codec.encode(RUN, SENDER, 1, 1, message).SerializeToString()
    return codec.decode(codec.parse(pb.Envelope, data)).message


def size_bytes(message: Message) -> int:
    return codec.encode(RUN, SENDER, 1, 1, message).ByteSize()


# --- what a peer may not say ----------------------------------------------------------------


def envelope(**body: Any) -> pb.Envelope:
    return pb.Envelope(run_id=RUN, sender_id=SENDER, term=1, sequence=1, **body)


def next_hop(**changes: Any) -> pb.NextHop:
    return pb.NextHop(**{"peer": node(1), "number": 1, **changes})


def use(**changes: Any) -> pb.LinkUse:
    return pb.LinkUse(**{"cost": 1.0, "num_flows": 1, **changes})


def flow(number: int = 1, **changes: Any) -> pb.PeerFlow:
    ends = {"data_node": node(3), "upstream": node(2), "next": next_hop()}
    return pb.PeerFlow(**{"number": number, **ends, **changes})


def flows(*listed: pb.PeerFlow, **changes: Any) -> pb.Envelope:
    return envelope(peer_flows=pb.PeerFlows(**{"flows": listed, **changes}))


def link(index: int, cost: float = 0.0) -> pb.LinkCost:
    return pb.LinkCost(node_id=node(index), cost=cost)


def exchange(**changes: Any) -> pb.Envelope:
    fields: dict[str, Any] = {
        "data_node": node(3),
        "next": next_hop(),
        "other": node(4),
        "other_next": next_hop(peer=node(5)),
        "less": use(),
        "more": use(),
    }
    return envelope(exchange_hops=pb.ExchangeHops(**{**fields, **changes}))


def redirect(**changes: Any) -> pb.Envelope:
    fields: dict[str, Any] = {
        "data_node": node(3),
        "other": node(4),
        "upstream": node(2),
        "next": next_hop(),
        "more": [use(), use()],
    }
    return envelope(request_redirect=pb.RequestRedirect(**{**fields, **changes}))


GOOD: dict[str, pb.Envelope] = {
    "query": envelope(peer_query=pb.PeerQuery(view_version=2**48)),
    "flows": flows(flow(1), flow(2, upstream_cost=1e9), costs=[link(1, 1e9), link(2)]),
    "no flows": flows(),
    "exchange": exchange(next=next_hop(number=2**31 - 1)),
    "redirect": redirect(),
    "redirect between passes of one data node": redirect(upstream=node(1)),
    "answer": envelope(hops_answer=pb.HopsAnswer(change_id=2**63 - 1, agreed=True)),
    "decision": envelope(hops_decision=pb.HopsDecision(made=True)),
}

BAD: dict[str, pb.Envelope] = {
    "negative view version": envelope(peer_query=pb.PeerQuery(view_version=-1)),
    "view version too large": envelope(peer_query=pb.PeerQuery(view_version=2**48 + 1)),
    "too many flows": flows(*(flow(i) for i in range(m.PEER_FLOWS_MAX + 1))),
    "flow twice": flows(flow(1), flow(1)),
    "flow at a negative number": flows(flow(-1)),
    "flow of a negative version": flows(flow(version=-1)),
    "flow to no data node": flows(flow(data_node="")),
    "flow from no node": flows(flow(upstream="x")),
    "flow over a link of negative cost": flows(flow(upstream_cost=-1.0)),
    "flow over a link of cost NaN": flows(flow(upstream_cost=math.nan)),
    "flow over a link too dear": flows(flow(upstream_cost=1.1e9)),
    "flow that goes nowhere": flows(pb.PeerFlow(data_node=node(3), upstream=node(2))),
    "flow that goes on to no node": flows(flow(next=next_hop(peer="A" * 52))),
    "flow that goes on at a negative number": flows(flow(next=next_hop(number=-1))),
    "link twice": flows(costs=[link(1), link(1)]),
    "link to no node": flows(costs=[pb.LinkCost()]),
    "link too dear": flows(costs=[link(1, 1.1e9)]),
    "link of cost NaN": flows(costs=[link(1, math.nan)]),
    "exchange without next": exchange(next=None),
    "exchange without the other's next": exchange(other_next=None),
    "exchange without the link it leaves": exchange(less=None),
    "exchange without the link it takes": exchange(more=None),
    "exchange of a negative id": exchange(change_id=-1),
    "exchange to no data node": exchange(data_node=""),
    "exchange of a negative number": exchange(number=-1),
    "exchange with no node": exchange(other="x"),
    "exchange with a negative number": exchange(other_number=-1),
    "exchange with a negative version": exchange(other_version=-1),
    "exchange of a link of negative cost": exchange(less=use(cost=-1.0)),
    "exchange of an infinite link": exchange(less=use(cost=math.inf)),
    "exchange of a link of cost NaN": exchange(more=use(cost=math.nan)),
    "exchange of a link of negative use": exchange(more=use(num_flows=-1)),
    "exchange of a link of too much use": exchange(less=use(num_flows=65537)),
    "redirect without next": redirect(next=None),
    "redirect of a negative id": redirect(change_id=-1),
    "redirect to no data node": redirect(data_node="x"),
    "redirect of a negative number": redirect(number=-1),
    "redirect from no other": redirect(other=""),
    "redirect of a negative other number": redirect(other_number=-1),
    "redirect of a negative other version": redirect(other_version=-1),
    "redirect from no node": redirect(upstream=""),
    "redirect over no link": redirect(more=[]),
    "redirect over one link": redirect(more=[use()]),
    "redirect over three links": redirect(more=[use()] * 3),
    "redirect over a link too dear": redirect(more=[use(), use(cost=1.1e9)]),
    "answer of a negative id": envelope(hops_answer=pb.HopsAnswer(change_id=-1)),
    "decision of a negative id": envelope(hops_decision=pb.HopsDecision(change_id=-1)),
}


@pytest.mark.parametrize("name", GOOD)
def test_the_good_messages_that_the_bad_ones_vary_are_accepted(name: str) -> None:
    message = codec.decode(GOOD[name]).message
    assert over_the_wire(message) == message


@pytest.mark.parametrize("name", BAD)
def test_bad_fields_are_malformed(name: str) -> None:
    with pytest.raises(MalformedMessageError):
        codec.decode(BAD[name])


# --- what is handed on ----------------------------------------------------------------------


def test_own_costs_are_cut_to_what_may_travel() -> None:
    """A link may be broken."""

    def redirect(link: float) -> m.RequestRedirect:
        return m.RequestRedirect(
            view_version=1,
            change_id=1,
            data_node=node(3),
            number=1,
            other=node(4),
            other_number=1,
            other_version=1,
            upstream=node(2),
            next=m.NextHop(node(1), 1),
            more=(m.LinkUse(link, 0), m.LinkUse(link, 1)),
        )

    def flows(link: float) -> m.PeerFlows:
        ways = m.PeerFlow(1, 1, node(3), node(2), link, m.NextHop(node(1), 1), open=True)
        return m.PeerFlows(1, (ways,), ((node(1), link),))

    kinds: list[Callable[[float], Message]] = [redirect, flows]
    for kind in kinds:
        assert over_the_wire(kind(math.inf)) == kind(LINK_COST_MAX)


# --- size -----------------------------------------------------------------------------------


def test_the_flows_of_a_node_before_sixty_thousand_relays_fit_into_a_message() -> None:
    costs = tuple((node(i), 0.1) for i in range(60_000))
    next_hop = m.NextHop(node(1), 2**31 - 1)
    listed = tuple(
        m.PeerFlow(2**31 - 1 - i, 2**63 - 1, node(3), node(2), 0.1, next_hop, open=True)
        for i in range(m.PEER_FLOWS_MAX)
    )
    assert size_bytes(m.PeerFlows(2**48, listed, ())) < 220 * m.PEER_FLOWS_MAX
    assert size_bytes(m.PeerFlows(2**48, listed, costs)) < MESSAGE_SIZE_MAX_BYTES
