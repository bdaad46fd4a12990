"""The codec's table for the messages of `decod.protocol.core.messages.gwtf`.

**Size.** A node tells at most `PEER_FLOWS_MAX` flows, of at most 220 bytes each, and the costs of
its links, 65 bytes each. So it can describe a next stage of 60000 relays. A request has a fixed
number of places.

**Values that are passed on.** A request repeats what its sender was told of a flow. Numbers,
versions, nodes and costs have the same limits in all messages, so every accepted value can be sent
on.
"""

from collections.abc import Mapping

from decod.protocol.core.messages import gwtf as m
from decod.wire import fields as f
from decod.wire import validate
from decod.wire.routing_codec import LINK_COST, LINK_COSTS


def _verify_peer_flows(message: m.PeerFlows) -> None:
    validate.unique("flows", [(flow.data_node, flow.number) for flow in message.flows])
    validate.unique("costs", [node_id for node_id, _ in message.costs])


_NEXT = f.Struct(m.NextHop, {"peer": f.NODE_ID, "number": f.COUNT})
_USE = f.Struct(m.LinkUse, {"cost": LINK_COST, "num_flows": f.NUM_FLOWS})
_PEER_FLOW = f.Struct(
    m.PeerFlow,
    {
        "number": f.COUNT,
        "version": f.NUMBER,
        "data_node": f.NODE_ID,
        "upstream": f.NODE_ID,
        "upstream_cost": LINK_COST,
        "next": _NEXT,
        "open": f.BOOLEAN,
    },
)

_VIEW: Mapping[str, f.Field] = {"view_version": f.ITERATION}
_CHANGE: Mapping[str, f.Field] = {**_VIEW, "change_id": f.NUMBER}
_REQUEST: Mapping[str, f.Field] = {
    **_CHANGE,
    "data_node": f.NODE_ID,
    "number": f.COUNT,
    "next": _NEXT,
    "other": f.NODE_ID,
    "other_number": f.COUNT,
    "other_version": f.NUMBER,
}

BODIES: Mapping[str, f.Struct] = {
    "peer_query": f.Struct(m.PeerQuery, _VIEW),
    "peer_flows": f.Struct(
        m.PeerFlows,
        {**_VIEW, "flows": f.Repeated(_PEER_FLOW, m.PEER_FLOWS_MAX), "costs": LINK_COSTS},
        _verify_peer_flows,
    ),
    "exchange_hops": f.Struct(
        m.ExchangeHops, {**_REQUEST, "other_next": _NEXT, "less": _USE, "more": _USE}
    ),
    "request_redirect": f.Struct(
        m.RequestRedirect,
        {
            **_REQUEST,
            "upstream": f.NODE_ID,
            "more": f.Repeated(_USE, 2, num_min=2),
        },
    ),
    "hops_answer": f.Struct(m.HopsAnswer, {**_CHANGE, "agreed": f.BOOLEAN}),
    "hops_decision": f.Struct(m.HopsDecision, {**_CHANGE, "made": f.BOOLEAN}),
}
