"""What a relay and a data node do with a microbatch on its way."""

import pytest

from decod.ids import Iteration, MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Note, Send
from decod.protocol.core.jobs import Backward, Drop, Embed, EmbedBackward, Forward, Head, Job, Loss
from decod.protocol.core.messages.membership_messages import Suspect
from decod.protocol.core.messages.microbatch_messages import (
    BackwardGradient,
    Complete,
    Deny,
    ForwardActivation,
    Report,
)
from decod.protocol.flows.building import Granted, RelayFlow
from decod.protocol.strategy.data_microbatches import DataMicrobatches
from decod.protocol.strategy.microbatch import Phase
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
    member,
    notes_of,
    reopen,
    sent,
    tensor,
    view_of,
)

M = mb(0)
PATH = (R1A, R2A)
FORWARD = ForwardActivation(ITERATION, M, flow(0), PATH)
GRADIENT = BackwardGradient(ITERATION, M, flow(0), PATH)
COMPLETE = Complete(ITERATION, M, 1.0)
DENY = Deny(ITERATION, M, flow(0), "no such flow here")


def suspects(effects: list[Effect]) -> list[NodeId]:
    return [m.node_id for _, m in sent(effects) if isinstance(m, Suspect)]


# --- relay ----------------------------------------------------------------------------------------


class Relay:
    """r1a with flow 0 from d0 to r2a; its device computes when `end` says so."""

    def __init__(self) -> None:
        self.context = context_of(R1A, view_of("d0", "r1a", "r2a"))
        self.flows = relay_flows(self.context)
        self.flows.entries[flow(0)] = RelayFlow(flow(0), R2A, 2.0)
        self.flows.outflows.paired[flow(0)] = D0
        self.machine = Heard(RelayMicrobatches(self.context, lambda: self.flows, lambda: True))

    def take(self) -> list[Effect]:
        return self.machine.activation(D0, FORWARD, tensor(1))

    def forward(self, now_s: float = 0.0) -> list[Effect]:
        end_job(self.context, self.take(), tensor(2))
        return self.machine.forwarded(now_s, M, tensor(2).id, 1.0)

    def backward(self) -> list[Effect]:
        effects = self.machine.gradient(R2A, GRADIENT, tensor(3))
        end_job(self.context, effects, tensor(4))
        return self.machine.returned(M, tensor(4).id)


def test_a_deny_goes_upstream_and_the_flow_with_it() -> None:
    relay = Relay()
    relay.forward()
    assert relay.machine.denied(1.0, D0, DENY) == [], "not from upstream"
    effects = relay.machine.denied(1.0, R2A, DENY)
    assert sent(effects) == [(D0, DENY)]
    assert jobs_of(effects) == [Drop(M)]
    assert relay.flows.entries == {}
    assert relay.machine.denied(1.0, R2A, DENY) == []


def test_a_deny_of_what_is_on_its_way_back_is_too_late() -> None:
    relay = Relay()
    relay.forward()
    relay.machine.gradient(R2A, GRADIENT, tensor(3))
    assert relay.machine.denied(1.0, R2A, DENY) == []


def test_a_microbatch_that_the_device_refuses_is_denied_upstream() -> None:
    relay = Relay()
    end_job(relay.context, relay.take(), refused=True)
    effects = relay.machine.job_failed(1.0, Forward(M), "not finite")
    assert sent(effects) == [(D0, Deny(ITERATION, M, flow(0), "not finite"))]
    assert jobs_of(effects) == [Drop(M)]
    assert relay.flows.entries == {}
    assert relay.machine.job_failed(1.0, Forward(M), "not finite") == []


def blamed(effects: list[Effect]) -> list[object]:
    """Return the peers whose tensors were refused."""
    notes = [e for e in effects if isinstance(e, Note) and e.event == "microbatch.refused"]
    return [dict(note.fields)["peer"] for note in notes]


