"""What nodes do when a relay is lost and the iteration goes on without it."""

from dataclasses import replace

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send, SendTensor
from decod.protocol.core.jobs import Backward, Loss
from decod.protocol.core.messages import (
    BackwardGradient,
    Deny,
    ForwardActivation,
    Mended,
    Report,
    Reroute,
)
from decod.protocol.core.view import View
from decod.protocol.flows.building import Granted, RelayFlow
from decod.protocol.strategy.data_microbatches import DataMicrobatches
from decod.protocol.strategy.relay_microbatches import RelayMicrobatches
from tests.support.flows import data_flows, relay_flows
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R1B,
    R2A,
    R2B,
    configured,
    context_of,
    end_job,
    flow,
    jobs_of,
    mb,
    member,
    notes_of,
    sent,
    tensor,
    view_of,
)

M = mb(0)
OLD, NEW = (R1A, R2A), (R1A, R2B)
FORWARD = ForwardActivation(ITERATION, M, flow(0), OLD)
AGAIN = ForwardActivation(ITERATION, M, flow(0), NEW, 2)
GRADIENT = BackwardGradient(ITERATION, M, flow(0), OLD)
REROUTE = Reroute(ITERATION, M, flow(0), NEW, 2, (R2B,))
MENDED = Mended(ITERATION, M)


def without(view: View, *lost: NodeId) -> View:
    left = [m for m in view.members if m.node_id not in lost]
    return View.of(
        left, version=view.version + 1, leader=view.leader, term=1, num_stages=view.num_stages
    )


def view() -> View:
    small = member("r2b", capacity=1)
    return view_of(member("d0", capacity=4), "r1a", "r1b", "r2a", small)


class Relay:
    """A relay with flow 0, if it is on its path."""

    def __init__(self, node: NodeId, *, keep_max_bytes: int = 1 << 30) -> None:
        self.context = context_of(node, view(), config=configured(keep_max_bytes=keep_max_bytes))
        self.flows = relay_flows(self.context)
        self.loaded = True
        if node == R1A:
            self.flows.entries[flow(0)] = RelayFlow(flow(0), R2A, 2.0)
            self.flows.outflows.paired[flow(0)] = D0
        self.machine = RelayMicrobatches(self.context, lambda: self.flows, lambda: self.loaded)
        self.num_tensors = 0

    def tensor(self) -> int:
        self.num_tensors += 1
        return self.num_tensors

    def forward(self, sender: NodeId = D0, message: ForwardActivation = FORWARD) -> list[Effect]:
        effects = self.machine.activation(sender, message, tensor(self.tensor()))
        out = tensor(self.tensor())
        end_job(self.context, effects, out)
        return self.machine.forwarded(0.0, M, out.id, 1.0)

    def end_backward(self, effects: list[Effect]) -> list[Effect]:
        assert jobs_of(effects) == [Backward(M)]
        out = tensor(self.tensor())
        end_job(self.context, effects, out)
        return self.machine.returned(M, out.id)

    def backward(self, sender: NodeId = R2A) -> list[Effect]:
        return self.end_backward(self.machine.gradient(sender, GRADIENT, tensor(self.tensor())))

    def lose(self, node: NodeId) -> None:
        self.context.adopt(without(self.context.view, node))


# --- the neighbour before -------------------------------------------------------------------------


def test_a_new_path_may_be_known_before_the_microbatch_comes() -> None:
    relay = Relay(R1A)
    relay.lose(R2A)
    assert relay.machine.reroute(5.0, D0, REROUTE) == []
    assert SendTensor(R2B, AGAIN, tensor(2).id) in relay.forward()


def test_a_path_is_changed_by_its_data_node_alone_and_by_no_older_word() -> None:
    relay = Relay(R1A)
    relay.forward()
    assert relay.machine.reroute(5.0, R1B, REROUTE) == []
    newer = replace(REROUTE, path_version=3)
    assert len(relay.machine.reroute(5.0, D0, newer)) == 1
    assert relay.machine.reroute(6.0, D0, replace(REROUTE, path=OLD)) == []
    assert relay.machine.reroute(6.0, D0, newer) == [], "a repeat"
    assert relay.machine.held[M].path == NEW


