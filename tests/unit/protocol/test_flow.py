"""Flows are built from the sinks backwards, and stay paired whatever happens to messages."""

import math
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.ids import FlowId, NodeId
from decod.protocol.core.effects import Send
from decod.protocol.core.messages.routing_messages import (
    FlowAnswer,
    FlowCost,
    RequestFlow,
    Withdraw,
)
from decod.protocol.core.messages.scopes import Message
from decod.protocol.flows.building import DataFlows, RelayFlows
from tests.support.flows import data_flows, relay_flows
from tests.unit.protocol.cast import (
    D0,
    D1,
    R1A,
    R2A,
    STRANGER,
    Heard,
    context_of,
    flow,
    member,
    notes_of,
    sent,
    view_of,
)

VIEW = view_of("d0", "r1a", "r2a")
HOP_S = 1.05
"""Cost of a link between nodes that compute for 1 s, nobody having timed it."""


def cost(cost_s: float, num: int, data_node: NodeId = D0) -> FlowCost:
    return FlowCost(1, data_node, cost_s, num, compute_s=1.0)


def request(request_id: int, cost_s: float = 0.0, data_node: NodeId = D0) -> RequestFlow:
    return RequestFlow(1, request_id, data_node, cost_s)


def answer(
    request_id: int, flow_id: FlowId | None, cost_s: float = 0.0, num: int = 0, *path: NodeId
) -> FlowAnswer:
    return FlowAnswer(1, request_id, flow_id, cost_s, num, path)


def sink() -> Heard:
    flows = Heard(data_flows(context_of(D0, VIEW)))
    flows.activate(0.0)
    return flows


def relay(node: NodeId = R2A, *, active: bool = True) -> Heard:
    flows = Heard(relay_flows(context_of(node, VIEW)))
    if active:
        flows.activate(0.0)
    return flows


def with_flow(flows: Heard, sender: NodeId = D0, *, at_s: float = 0.0) -> Heard:
    """Let a relay get flow 0 from `sender` at no cost, and announce what it then offers."""
    flows.announced(at_s, sender, cost(0.0, 1))
    flows.answered(at_s, sender, answer(1, flow(0)))
    return flows


# --- offering -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sender", "asked"),
    [
        (R1A, request(1)),
        (STRANGER, request(1)),
        (R2A, request(1, data_node=D1)),
        (R2A, request(1, cost_s=-0.1)),
    ],
)
def test_who_may_not_ask_or_believes_a_lower_price_is_refused(
    sender: NodeId, asked: RequestFlow
) -> None:
    flows = sink()
    ((_, reply),) = sent(flows.requested(1.0, sender, asked))
    assert isinstance(reply, FlowAnswer)
    assert reply.flow_id is None
    known = asked.data_node == D0
    assert (reply.cost_s, reply.num_unpaired) == ((0.0, 2) if known else (math.inf, 0))
    assert flows.outflows.paired == {}


# --- asking ---------------------------------------------------------------------------------------


def test_a_data_node_asks_only_for_flows_to_itself() -> None:
    view = view_of("d0", "d1", "r1a")
    flows = Heard(data_flows(context_of(D0, view)))
    flows.activate(0.0)
    assert flows.announced(0.0, R1A, cost(1.0, 1, D1)) == []
    assert flows.announced(0.0, R1A, cost(1.0, 1)) == [Send(R1A, request(1, 1.0))]
    effects = flows.answered(0.0, R1A, answer(1, flow(0), 1.0, 0, R1A))
    assert notes_of(effects) == ["flow.completed"]
    assert flows.complete[flow(0)].cost_s == pytest.approx(1.0 + HOP_S)
    assert flows.answered(0.0, R1A, answer(1, flow(1), 1.0)) == []
    assert flows.num_complete == 1


def test_a_relay_forgets_a_broken_flow_and_asks_for_another() -> None:
    flows = with_flow(relay())
    flows.announced(1.0, D0, cost(0.0, 3))
    flows.answered(1.0, D0, answer(2, flow(1), num=2))
    effects = flows.drop(2.0, flow(0))
    assert (R1A, cost(HOP_S, 1)) in sent(effects)
    assert (D0, request(3)) in sent(effects)
    assert flows.drop(2.0, flow(0)) == []


# --- quotas ---------------------------------------------------------------------------------------


def test_scarce_capacity_is_shared_until_a_bound_falls() -> None:
    """Of two equal relays neither takes more than its half at first; later it may."""
    big = [member("r1a", capacity=4), member("r1b", capacity=4)]
    flows = Heard(relay_flows(context_of(R1A, view_of(member("d0", capacity=4), *big))))
    flows.activate(0.0)
    assert len(flows.announced(0.0, D0, cost(0.0, 4))) == 2
    for k in (1, 2):
        flows.answered(0.0, D0, answer(k, flow(k), num=2))
    assert sent(flows.overdue(1.0)) == [(D0, cost(HOP_S, 2))]
    assert flows.overdue(5.0) == [Send(D0, cost(HOP_S, 2))]
    assert flows.deadline_s == 10.0
    assert len([m for _, m in sent(flows.overdue(10.0)) if isinstance(m, RequestFlow)]) == 2