def test_a_relay_names_the_peer_whose_tensor_it_refuses() -> None:
    relay = Relay()
    end_job(relay.context, relay.take(), refused=True)
    assert blamed(relay.machine.job_failed(1.0, Forward(M), "not finite")) == [D0]
    relay = Relay()
    relay.forward()
    end_job(relay.context, relay.machine.gradient(R2A, GRADIENT, tensor(3)), refused=True)
    assert blamed(relay.machine.job_failed(1.0, Backward(M), "not finite")) == [R2A]


@pytest.mark.parametrize(
    ("job", "phase", "peers"),
    [
        (Embed(M), Phase.COMPUTING, []),
        (Head(M), Phase.HEAD, [R2A]),
        (EmbedBackward(M), Phase.RETURNING, [R1A]),
    ],
)
def test_a_data_node_names_the_peer_whose_tensor_it_refuses(
    job: Job, phase: Phase, peers: list[NodeId]
) -> None:
    data = Data(num_microbatches=1)
    data.begin()
    data.machine.held[M].phase = phase
    assert blamed(data.machine.job_failed(1.0, job, "not finite")) == peers


# --- data node ------------------------------------------------------------------------------------


class Data:
    """d0 with flows that lead over r1a and home by r2a; computing is at once."""

    def __init__(self, *, num_microbatches: int = 2, num_flows: int = 1) -> None:
        big = member("d0", capacity=4)
        self.context: Context = context_of(D0, view_of(big, "r1a", "r1b", "r2a", "r2b"))
        self.flows = data_flows(self.context)
        for slot in range(num_flows):
            self.flows.outflows.paired[flow(slot)] = R2A
            self.flows.complete[flow(slot)] = Granted(flow(slot), R1A, float(slot), PATH)
        self.machine = Heard(
            DataMicrobatches(
                self.context,
                lambda: self.flows,
                lambda: None,
                num_microbatches=num_microbatches,
            )
        )
        self.next_tensor = 100

    def open(self, iteration: int = 1, now_s: float = 0.0) -> list[Effect]:
        reopen(self.context, iteration=Iteration(iteration, 1))
        return self.machine.open(now_s)

    def message(self, microbatch: MicrobatchId, slot: int = 0) -> ForwardActivation:
        return ForwardActivation(self.context.iteration, microbatch, flow(slot), PATH)

    def embed(self, effects: list[Effect], microbatch: MicrobatchId) -> list[Effect]:
        self.next_tensor += 1
        out = tensor(self.next_tensor)
        end_job(self.context, effects, out)
        return self.machine.embedded(0.0, microbatch, out.id)

    def home(self, microbatch: MicrobatchId, slot: int = 0) -> list[Effect]:
        """Bring an activation home and compute its loss."""
        self.next_tensor += 2
        last, out = tensor(self.next_tensor), tensor(self.next_tensor + 1)
        effects = self.machine.activation(R2A, self.message(microbatch, slot), last)
        assert jobs_of(effects) == [Head(microbatch)]
        end_job(self.context, effects, out)
        self.next_tensor += 1
        return self.machine.headed(microbatch, Loss(2.5, 10), out.id, 1.0)

    def take_home(self, microbatch: MicrobatchId, slot: int = 0) -> list[Effect]:
        """Bring an embedded microbatch home, and its gradient; returns what that starts."""
        self.home(microbatch, slot)
        self.next_tensor += 1
        message = BackwardGradient(self.context.iteration, microbatch, flow(slot), PATH)
        effects = self.machine.gradient(R1A, message, tensor(self.next_tensor))
        assert jobs_of(effects) == [EmbedBackward(microbatch)]
        return effects

    def finish(self, microbatch: MicrobatchId, slot: int = 0) -> list[Effect]:
        """Take an embedded microbatch all the way; returns what is sent and what follows."""
        effects = self.take_home(microbatch, slot)
        end_job(self.context, effects)
        return [e for e in effects if isinstance(e, Send)] + self.machine.returned(microbatch)

    def begin(self) -> list[Effect]:
        self.open()
        return self.machine.can_take(R1A)


