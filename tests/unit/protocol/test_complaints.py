"""What is not finite is shown to the leader, which looks at it."""

from dataclasses import replace

import pytest

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, SendTensor, StartJob
from decod.protocol.core.events import JobFailed, JobFinished
from decod.protocol.core.jobs import Backward, Forward, Inspect, Nothing
from decod.protocol.core.messages.membership_messages import NOT_FINITE, Suspect
from decod.protocol.core.messages.microbatch_messages import Unusable
from decod.protocol.strategy.microbatch import Complaints
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R1B,
    R2A,
    Heard,
    context_of,
    freed,
    jobs_of,
    notes_of,
    received,
    sent,
    tensor,
    told_end,
    view_of,
)
from tests.unit.protocol.test_microbatch import FORWARD, GRADIENT, Relay
from tests.unit.protocol.test_witnessing import DIGEST, MB, Signed, proof

SHOWN = Unusable(ITERATION, MB, False, proof(R1A, is_gradient=False))


class Shown:
    """The leader, which is shown things."""

    def __init__(self, node: NodeId = D0) -> None:
        self.context = context_of(node, view_of("d0", "r1a", "r1b", "r2a"))
        self.context.proofs = Signed()
        self.complaints = Heard(Complaints(self.context))

    def hear(
        self, sender: NodeId = R2A, message: Unusable = SHOWN, number: int = 1
    ) -> list[Effect]:
        of = replace(tensor(number), digest=DIGEST)
        return self.complaints.received(received(sender, message, of))


def started(effects: list[Effect]) -> StartJob:
    (job,) = (e for e in effects if isinstance(e, StartJob))
    return job


def test_who_has_signed_what_is_not_finite_is_reported_by_the_leader() -> None:
    leader = Shown()
    job = started(leader.hear())
    assert job.job == Inspect(MB, is_gradient=False)
    failed = JobFailed(job.job_id, "activation received holds nan", fatal=False)
    effects = told_end(leader.context, failed, now_s=1.0)
    assert sent(effects) == [(D0, Suspect(R1A, NOT_FINITE))]
    assert freed(effects) == [1]


def test_who_shows_what_is_finite_is_named_and_nobody_is_reported() -> None:
    leader = Shown()
    job = started(leader.hear())
    finished = JobFinished(job.job_id, Nothing(), (), 0.1)
    effects = told_end(leader.context, finished, now_s=1.0)
    assert (sent(effects), freed(effects)) == ([], [1])
    assert notes_of(effects) == ["complaint.unfounded"]


def test_of_each_member_one_thing_is_looked_at_in_an_iteration() -> None:
    leader = Shown()
    leader.hear()
    again = leader.hear(number=2)
    assert (jobs_of(again), freed(again)) == ([], [2])
    assert jobs_of(leader.hear(R1B, number=3))
    leader.complaints.reset()
    leader.hear(number=4)
    leader.context.compute.reset()
    assert freed(leader.context.out.taken()) == [4]


@pytest.mark.parametrize("is_gradient", [False, True])
def test_a_relay_shows_the_leader_what_its_device_could_not_use(*, is_gradient: bool) -> None:
    relay, node = Relay(), R2A if is_gradient else D0
    signed = proof(node, is_gradient=is_gradient)
    if is_gradient:
        relay.forward()
        effects = relay.machine.gradient(R2A, replace(GRADIENT, proof=signed), tensor(3))
        reason = "gradient received holds nan"
    else:
        effects = relay.machine.activation(D0, replace(FORWARD, proof=signed), tensor(3))
        reason = "activation received holds nan"
    job = started(effects)
    assert isinstance(job.job, Backward if is_gradient else Forward)
    effects = told_end(relay.context, JobFailed(job.job_id, reason, fatal=False), now_s=1.0)
    message = Unusable(ITERATION, MB, is_gradient, signed)
    assert SendTensor(D0, message, tensor(3).id) in effects
    assert 3 not in freed(effects), "it is on its way"
    relay.context.tensors.release(tensor(3).id)
    assert freed(relay.context.out.taken()) == [3], "and then nobody needs it"