def test_the_bound_on_data_nodes_falls_after_one_answer_timeout() -> None:
    """A relay that only knows another data node's flows takes those, within its share."""
    view = view_of(member("d0", capacity=2), member("d1", capacity=2), "r1a", "r1b")
    flows = Heard(relay_flows(context_of(R1A, view)))
    flows.activate(0.0)
    assert flows.announced(0.0, D1, cost(0.0, 2, D1)) == []
    assert len(flows.overdue(5.0)) == 2


def test_a_relay_that_waits_for_its_state_is_not_woken_for_its_bounds() -> None:
    assert relay(active=False).deadline_s is None


# --- any order ------------------------------------------------------------------------------------


@dataclass
class Mesh:
    """Data nodes and relays that talk over links which lose, repeat and reorder."""

    rng: Random
    lossy: bool
    now_s: float = 0.0
    flows: dict[NodeId, DataFlows | RelayFlows] = field(default_factory=dict)
    flight: list[tuple[NodeId, NodeId, Message]] = field(default_factory=list)

    def start(self, *names: str) -> None:
        view = view_of(*(member(n, capacity=self.rng.randint(1, 3)) for n in names))
        for node in view.by_id:
            made = data_flows if node.startswith("d") else relay_flows
            self.flows[node] = made(context_of(node, view))
        for node, flows in self.flows.items():
            flows.activate(0.0)
            self.carry(node)

    def carry(self, node: NodeId) -> None:
        for to, message in sent(self.flows[node]._context.out.taken()):
            assert not isinstance(message, RequestFlow) or math.isfinite(message.cost_s)
            self.flight.append((node, to, message))

    def turn(self) -> None:
        """Deliver, lose or repeat one message, or let time pass."""
        if not self.flight or self.rng.random() < 0.1:
            self.now_s += self.rng.uniform(0.0, 3.0)
            for node, flows in self.flows.items():
                deadline_s = flows.deadline_s
                if deadline_s is not None and deadline_s <= self.now_s:
                    flows.overdue(self.now_s)
                    self.carry(node)
            return
        at = self.rng.randrange(len(self.flight))
        fate = self.rng.random() if self.lossy else 1.0
        sender, to, message = self.flight[at] if fate < 0.1 else self.flight.pop(at)
        # A withdrawal is not lost: it is sent again until it arrives.
        if 0.1 <= fate < 0.2 and not isinstance(message, Withdraw):
            return
        self.handle(self.flows[to], sender, message)
        self.carry(to)

    def handle(self, flows: DataFlows | RelayFlows, sender: NodeId, message: Message) -> None:
        match message:
            case FlowCost():
                flows.announced(self.now_s, sender, message)
            case RequestFlow():
                flows.requested(self.now_s, sender, message)
            case FlowAnswer():
                flows.answered(self.now_s, sender, message)
            case Withdraw():
                flows.withdrawn(self.now_s, sender, message)
            case _:
                raise AssertionError(message)

    def holders(self, node: NodeId) -> dict[FlowId, NodeId]:
        """Return the flows that a node got, each with the node that gave it."""
        flows = self.flows[node]
        if isinstance(flows, DataFlows):
            return {f: granted.peer for f, granted in flows.complete.items()}
        return {f: entry.downstream for f, entry in flows.entries.items()}

    def check(self) -> None:
        for node, flows in self.flows.items():
            outflows = flows.outflows
            assert not outflows.paired.keys() & outflows.unpaired.keys()
            held = self.holders(node)
            capacity = flows._context.member.capacity
            assert len(held) + flows.num_pending <= capacity, "capacity is never exceeded (I1)"
            if isinstance(flows, RelayFlows):
                assert held.keys() == outflows.paired.keys() | outflows.unpaired.keys()
            for flow_id, giver in held.items():
                assert self.flows[giver].outflows.paired.get(flow_id) == node, "pairs agree (I1)"


NAMES = ("d0", "d1", "r1a", "r1b", "r2a", "r2b")


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), lossy=st.booleans())
def test_whatever_happens_to_messages_flows_stay_paired(seed: int, lossy: bool) -> None:
    mesh = Mesh(Random(seed), lossy)
    mesh.start(*NAMES)
    for _ in range(150):
        mesh.turn()
        mesh.check()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_once_messages_arrive_all_flows_that_fit_are_built(seed: int) -> None:
    """With one data node and one relay a stage, the tightest of the three decides."""
    mesh = Mesh(Random(seed), lossy=False)
    mesh.start("d0", "r1a", "r2a")
    for _ in range(300):
        mesh.turn()
    mesh.check()
    capacities = [f._context.member.capacity for f in mesh.flows.values()]
    data = mesh.flows[D0]
    assert data.num_complete == min(capacities)
    for flow_id, granted in mesh.holders(D0).items():
        assert granted == R1A
        assert mesh.holders(R1A)[flow_id] == R2A
        assert mesh.holders(R2A)[flow_id] == D0, "a flow ends where it began"