def test_repeats_of_an_activation_and_of_a_gradient_are_freed() -> None:
    data = Data(num_microbatches=1)
    effects = data.begin()
    assert freed(data.machine.activation(R2A, data.message(M), tensor(1))) == [1], "not sent yet"
    data.embed(effects, M)
    assert freed(data.machine.gradient(R1A, GRADIENT, tensor(1))) == [1], "no loss yet"
    data.home(M)
    assert freed(data.machine.activation(R2A, data.message(M), tensor(1))) == [1]
    assert freed(data.machine.gradient(R2B, GRADIENT, tensor(1))) == [1], "not from there"
    data.machine.gradient(R1A, GRADIENT, tensor(2))
    assert freed(data.machine.gradient(R1A, GRADIENT, tensor(3))) == [3]


def test_a_late_complete_of_the_first_hop_is_told_to_the_leader() -> None:
    data = Data(num_microbatches=1)
    data.embed(data.begin(), M)
    data.machine.complete(0.0, R2A, COMPLETE)
    assert suspects(data.machine.overdue(30.0)) == [R1A]
    data.machine.complete(31.0, R1A, COMPLETE)
    assert suspects(data.machine.overdue(60.0)) == []


def test_a_microbatch_without_a_flow_is_put_off_with_all_that_wait() -> None:
    data = Data()
    data.embed(data.begin(), M)
    effects = data.machine.denied(1.0, R1A, DENY)
    assert notes_of(effects) == ["microbatch.deferred"]
    assert sent(effects) == [(D0, Report(ITERATION, 0, 0, 2, 0.0, 0, view_version=1))]
    assert data.machine.denied(1.0, R1A, DENY) == []


def test_what_the_device_refuses_is_put_off_and_the_others_go_on() -> None:
    data = Data(num_flows=1, num_microbatches=2)
    end_job(data.context, data.begin(), refused=True)
    effects = data.machine.job_failed(1.0, Embed(M), "not finite")
    assert jobs_of(effects) == [Drop(M), Embed(mb(1))]
    assert data.machine.job_failed(1.0, Embed(M), "not finite") == []


def deferred(data: Data, iteration: int) -> list[MicrobatchId]:
    """Open an iteration without a flow; returns what it wants to inject, and puts it off."""
    data.open(iteration, now_s=1000.0 * iteration)
    waiting = list(data.machine._waiting.queue)
    data.flows.complete.clear()
    data.machine.overdue(1000.0 * iteration + 20.0)
    data.machine.share.committed(marked=False)
    return waiting


def test_a_microbatch_is_put_off_three_times_and_then_lost_and_noted() -> None:
    data = Data(num_microbatches=1)
    assert deferred(data, 1) == [mb(0)]
    for iteration in (2, 3, 4):
        old = [mb(0, iteration=k) for k in range(1, iteration)]
        assert deferred(data, iteration) == [*old, mb(0, iteration=iteration)]
    effects = data.open(5)
    assert [e.fields for e in effects if hasattr(e, "fields")] == [(("microbatch", "1/0/0"),)]
    assert notes_of(effects) == ["microbatch.lost"]
    assert mb(0) not in data.machine._waiting.queue
    assert notes_of(data.open(5)) == [], "it is lost once"


def test_a_repeated_deny_of_a_backward_pass_changes_nothing() -> None:
    """Transports repeat messages: a repeat must not use up one of the three chances."""
    data = Data(num_microbatches=1)
    data.begin()
    data.machine.held[M].phase = Phase.AWAITING_GRADIENT
    assert len(sent(data.machine.denied(1.0, R1A, DENY))) == 1
    assert data.machine.denied(1.0, R1A, DENY) == []
