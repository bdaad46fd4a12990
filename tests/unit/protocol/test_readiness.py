"""CAN TAKE goes from the sinks to the sources (GWTF V-E)."""

from decod.protocol.core.effects import Send
from decod.protocol.core.messages.microbatch_messages import CanTake
from decod.protocol.flows.building import RelayFlow
from decod.protocol.strategy.pipeline import Readiness
from tests.support.flows import data_flows, relay_flows
from tests.unit.protocol.cast import (
    D0,
    D1,
    ITERATION,
    R1A,
    R1B,
    R2A,
    R2B,
    Heard,
    context_of,
    flow,
    view_of,
)

VIEW = view_of("d0", "d1", "r1a", "r1b", "r2a", "r2b")


def test_a_relay_tells_who_sends_to_it_when_all_behind_those_flows_are_ready() -> None:
    context = context_of(R1A, VIEW)
    flows, readiness = relay_flows(context), Heard(Readiness(context))
    for slot, downstream, upstream in ((0, R2A, D0), (1, R2B, D0), (2, R2B, D1)):
        flows.entries[flow(slot)] = RelayFlow(flow(slot), downstream, 1.0)
        flows.outflows.paired[flow(slot)] = upstream
    flows.entries[flow(3)] = RelayFlow(flow(3), R2A, 1.0)  # Nobody sends along it yet.
    assert readiness.tell(flows) == []
    readiness.peer_ready(R2B)
    assert readiness.tell(flows) == [Send(D1, CanTake(ITERATION))]
    readiness.peer_ready(R2A)
    assert readiness.tell(flows) == [Send(D0, CanTake(ITERATION))]
    assert readiness.tell(flows) == [], "each is told once"
    readiness.reset()
    assert readiness.tell(flows) == []
    readiness.peer_ready(R2A)
    readiness.peer_ready(R2B)
    assert readiness.tell(flows) == [Send(D0, CanTake(ITERATION)), Send(D1, CanTake(ITERATION))]


def test_a_data_node_begins_because_nothing_lies_behind_it() -> None:
    context = context_of(D0, VIEW)
    flows, readiness = data_flows(context), Heard(Readiness(context))
    assert readiness.tell(flows) == []
    flows.outflows.paired = {flow(0): R2A, flow(1): R2B, flow(2): R2A}
    assert readiness.tell(flows) == [Send(R2A, CanTake(ITERATION)), Send(R2B, CanTake(ITERATION))]
    flows.outflows.paired[flow(3)] = R1B
    assert readiness.tell(flows) == [Send(R1B, CanTake(ITERATION))]