def test_what_was_not_kept_is_told_to_the_data_node() -> None:
    relay = Relay(R1A, keep_max_bytes=0)
    relay.forward()
    relay.lose(R2A)
    reason = "what the lost node had been sent was not kept"
    deny = Send(D0, Deny(ITERATION, M, flow(0), reason))
    assert relay.machine.reroute(5.0, D0, REROUTE) == [deny]


# --- who takes over -------------------------------------------------------------------------------


def test_who_has_a_lost_nodes_gradient_early_still_feeds_the_one_that_takes_its_place() -> None:
    """Both neighbours are lost, one after the other, while an activation is on its way here."""
    relay = Relay(R1B)
    first = ForwardActivation(ITERATION, M, flow(0), (R1B, R2A), 2)
    relay.lose(R1A)
    assert relay.machine.gradient(R2A, GRADIENT, tensor(50)) == []
    effects = relay.machine.activation(D0, first, tensor(1))
    relay.lose(R2A)
    path = (R1B, R2B)
    relay.machine.reroute(5.0, D0, Reroute(ITERATION, M, flow(0), path, 3, path))
    end_job(relay.context, effects, tensor(2))
    effects = relay.machine.forwarded(6.0, M, 2, 1.0)
    again = ForwardActivation(ITERATION, M, flow(0), path, 3)
    assert SendTensor(R2B, again, tensor(2).id) in effects, "nobody else has it to send"
    back = BackwardGradient(ITERATION, M, flow(0), path, 3)
    assert sent(relay.end_backward(effects)) == [(D0, back), (D0, MENDED)]


def test_what_its_device_refuses_is_told_to_the_data_node() -> None:
    relay = Relay(R2B)
    relay.lose(R2A)
    effects = relay.machine.activation(R1A, AGAIN, tensor(1))
    end_job(relay.context, effects, refused=True)
    deny = Deny(ITERATION, M, flow(0), "not finite")
    effects = relay.machine.job_failed(1.0, Backward(M), "not finite")
    assert notes_of(effects) == ["microbatch.refused"]
    assert sent(effects) == [(D0, deny)]


# --- the data node --------------------------------------------------------------------------------


class Data:
    """d0 with a share of one microbatch, under way along r1a and r2a."""

    def __init__(self, *, keep_max_bytes: int = 1 << 30, num_microbatches: int = 1) -> None:
        self.context: Context = context_of(
            D0, view(), config=configured(keep_max_bytes=keep_max_bytes)
        )
        self.flows = data_flows(self.context)
        self.flows.complete[flow(0)] = Granted(flow(0), R1A, 1.0, OLD)
        self.machine = DataMicrobatches(
            self.context, lambda: self.flows, list, num_microbatches=num_microbatches
        )
        self.machine.open(0.0)
        effects = self.machine.can_take(R1A)
        end_job(self.context, effects, tensor(1))
        self.machine.embedded(0.0, M, tensor(1).id)

    def head(self) -> None:
        effects = self.machine.activation(R2A, FORWARD, tensor(2))
        end_job(self.context, effects, tensor(3))
        self.machine.headed(M, Loss(2.5, 10), tensor(3).id, 1.0)

    def lose(self, *nodes: NodeId) -> list[Effect]:
        self.context.adopt(without(self.context.view, *nodes))
        return self.machine.mend(5.0)


def reports(effects: list[Effect]) -> list[Report]:
    return [m for _, m in sent(effects) if isinstance(m, Report)]


def test_what_was_not_kept_repeats_the_iteration() -> None:
    data = Data(keep_max_bytes=0)
    (report,) = reports(data.lose(R1A))
    assert "not kept" in report.failure
    assert report.num_deferred == 1
    assert not data.machine.share.deferrals.microbatches, "it is not the microbatch's fault"


# --- flows of an earlier view ---------------------------------------------------------------------


def test_what_is_refused_on_a_flow_of_an_earlier_view_is_put_off() -> None:
    """Or the iteration would be repeated with it again and again."""
    data = Data()
    data.flows.carried = {flow(0): Granted(flow(0), R1B, 1.0, (R1B, R2B), 3)}
    data.machine.open(10.0)
    deny = Deny(ITERATION, M, flow(0), "its loss is not finite")
    assert [r.failure != "" for r in reports(data.machine.denied(11.0, R1B, deny))] == [True]
    data.machine.open(12.0)
    assert M not in data.machine.held
