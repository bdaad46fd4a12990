"""Flows are built from the sinks backwards, and stay paired whatever happens to messages."""

import math
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.ids import FlowId, NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages import FlowAnswer, FlowCost, Message, RequestFlow, Withdraw
from decod.protocol.flows.building import DataFlows, RelayFlows
from tests.support.flows import data_flows, relay_flows
from tests.unit.protocol.cast import (
    D0,
    D1,
    R1A,
    R1B,
    R2A,
    R2B,
    STRANGER,
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


def sink() -> DataFlows:
    flows = data_flows(context_of(D0, VIEW))
    flows.activate(0.0)
    return flows


def relay(node: NodeId = R2A, *, active: bool = True) -> RelayFlows:
    flows = relay_flows(context_of(node, VIEW))
    if active:
        flows.activate(0.0)
    return flows


def with_flow(flows: RelayFlows, sender: NodeId = D0, *, at_s: float = 0.0) -> RelayFlows:
    """Let a relay get flow 0 from `sender` at no cost, and announce what it then offers."""
    flows.announced(at_s, sender, cost(0.0, 1))
    flows.answered(at_s, sender, answer(1, flow(0)))
    return flows


# --- offering -------------------------------------------------------------------------------------


def test_a_data_node_offers_its_slots_to_the_last_stage() -> None:
    flows = data_flows(context_of(D0, VIEW))
    assert flows.activate(0.0) == [Send(R2A, cost(0.0, 2))]


def test_a_request_is_granted_the_cheapest_outflow_and_a_repeat_gets_the_same_answer() -> None:
    flows = sink()
    granted = Send(R2A, answer(1, flow(0), 0.0, 1))
    assert flows.requested(1.0, R2A, request(1))[0] == granted
    assert flows.requested(1.0, R2A, request(1)) == [granted]
    assert flows.outflows.paired == {flow(0): R2A}
    assert flows.requested(1.0, R2A, request(2))[0] == Send(R2A, answer(2, flow(1), 0.0, 0))


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


def test_a_refused_request_may_be_made_again() -> None:
    """Only a grant is remembered: a refusal says what was true then."""
    flows = sink()
    flows.requested(1.0, R2A, request(1, cost_s=-1.0))
    ((_, reply), *_) = sent(flows.requested(1.0, R2A, request(1, cost_s=0.0)))
    assert isinstance(reply, FlowAnswer)
    assert reply.flow_id == flow(0)


def test_a_withdrawn_outflow_is_offered_again() -> None:
    flows = sink()
    flows.requested(1.0, R2A, request(1))
    assert flows.outflows.paired == {flow(0): R2A}
    flows.withdrawn(2.0, R2A, Withdraw(1, 1))
    assert flows.outflows.paired == {}
    assert flows.outflows.unpaired == {flow(0): 0.0, flow(1): 0.0}
    assert flows.withdrawn(2.0, R2A, Withdraw(1, 1)) == []


def test_a_request_that_arrives_after_its_withdrawal_gets_nothing() -> None:
    flows = sink()
    assert flows.withdrawn(1.0, R2A, Withdraw(1, 1)) == []
    ((_, reply),) = sent(flows.requested(1.0, R2A, request(1)))
    assert reply == answer(1, None, 0.0, 2)


def test_a_withdrawal_after_the_flow_broke_changes_nothing() -> None:
    flows = with_flow(relay(R1A), R2A)
    flows.requested(1.0, D0, request(1, cost_s=9.0))
    flows.drop(1.0, flow(0))
    assert flows.withdrawn(1.0, D0, Withdraw(1, 1)) == []
    assert flows.outflows.unpaired == {}


def test_a_burst_of_changes_is_announced_once_at_its_end() -> None:
    """Control messages must not grow with slots times peers (I8)."""
    flows = sink()
    for k in range(2):
        reply = flows.requested(0.01 * k, R2A, request(k + 1))
        assert [type(m) for _, m in sent(reply)] == [FlowAnswer]
    flows.withdrawn(0.03, R2A, Withdraw(1, 1))
    assert flows.deadline_s == pytest.approx(0.05)
    assert flows.overdue(0.04) == []
    assert flows.overdue(0.05) == [Send(R2A, cost(0.0, 1))]
    assert flows.requested(0.2, R2A, request(3))[1:] == [Send(R2A, cost(math.inf, 0))]


def test_changes_that_cancel_out_are_not_announced() -> None:
    flows = sink()
    flows.requested(0.01, R2A, request(1))
    flows.withdrawn(0.02, R2A, Withdraw(1, 1))
    assert flows.overdue(0.05) == []


def test_an_offer_that_nobody_takes_up_is_repeated_less_and_less_often() -> None:
    flows = sink()
    repeats = []
    while (deadline_s := flows.deadline_s) is not None and deadline_s < 300.0:
        assert flows.overdue(deadline_s) == [Send(R2A, cost(0.0, 2))]
        repeats.append(deadline_s)
    assert repeats == [5.0, 15.0, 35.0, 75.0, 135.0, 195.0, 255.0]


def test_nothing_is_repeated_once_all_is_paired() -> None:
    flows = sink()
    for k in (1, 2):
        flows.requested(1.0, R2A, request(k))
    flows.overdue(2.0)
    assert flows.deadline_s is None


def test_before_the_first_stage_only_the_data_node_of_a_flow_is_told() -> None:
    view = view_of("d0", "d1", "r1a")
    flows = relay_flows(context_of(R1A, view))
    flows.activate(0.0)
    flows.announced(0.0, D1, cost(0.0, 1, D1))
    effects = flows.answered(0.0, D1, answer(1, flow(0, D1)))
    assert sent(effects) == [(D1, cost(HOP_S, 1, D1))]


# --- asking ---------------------------------------------------------------------------------------


def test_a_relay_asks_for_what_it_has_room_for() -> None:
    flows = relay()
    assert flows.announced(0.0, D0, cost(0.0, 5)) == [
        Send(D0, request(1)),
        Send(D0, request(2)),
    ]
    assert flows.num_pending == 2
    assert flows.announced(0.0, D0, cost(0.0, 5)) == [], "capacity counts what may still come"


def test_a_relay_that_is_loading_remembers_offers_and_asks_later() -> None:
    flows = relay(active=False)
    assert flows.announced(0.0, D0, cost(0.0, 1)) == []
    assert flows.activate(3.0) == [Send(D0, request(1))]


def test_the_cheapest_outflow_is_asked_for_link_included() -> None:
    view = view_of("d0", "r1a", "r2a", "r2b")
    context = context_of(R1A, view)
    context.links.measured(R2A, latency_s=1.0, bandwidth_bytes_per_s=None)
    context.links.measured(R2B, latency_s=0.1, bandwidth_bytes_per_s=None)
    flows = relay_flows(context)
    flows.announced(0.0, R2A, cost(1.0, 1))
    flows.announced(0.0, R2B, cost(1.5, 2))
    assert sent(flows.activate(0.0)) == [(R2B, request(1, 1.5)), (R2B, request(2, 1.5))]


def test_a_granted_flow_is_offered_on_at_its_whole_cost() -> None:
    flows = relay(R1A)
    flows.announced(0.0, R2A, cost(HOP_S, 1))
    effects = flows.answered(0.0, R2A, answer(1, flow(0), HOP_S, 0, R2A))
    assert flows.entries[flow(0)].downstream == R2A
    assert sent(effects) == [(D0, cost(2 * HOP_S, 1))]
    assert flows.num_complete == 0
    flows.requested(1.0, D0, request(1, 2 * HOP_S))
    assert flows.num_complete == 1


def test_a_refusal_tells_the_price_and_the_relay_asks_again() -> None:
    flows = relay()
    flows.announced(0.0, D0, cost(0.0, 1))
    assert sent(flows.answered(1.0, D0, answer(1, None, 0.5, 1))) == [(D0, request(2, 0.5))]
    assert flows.answered(1.0, D0, answer(2, None, math.inf, 0)) == []


def test_a_grant_that_comes_after_a_later_refusal_leaves_a_price_that_can_be_asked() -> None:
    """A refusal when nothing is left names no price; an earlier answer still spoke of one more."""
    flows = relay()
    flows.announced(0.0, D0, cost(0.0, 3))
    assert flows.answered(1.0, D0, answer(2, None, math.inf, 0)) == []
    asked = sent(flows.answered(2.0, D0, answer(1, flow(0), 0.25, 2)))
    assert [m.cost_s for _, m in asked if isinstance(m, RequestFlow)] == [0.25]


def test_an_answer_counts_once_and_only_from_who_was_asked() -> None:
    flows = relay()
    flows.announced(0.0, D0, cost(0.0, 1))
    assert flows.answered(0.0, R1A, answer(1, flow(0))) == []
    assert flows.answered(0.0, D0, answer(7, flow(0))) == []
    flows.answered(0.0, D0, answer(1, flow(0)))
    assert list(flows.entries) == [flow(0)]
    flows.answered(0.0, D0, answer(1, flow(1)))
    assert list(flows.entries) == [flow(0)]


def test_an_unanswered_request_is_withdrawn_and_its_late_answer_ignored() -> None:
    flows = relay()
    flows.announced(0.0, D0, cost(0.0, 1))
    assert flows.deadline_s == 5.0
    assert flows.overdue(4.9) == []
    assert flows.overdue(5.0) == [Send(D0, Withdraw(1, 1))]
    assert flows.answered(5.1, D0, answer(1, flow(0))) == []
    assert flows.entries == {}
    assert flows.announced(6.0, D0, cost(0.0, 1)) == [Send(D0, request(2))]


def test_offers_of_nodes_that_are_no_neighbours_are_ignored() -> None:
    flows = relay(R1A)
    assert flows.announced(0.0, D0, cost(0.0, 2)) == []
    assert flows.announced(0.0, STRANGER, cost(0.0, 2)) == []


def test_a_data_node_asks_only_for_flows_to_itself() -> None:
    view = view_of("d0", "d1", "r1a")
    flows = data_flows(context_of(D0, view))
    flows.activate(0.0)
    assert flows.announced(0.0, R1A, cost(1.0, 1, D1)) == []
    assert flows.announced(0.0, R1A, cost(1.0, 1)) == [Send(R1A, request(1, 1.0))]
    effects = flows.answered(0.0, R1A, answer(1, flow(0), 1.0, 0, R1A))
    assert notes_of(effects) == ["flow.completed"]
    assert flows.complete[flow(0)].cost_s == pytest.approx(1.0 + HOP_S)
    assert flows.answered(0.0, R1A, answer(1, flow(1), 1.0)) == []
    assert flows.num_complete == 1


@pytest.mark.parametrize(
    ("flow_id", "path"),
    [
        (flow(0), ()),
        (flow(0), (STRANGER,)),
        (flow(0), (D0,)),
        (flow(0), (R1A, R1A)),
        (FlowId(D1, 0), (R1A,)),
    ],
)
def test_a_flow_that_does_not_lead_home_is_none(flow_id: FlowId, path: tuple[NodeId, ...]) -> None:
    """Whatever a node that grants it says: microbatches would be lost on the way."""
    flows = data_flows(context_of(D0, view_of("d0", "d1", "r1a")))
    flows.activate(0.0)
    flows.announced(0.0, R1A, cost(1.0, 1))
    assert flows.answered(0.0, R1A, answer(1, flow_id, 1.0, 0, *path)) == []
    assert flows.num_complete == 0
    assert flows.announced(1.0, R1A, cost(1.0, 1)) == [Send(R1A, request(2, 1.0))]


def test_a_data_node_may_fill_a_broken_flows_place() -> None:
    flows = sink()
    flows.announced(0.0, R1A, cost(1.0, 3))
    for k in (1, 2):
        flows.answered(0.0, R1A, answer(k, flow(k - 1), 1.0, 1, R1A, R2A))
    assert flows.announced(1.0, R1A, cost(1.0, 3)) == []
    flows.drop(flow(0))
    flows.drop(flow(9))
    assert flows.announced(2.0, R1A, cost(1.0, 3)) == [Send(R1A, request(3, 1.0))]


def test_a_relay_forgets_a_broken_flow_and_asks_for_another() -> None:
    flows = with_flow(relay())
    flows.announced(1.0, D0, cost(0.0, 3))
    flows.answered(1.0, D0, answer(2, flow(1), num=2))
    effects = flows.drop(2.0, flow(0))
    assert (R1A, cost(HOP_S, 1)) in sent(effects)
    assert (D0, request(3)) in sent(effects)
    assert flows.drop(2.0, flow(0)) == []


def test_a_paired_flow_that_breaks_is_no_longer_announced() -> None:
    flows = with_flow(relay(R1A), R2A)
    flows.requested(1.0, D0, request(1, 9.0))
    assert flows.drop(2.0, flow(0)) == []
    assert flows.outflows.paired == {}


# --- quotas ---------------------------------------------------------------------------------------


def test_scarce_capacity_is_shared_until_a_bound_falls() -> None:
    """Of two equal relays neither takes more than its half at first; later it may."""
    big = [member("r1a", capacity=4), member("r1b", capacity=4)]
    flows = relay_flows(context_of(R1A, view_of(member("d0", capacity=4), *big)))
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
    flows = relay_flows(context_of(R1A, view))
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
            self.carry(node, flows.activate(0.0))

    def carry(self, node: NodeId, effects: list[Effect]) -> None:
        for to, message in sent(effects):
            assert not isinstance(message, RequestFlow) or math.isfinite(message.cost_s)
            self.flight.append((node, to, message))

    def turn(self) -> None:
        """Deliver, lose or repeat one message, or let time pass."""
        if not self.flight or self.rng.random() < 0.1:
            self.now_s += self.rng.uniform(0.0, 3.0)
            for node, flows in self.flows.items():
                deadline_s = flows.deadline_s
                if deadline_s is not None and deadline_s <= self.now_s:
                    self.carry(node, flows.overdue(self.now_s))
            return
        at = self.rng.randrange(len(self.flight))
        fate = self.rng.random() if self.lossy else 1.0
        sender, to, message = self.flight[at] if fate < 0.1 else self.flight.pop(at)
        # A withdrawal is not lost: it is sent again until it arrives.
        if 0.1 <= fate < 0.2 and not isinstance(message, Withdraw):
            return
        self.carry(to, self.handle(self.flows[to], sender, message))

    def handle(
        self, flows: DataFlows | RelayFlows, sender: NodeId, message: Message
    ) -> list[Effect]:
        match message:
            case FlowCost():
                return flows.announced(self.now_s, sender, message)
            case RequestFlow():
                return flows.requested(self.now_s, sender, message)
            case FlowAnswer():
                return flows.answered(self.now_s, sender, message)
            case Withdraw():
                return flows.withdrawn(self.now_s, sender, message)
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


def test_two_data_nodes_never_swap_flows() -> None:
    for seed in range(5):
        mesh = Mesh(Random(seed), lossy=True)
        mesh.start(*NAMES)
        for _ in range(300):
            mesh.turn()
        for node in (D0, D1):
            assert {f.data_node for f in mesh.holders(node)} <= {node}
        assert R1B in mesh.flows
        assert R2B in mesh.flows
