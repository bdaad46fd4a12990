"""What a relay and a data node do with a microbatch on its way."""

import pytest

from decod.ids import Iteration, MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Note, Send, SendTensor
from decod.protocol.core.fingerprints import digest_of
from decod.protocol.core.jobs import (
    Backward,
    Drop,
    Embed,
    EmbedBackward,
    Forward,
    Head,
    Job,
    Loss,
)
from decod.protocol.core.messages import (
    BackwardGradient,
    Complete,
    Deny,
    ForwardActivation,
    Report,
    Suspect,
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
    R1B,
    R2A,
    R2B,
    context_of,
    end_job,
    flow,
    freed,
    jobs_of,
    mb,
    member,
    notes_of,
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
        self.machine = RelayMicrobatches(self.context, lambda: self.flows, lambda: True)

    def take(self) -> list[Effect]:
        return self.machine.activation(D0, FORWARD, tensor(1))

    def forward(self, now_s: float = 0.0) -> list[Effect]:
        end_job(self.context, self.take(), tensor(2))
        return self.machine.forwarded(now_s, M, tensor(2).id, 1.0)

    def backward(self) -> list[Effect]:
        effects = self.machine.gradient(R2A, GRADIENT, tensor(3))
        end_job(self.context, effects, tensor(4))
        return self.machine.returned(M, tensor(4).id)


def test_a_relay_passes_an_activation_on_and_says_complete() -> None:
    relay = Relay()
    assert jobs_of(relay.take()) == [Forward(M)]
    relay = Relay()
    assert relay.forward() == [SendTensor(R2A, FORWARD, tensor(2).id), Send(D0, COMPLETE)]


def test_a_relay_passes_the_gradient_back_and_counts_the_microbatch() -> None:
    relay = Relay()
    relay.forward()
    relay.machine.complete(1.0, R2A, COMPLETE)
    assert relay.backward() == [SendTensor(D0, GRADIENT, tensor(4).id)]
    assert relay.machine.folded == [M]
    assert relay.machine.held == {}


def test_an_activation_along_an_unknown_flow_or_of_another_sender_is_denied() -> None:
    relay = Relay()
    for sender, message in (
        (R2A, FORWARD),
        (D0, ForwardActivation(ITERATION, M, flow(1), PATH)),
    ):
        effects = relay.machine.activation(sender, message, tensor(1))
        deny = Deny(ITERATION, M, message.flow_id, "no such flow here")
        assert sent(effects) == [(sender, deny)]
        assert freed(effects) == [1]
    assert relay.machine.held == {}


def test_a_repeated_activation_is_computed_once() -> None:
    relay = Relay()
    relay.take()
    repeat = relay.machine.activation(D0, FORWARD, tensor(9))
    assert (freed(repeat), jobs_of(repeat), sent(repeat)) == ([9], [], [])
    relay = Relay()
    relay.forward()
    done = [(D0, Complete(ITERATION, M, 0.0))]
    repeat = relay.machine.activation(D0, FORWARD, tensor(9))
    assert (freed(repeat), jobs_of(repeat), sent(repeat)) == ([9], [], done)
    relay.backward()
    repeat = relay.machine.activation(D0, FORWARD, tensor(9))
    assert (freed(repeat), jobs_of(repeat), sent(repeat)) == ([9], [], done)


@pytest.mark.parametrize("sender", [NodeId("d1"), R1B])
def test_a_gradient_from_elsewhere_than_downstream_is_freed(sender: NodeId) -> None:
    relay = Relay()
    relay.forward()
    assert freed(relay.machine.gradient(sender, GRADIENT, tensor(3))) == [3]


def test_a_repeated_gradient_is_freed() -> None:
    relay = Relay()
    relay.forward()
    assert jobs_of(relay.machine.gradient(R2A, GRADIENT, tensor(3))) == [Backward(M)]
    assert freed(relay.machine.gradient(R2A, GRADIENT, tensor(9))) == [9]


def test_a_gradient_may_overtake_the_complete_that_came_before_it() -> None:
    """The one travels on the bulk channel, the other on the control channel."""
    relay = Relay()
    relay.forward()
    relay.machine.gradient(R2A, GRADIENT, tensor(3))
    assert relay.machine.complete(1.0, R2A, COMPLETE) == []
    assert relay.machine.held[M].phase is Phase.RETURNING
    assert relay.machine.overdue(100.0) == []


def test_a_late_complete_makes_the_peer_a_suspect_once_for_each_wait() -> None:
    relay = Relay()
    assert relay.machine.deadline_s is None
    relay.forward(now_s=10.0)
    assert relay.machine.deadline_s == 40.0
    assert relay.machine.overdue(39.0) == []
    assert relay.machine.overdue(40.0) == [Send(D0, Suspect(R2A, "no COMPLETE in time"))]
    assert relay.machine.overdue(41.0) == []
    assert relay.machine.deadline_s == 70.0
    relay.machine.complete(50.0, R2A, COMPLETE)
    assert relay.machine.overdue(70.0) == []
    assert relay.machine.deadline_s is None


def test_only_the_next_node_can_complete_what_was_sent() -> None:
    relay = Relay()
    relay.machine.complete(0.0, R2A, COMPLETE)
    end_job(relay.context, relay.take(), tensor(2))
    relay.machine.complete(0.0, R2A, COMPLETE)
    assert relay.machine.held[M].phase is Phase.COMPUTING
    relay.machine.forwarded(0.0, M, tensor(2).id, 1.0)
    relay.machine.complete(0.0, D0, COMPLETE)
    assert relay.machine.held[M].phase is Phase.SENT
    relay.machine.complete(0.0, R2A, COMPLETE)
    assert relay.machine.held[M].phase is Phase.AWAITING


def test_who_is_usually_slow_is_waited_for_longer() -> None:
    """Slow is not dead: four times the usual wait, where that is more than the setting."""
    relay = Relay()
    relay.forward(now_s=0.0)
    relay.machine.complete(20.0, R2A, COMPLETE)
    held = relay.machine.held[M]
    relay.machine.forwarded(20.0, M, tensor(2).id, 1.0)
    assert held.complete_by_s == 20.0 + 80.0
    relay.machine.complete(50.0, R2A, COMPLETE)  # 30 s: the usual wait becomes 21 s.
    relay.machine.forwarded(50.0, M, tensor(2).id, 1.0)
    assert held.complete_by_s == pytest.approx(50.0 + 84.0)


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


def test_a_reset_forgets_the_iteration() -> None:
    relay = Relay()
    relay.forward()
    relay.backward()
    relay.machine.activation(D0, ForwardActivation(ITERATION, mb(1), flow(0), PATH), tensor(11))
    relay.machine.reset()
    assert (relay.machine.held, relay.machine.folded) == ({}, [])


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
        self.machine = DataMicrobatches(
            self.context, lambda: self.flows, list, num_microbatches=num_microbatches
        )
        self.next_tensor = 100

    def open(self, iteration: int = 1, now_s: float = 0.0) -> list[Effect]:
        self.context.iteration = Iteration(iteration, 1)
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


def test_nothing_is_injected_before_the_first_hop_can_take_it() -> None:
    data = Data()
    assert data.open() == []
    assert data.machine.can_take(R1B) == []
    assert jobs_of(data.machine.can_take(R1A)) == [Embed(M)]
    assert data.machine.can_take(R1A) == [], "one microbatch for each flow"


def test_relays_say_that_they_are_ready_unless_they_stay_so() -> None:
    data = Data()
    data.begin()
    assert jobs_of(data.machine.open(0.0, ready=True)) == [Embed(M)]
    assert data.machine.open(0.0) == []


def test_a_new_flow_is_used_and_the_cheapest_first() -> None:
    data = Data(num_flows=2, num_microbatches=3)
    assert jobs_of(data.begin()) == [Embed(mb(0)), Embed(mb(1))]
    assert data.machine.held[mb(0)].flow_id == flow(0)
    data.flows.complete[flow(2)] = Granted(flow(2), R1A, 0.5, PATH)
    data.machine.inject()
    assert data.machine.held[mb(2)].flow_id == flow(2)


def test_a_microbatch_goes_out_comes_home_and_returns() -> None:
    data = Data(num_microbatches=1)
    effects = data.begin()
    assert data.embed(effects, M) == [SendTensor(R1A, FORWARD, tensor(101).id)]
    data.machine.complete(1.0, R1A, COMPLETE)
    effects = data.home(M)
    assert sent(effects) == [(R2A, GRADIENT), (R2A, COMPLETE)]


def test_a_share_that_is_done_is_reported_once() -> None:
    data = Data()
    effects = data.begin()
    data.embed(effects, mb(0))
    effects = data.finish(mb(0))
    assert (jobs_of(effects), sent(effects)) == ([Embed(mb(1))], [])
    data.embed(effects, mb(1))
    digest = digest_of([mb(0), mb(1)])
    report = Report(ITERATION, 2, digest, 0, loss_sum=5.0, num_tokens=20, view_version=1)
    effects = data.take_home(mb(1))
    assert sent(effects) == [(D0, report)], "what is left to do concerns nobody else"
    assert not data.machine.all_done
    end_job(data.context, effects)
    assert data.machine.returned(mb(1)) == []
    assert data.machine.all_done
    assert data.machine.inject() == []
    assert data.machine.overdue(1000.0) == []


def test_an_activation_that_is_not_expected_is_denied() -> None:
    data = Data(num_flows=2)
    data.begin()
    for sender, microbatch, slot in ((R1B, mb(0), 0), (R2A, mb(7), 0), (R2A, mb(0), 1)):
        message = data.message(microbatch, slot)
        effects = data.machine.activation(sender, message, tensor(1))
        assert sent(effects) == [(sender, Deny(ITERATION, microbatch, flow(slot), DENY.reason))]
        assert freed(effects) == [1]


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


def test_a_denied_microbatch_is_tried_on_another_flow() -> None:
    data = Data(num_flows=2, num_microbatches=1)
    data.embed(data.begin(), M)
    assert data.machine.denied(1.0, R1B, DENY) == []
    effects = data.machine.denied(1.0, R1A, DENY)
    assert jobs_of(effects) == [Drop(M), Embed(M)]
    assert data.machine.held[M].flow_id == flow(1)
    assert list(data.flows.complete) == [flow(1)]


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


def test_what_was_put_off_by_a_failed_iteration_is_reported_too() -> None:
    """A checkpoint is not taken while anything is put off, so all of it must be told."""
    data = Data(num_microbatches=2)
    data.embed(data.begin(), M)
    data.flows.complete[flow(0)] = Granted(flow(0), R1A, 1.0, PATH)
    data.machine.share.deferrals.put_off(M)
    data.context.iteration = Iteration(1, 2)
    data.machine.open(0.0)
    data.embed(data.machine.can_take(R1A), mb(1))
    (report,) = [m for _, m in sent(data.finish(mb(1)))]
    assert isinstance(report, Report)
    assert (report.num_committed, report.num_deferred) == (1, 1)


def test_what_was_put_off_is_only_remembered_by_a_commit() -> None:
    """An abort repeats the iteration: nothing of it has happened."""
    data = Data(num_microbatches=1)
    data.embed(data.begin(), M)
    data.machine.denied(1.0, R1A, DENY)
    data.flows.complete[flow(0)] = Granted(flow(0), R1A, 1.0, PATH)
    data.context.iteration = Iteration(1, 2)
    data.machine.open(0.0)
    assert jobs_of(data.machine.can_take(R1A)) == [Embed(M)]


def test_a_second_chance_that_succeeds_is_forgotten() -> None:
    data = Data(num_microbatches=1)
    deferred(data, 1)
    data.flows.complete[flow(0)] = Granted(flow(0), R1A, 1.0, PATH)
    data.open(2)
    data.embed(data.machine.can_take(R1A), mb(0))
    data.embed(data.finish(mb(0)), mb(0, iteration=2))
    (report,) = [m for _, m in sent(data.finish(mb(0, iteration=2)))]
    assert isinstance(report, Report)
    assert report.num_committed == 2
    data.machine.share.committed(marked=False)
    data.open(3)
    assert list(data.machine._waiting.queue) == [mb(0, iteration=3)]


def test_without_any_flow_the_share_is_put_off_after_a_while() -> None:
    """Other data nodes must not wait for ever."""
    data = Data(num_flows=0)
    data.open(now_s=100.0)
    assert data.machine.overdue(119.0) == []
    assert data.machine.deadline_s == 120.0
    effects = data.machine.overdue(120.0)
    assert notes_of(effects) == ["microbatch.deferred"]
    assert sent(effects) == [(D0, Report(ITERATION, 0, 0, 2, 0.0, 0, view_version=1))]
    assert data.machine.deadline_s is None


def test_with_a_flow_a_data_node_is_patient() -> None:
    data = Data()
    data.begin()
    assert notes_of(data.machine.overdue(500.0)) == []


def test_who_finds_no_free_flow_follows_the_others_once_all_flows_should_be_there() -> None:
    """Relays make it wait; so its way to a stage that is full is not lost time."""
    data = Data(num_flows=2, num_microbatches=6)
    assert jobs_of(data.begin()) == [Embed(mb(0)), Embed(mb(1))]
    assert data.machine.deadline_s == 5.0
    assert data.machine.overdue(4.9) == []
    data.machine.overdue(5.0)
    followed = [data.machine.held[mb(k)].flow_id for k in (2, 3)]
    assert followed == [flow(0), flow(0)], "what costs nothing is soon free again"
    assert len(data.machine.held) == 4, "no more than the data node can hold"


FAILURE = f"microbatch {M}: no such flow here"


@pytest.mark.parametrize("through", ["deny", "device"])
def test_a_backward_pass_that_breaks_asks_for_the_iteration_to_be_repeated(through: str) -> None:
    """Others have parts of this microbatch in their sums already."""
    data = Data(num_microbatches=2, num_flows=2)
    data.open()
    effects = data.machine.can_take(R1A)
    assert len(jobs_of(effects)) == 2
    for k in (0, 1):
        data.context.tensors.add(tensor(50 + k))
        data.machine.embedded(0.0, mb(k), tensor(50 + k).id)
    data.machine.held[M].phase = Phase.AWAITING_GRADIENT
    if through == "deny":
        effects = data.machine.denied(1.0, R1A, DENY)
    else:
        effects = data.machine.job_failed(1.0, Embed(M), DENY.reason)
    assert sent(effects) == [
        (D0, Report(ITERATION, 0, 0, 1, 0.0, 0, view_version=1, failure=FAILURE))
    ]
    data.context.iteration = Iteration(1, 2)
    data.machine.open(0.0)
    assert list(data.machine._waiting.queue) == [mb(1)], "not tried again in this iteration"


def test_a_share_that_has_failed_is_not_reported_as_done() -> None:
    data = Data(num_microbatches=2, num_flows=2)
    data.begin()
    for k in (0, 1):
        data.machine.held[mb(k)].phase = Phase.AWAITING_GRADIENT
        data.machine.share.losses[mb(k)] = Loss(2.5, 10)
    assert len(sent(data.machine.denied(1.0, R1A, DENY))) == 1
    assert sent(data.machine.returned(mb(1))) == []


def test_a_last_step_that_fails_takes_the_report_back() -> None:
    data = Data(num_microbatches=1)
    data.embed(data.begin(), M)
    assert len(sent(data.take_home(M))) == 1
    failed = Report(ITERATION, 0, 0, 1, 0.0, 0, view_version=1, failure=FAILURE)
    assert sent(data.machine.job_failed(1.0, EmbedBackward(M), DENY.reason)) == [(D0, failed)]
    assert not data.machine.all_done, "its sum must not enter the reduction"
    assert sent(data.machine.job_failed(1.0, EmbedBackward(M), DENY.reason)) == []


def test_a_long_reason_is_cut() -> None:
    data = Data(num_microbatches=1)
    data.begin()
    data.machine.held[M].phase = Phase.HEAD
    ((_, report),) = sent(data.machine.job_failed(1.0, Embed(M), "x" * 999))
    assert isinstance(report, Report)
    assert len(report.failure) == 200


def test_a_repeated_deny_of_a_backward_pass_changes_nothing() -> None:
    """Transports repeat messages: a repeat must not use up one of the three chances."""
    data = Data(num_microbatches=1)
    data.begin()
    data.machine.held[M].phase = Phase.AWAITING_GRADIENT
    assert len(sent(data.machine.denied(1.0, R1A, DENY))) == 1
    assert data.machine.denied(1.0, R1A, DENY) == []
