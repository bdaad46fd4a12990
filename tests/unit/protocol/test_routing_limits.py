"""What peers say of the draft can't lead a node beyond what it has promised or may say itself."""

from random import Random

from decod.ids import FlowId, NodeId
from decod.protocol.core.compute_queue import ComputeQueue, TensorStore
from decod.protocol.core.effects import Effect, EffectSink, Send
from decod.protocol.core.messages.routing_messages import (
    HOPS_MAX,
    ChangeAnswer,
    ChangeDecision,
    Claim,
    Claimed,
    DraftUnits,
    Hop,
    RequestChange,
)
from decod.protocol.core.residual import ENTRANCE, EXIT
from decod.protocol.flows.negotiation.negotiated_routing import Negotiation
from decod.protocol.flows.position import Position

HOME, PEER, OTHER, RELAY = NodeId("home"), NodeId("peer"), NodeId("other"), NodeId("relay")
FLOW = FlowId(HOME, 0)


def negotiation(node_id: NodeId, *, data: bool) -> Negotiation:
    """A node that sends to PEER and OTHER, and gets from PEER."""
    out = EffectSink[Effect]()
    position = Position(
        node_id=node_id,
        out=out,
        data=data,
        capacity=4,
        num_stages=1,
        previous=(PEER,),
        next=(PEER, OTHER),
        data_peers=(),
        cost_to=lambda _: 1.0,
        cost_from=lambda _: 1.0,
    )
    compute = ComputeQueue(TensorStore(out), out)
    return Negotiation(position, view_version=1, settler=HOME, compute=compute, rng=Random(1))


def received(node: Negotiation, message: RequestChange | Claim) -> list[Effect]:
    """Return what a node does about a message from PEER."""
    node.received(PEER, message)
    return node.draft.position.out.taken()


def test_a_decision_on_more_units_than_were_reserved_leads_only_those() -> None:
    """Else a link would carry less than nothing."""
    node = negotiation(HOME, data=True)
    link = node.draft.links.outward[PEER]
    link.grow(2)
    from_peer_to_other = ((PEER, ENTRANCE), (HOME, EXIT), (OTHER, ENTRANCE))
    answered = received(node, RequestChange(1, 7, from_peer_to_other, True, 3))
    assert answered == [Send(PEER, ChangeAnswer(1, 7, 2, 0.0))]

    node.received(PEER, ChangeDecision(1, 7, 65536))
    assert (link.units, link.reserved) == (0, 0)
    node.draft.links.tell(1, PEER, outward=True)
    told = node.draft.position.out.taken()
    assert told == [Send(PEER, DraftUnits(1, True, 2, 0, True))]


def test_a_claim_that_has_passed_a_relay_goes_no_further_there() -> None:
    relay = negotiation(RELAY, data=False)
    assert received(relay, Claim(1, 1, FLOW, (Hop(RELAY, ()),))) == []
    assert not relay.draft.frozen


def test_a_claim_longer_than_any_pipeline_goes_no_further() -> None:
    relay = negotiation(RELAY, data=False)
    hops = tuple(Hop(NodeId(str(i)), ()) for i in range(HOPS_MAX))
    assert received(relay, Claim(1, 1, FLOW, hops)) == []
    assert not relay.draft.frozen
    # One hop less is a claim like any other: this relay has no unit for it.
    ended = [Send(HOME, Claimed(1, 1, FLOW, ()))]
    assert received(relay, Claim(1, 1, FLOW, hops[1:])) == ended


def test_a_claim_that_has_passed_no_relay_does_not_end() -> None:
    node = negotiation(HOME, data=True)
    assert received(node, Claim(1, 1, FLOW, ())) == []
    hops = (Hop(RELAY, ()),)
    assert received(node, Claim(1, 1, FLOW, hops)) == [Send(HOME, Claimed(1, 1, FLOW, hops))]
