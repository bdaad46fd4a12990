"""Activations and gradients that go by way of a data node, and how they are chosen."""

from dataclasses import replace

import pytest

from decod.ids import FlowId, MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.detours import Detours
from decod.protocol.core.effects import Effect, Send, SendTensor
from decod.protocol.core.events import SendFailed
from decod.protocol.core.jobs import Forward
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.microbatch_messages import (
    BackwardGradient,
    Deny,
    ForwardActivation,
)
from decod.protocol.flows.building import Granted, RelayFlow
from decod.protocol.strategy.data_microbatches import DataMicrobatches
from decod.protocol.strategy.relay_microbatches import RelayMicrobatches
from tests.support.flows import data_flows, relay_flows
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R2A,
    R2B,
    Heard,
    context_of,
    end_job,
    flow,
    freed,
    jobs_of,
    mb,
    sent,
    tensor,
    view_of,
)

D1, R3A = NodeId("d1"), NodeId("r3a")
M, THEIRS = mb(0), MicrobatchId(1, 1, 0)
PATH = (R1A, R2A, R3A)
FORWARD = ForwardActivation(ITERATION, M, flow(0), PATH)
GRADIENT = BackwardGradient(ITERATION, M, flow(0), PATH)
MEGABYTE = 1_000_000


def detours(**rates: float) -> Detours:
    """Return those of a node whose links have been measured so: megabytes a second, by peer."""
    links = LinkTable(activation_size_bytes=10 * MEGABYTE, compute_s=0.0)
    for peer, rate in rates.items():
        links.measured(NodeId(peer), latency_s=0.0, bandwidth_bytes_per_s=rate * MEGABYTE)
    return Detours(links)


# --- the choice -----------------------------------------------------------------------------------


def test_only_peers_with_a_slow_link_are_told_and_only_news() -> None:
    forwarding = detours(r2a=1.0, r2b=20.0, d0=10.0)
    told = ((D0, 10.0 * MEGABYTE),)
    assert forwarding.news(R2A, (D0, D1))
    assert forwarding.tell(R2A, (D0, D1)) == told, "d1's was never measured"
    assert not forwarding.news(R2A, (D0, D1))
    assert not forwarding.news(R2B, (D0, D1))
    assert forwarding.tell(R2B, (D0, D1)) == ()
    assert forwarding.tell(D0, (D0, D1)) == (), "its link is quick"
    for _ in range(3):
        forwarding.links.measured(D0, latency_s=0.0, bandwidth_bytes_per_s=9.0 * MEGABYTE)
    assert not forwarding.news(R2A, (D0, D1)), "a tenth"
    for _ in range(3):
        forwarding.links.measured(D0, latency_s=0.0, bandwidth_bytes_per_s=5.0 * MEGABYTE)
    assert forwarding.news(R2A, (D0, D1))
    forwarding.links.measured(D1, latency_s=0.0, bandwidth_bytes_per_s=5.0 * MEGABYTE)
    assert len(forwarding.tell(R2A, (D0, D1))) == 2


# --- relays ---------------------------------------------------------------------------------------


class Relay:
    """r2a between r1a and r3a, whose links to both are slow and to d0 fast."""

    def __init__(self) -> None:
        self.context = context_of(R2A, view_of("d0", "r1a", "r2a", "r3a", "r3b"))
        links = self.context.links = LinkTable(activation_size_bytes=10 * MEGABYTE, compute_s=0.0)
        self.context.detours = Detours(links)
        for peer, rate in ((R1A, 1.0), (R3A, 1.0), (D0, 10.0)):
            links.measured(peer, latency_s=0.0, bandwidth_bytes_per_s=rate * MEGABYTE)
        self.flows = relay_flows(self.context)
        self.flows.entries[flow(0)] = RelayFlow(flow(0), R3A, 2.0)
        self.flows.outflows.paired[flow(0)] = R1A
        self.machine = Heard(RelayMicrobatches(self.context, lambda: self.flows, lambda: True))

    def forward(self, first: int = 1) -> list[Effect]:
        effects = self.machine.activation(D0, FORWARD, tensor(first))
        assert jobs_of(effects) == [Forward(M)]
        end_job(self.context, effects, tensor(first + 1))
        return self.machine.forwarded(0.0, M, tensor(first + 1).id, 1.0)


