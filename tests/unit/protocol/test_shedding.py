"""What a full relay lets go of while links are slower than its device."""

from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, StartJob
from decod.protocol.core.events import JobFinished, Tensor
from decod.protocol.core.jobs import Backward, Drop, Forward, Nothing
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.microbatch_messages import BackwardGradient, ForwardActivation
from decod.protocol.flows.building import RelayFlow
from decod.protocol.strategy.relay_microbatches import RelayMicrobatches
from tests.support.flows import relay_flows
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R2A,
    Heard,
    configured,
    context_of,
    disown,
    end_job,
    flow,
    freed,
    jobs_of,
    mb,
    member,
    sent,
    settle,
    tensor,
    told_end,
    view_of,
)

M = mb(0)
PATH = (R1A, R2A)
FORWARD = ForwardActivation(ITERATION, M, flow(0), PATH)
GRADIENT = BackwardGradient(ITERATION, M, flow(0), PATH)


class FullRelay:
    """r1a, which holds one microbatch at a time; an activation takes 8 s to r2a, a pass 1 s."""

    def __init__(self, *, transfer_s: float = 8.0) -> None:
        view = view_of("d0", member("r1a", capacity=1), "r2a")
        links = LinkTable(activation_size_bytes=1 << 20, compute_s=1.0)
        rate = (1 << 20) / transfer_s
        links.measured(R2A, latency_s=0.01, bandwidth_bytes_per_s=rate)
        self.context = context_of(R1A, view)
        self.context.links = links
        self.flows = relay_flows(self.context)
        self.flows.entries[flow(0)] = RelayFlow(flow(0), R2A, 2.0)
        self.flows.outflows.paired[flow(0)] = D0
        self.machine = Heard(RelayMicrobatches(self.context, lambda: self.flows, lambda: True))

    def both(self) -> list[Effect]:
        """Compute the first's forward pass while the second waits."""
        begun = self.machine.activation(D0, FORWARD, tensor(1))
        second = ForwardActivation(ITERATION, mb(1), flow(0), PATH)
        assert jobs_of(self.machine.activation(D0, second, tensor(11))) == []
        ended = end_job(self.context, begun, tensor(2))
        return ended + self.machine.forwarded(0.0, M, tensor(2).id, 1.0)


def test_a_full_relay_sheds_what_waits_for_its_gradient_and_computes_it_again() -> None:
    relay = FullRelay()
    effects = relay.both()
    assert jobs_of(effects) == [Drop(M), Forward(mb(1))]
    assert 1 not in freed(effects), "the activation that came is kept"
    came = relay.machine.gradient(R2A, GRADIENT, tensor(3))
    assert jobs_of(came) == [], "the device works on the other"
    repeat = relay.machine.gradient(R2A, GRADIENT, tensor(4))
    assert (jobs_of(repeat), freed(repeat)) == ([], [4])

    end_jobs(relay.context, effects, tensor(12))
    effects = relay.machine.forwarded(1.0, mb(1), tensor(12).id, 1.0)
    assert jobs_of(effects) == [Drop(mb(1)), Forward(M)], "who is on its way back comes first"
    end_jobs(relay.context, effects, tensor(5))
    effects = relay.machine.forwarded(2.0, M, tensor(5).id, 1.0)
    assert (jobs_of(effects), sent(effects)) == ([Backward(M)], []), "r2a has had the activation"
    assert freed(effects) == [5]
    end_jobs(relay.context, effects, tensor(6))
    effects = relay.machine.returned(M, tensor(6).id)
    assert sent(effects) == [(D0, GRADIENT)]
    assert relay.machine.folded == [M]


def end_jobs(context: Context, effects: list[Effect], output: Tensor) -> None:
    """End all jobs that `effects` start, in order; the last has an output."""
    started = [e for e in effects if isinstance(e, StartJob)]
    disown(context)
    for start in started:
        outputs = (output,) if start is started[-1] else ()
        told_end(context, JobFinished(start.job_id, Nothing(), outputs, duration_s=1.0))


def test_without_memory_for_what_came_nothing_is_shed() -> None:
    relay = FullRelay()
    settle(relay.context, protocol=configured(keep_max_bytes=0))
    assert jobs_of(relay.both()) == []