def test_a_refusal_goes_to_who_has_computed_and_not_to_who_has_passed_it_on() -> None:
    relay = Relay()
    del relay.flows.entries[flow(0)]
    effects = relay.machine.activation(D0, FORWARD, tensor(1))
    assert sent(effects) == [(R1A, Deny(ITERATION, M, flow(0), "no such flow here"))]


# --- data nodes -----------------------------------------------------------------------------------


def begun(context: Context) -> DataMicrobatches:
    """Return d0's machine, with the first microbatch at its begin."""
    flows = data_flows(context)
    flows.complete[flow(0)] = Granted(flow(0), R1A, 3.0, PATH)
    machine = Heard(DataMicrobatches(context, lambda: flows, lambda: None, num_microbatches=1))
    machine.open(0.0)
    end_job(context, machine.can_take(R1A), tensor(1))
    return machine


def home() -> DataMicrobatches:
    """Return d0's, with the first microbatch on its way."""
    machine = begun(context_of(D0, view_of("d0", "d1", "r1a", "r2a", "r2b", "r3a")))
    machine.embedded(0.0, M, tensor(1).id)
    return machine


def test_what_is_for_nobody_that_is_here_is_dropped() -> None:
    machine = home()
    theirs, path = FlowId(D1, 0), (R1A, NodeId("r2x"), R3A)
    gone = replace(FORWARD, microbatch=THEIRS, flow_id=theirs, path=path)
    assert freed(machine.activation(R1A, gone, tensor(2))) == [2]
    assert freed(machine.activation(R2B, replace(gone, path=PATH), tensor(3))) == [3], "not on it"
    stray = replace(GRADIENT, microbatch=THEIRS, flow_id=theirs, path=path)
    assert freed(machine.gradient(R3A, stray, tensor(4))) == [4]


def slow_first_hop() -> DataMicrobatches:
    """Return d0's, with the first microbatch at its begin; d1 is nearer than r1a."""
    context = context_of(D0, view_of("d0", "d1", "r1a", "r2a", "r3a"))
    links = context.links = LinkTable(activation_size_bytes=10 * MEGABYTE, compute_s=0.0)
    context.detours = Detours(links)
    for peer, rate in ((R1A, 1.0), (D1, 10.0)):
        links.measured(peer, latency_s=0.0, bandwidth_bytes_per_s=rate * MEGABYTE)
    return begun(context)


def test_who_can_not_pass_a_tensor_on_tells_who_has_computed_it() -> None:
    machine = home()
    theirs = replace(FORWARD, microbatch=THEIRS, flow_id=FlowId(D1, 0))
    (told,) = machine.undelivered(SendFailed(R2A, theirs, "cut", tensor(2).id))
    assert isinstance(told, Send)
    assert told.to == R1A
    assert isinstance(told.message, Deny)
    assert told.message.microbatch == THEIRS
    assert machine.undelivered(SendFailed(R1A, FORWARD, "cut", tensor(3).id)) == [], "its own"


@pytest.mark.parametrize("told", [True, False])
def test_what_is_stuck_goes_another_way_once(*, told: bool) -> None:
    """The data node on the way says so, or can't be reached itself."""
    machine = slow_first_hop()
    machine.embedded(0.0, M, tensor(1).id)
    failed = SendFailed(D1, FORWARD, "cut", tensor(1).id)
    deny = Deny(ITERATION, M, flow(0), "it can't be passed on")
    effects = machine.denied(1.0, D1, deny) if told else machine.undelivered(failed)
    assert effects == [SendTensor(R1A, FORWARD, tensor(1).id)]
    assert (machine.denied(2.0, D1, deny) if told else machine.undelivered(failed)) == []
