"""A member has been sent what is not finite, and shows the leader what it got and who signed it.

The leader looks at it. So one member's complaint is enough: nobody can make up what another has
signed (`decod.protocol.core.proofs`). Honest members compute nothing that is not finite: their
devices refuse to send it.
"""

from dataclasses import dataclass

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send, SendTensor, noted
from decod.protocol.core.events import JobFinished, Received
from decod.protocol.core.jobs import ACTIVATION_RECEIVED, GRADIENT_RECEIVED, Inspect, Job
from decod.protocol.core.messages import NOT_FINITE, Suspect, Unusable
from decod.protocol.core.proofs import Subject, digest_in
from decod.protocol.core.view import Role
from decod.protocol.strategy.microbatch import HeldMicrobatch


def refused(
    context: Context, held: HeldMicrobatch, sender: NodeId, reason: str, *, is_gradient: bool
) -> list[Effect]:
    """Tell that this node's device did not compute with a microbatch.

    If what another has sent can't be used, the leader hears of it. A data node is believed.

    Args:
        context: The node's. The job that was refused read what has come.
        held: The microbatch.
        sender: Who has sent what the device was given.
        reason: Why it was refused.
        is_gradient: The device was given a gradient, and not an activation.
    """
    about = {"microbatch": str(held.microbatch), "peer": sender, "reason": reason}
    effects: list[Effect] = [noted("microbatch.refused", **about)]
    if not any(what in reason for what in (ACTIVATION_RECEIVED, GRADIENT_RECEIVED)):
        return effects
    leader, proof = context.view.leader, held.proofs.get(is_gradient)
    if not proof or context.member.role is Role.DATA:
        return [*effects, Send(leader, Suspect(sender, NOT_FINITE))]
    (tensor,) = context.compute.refused
    message = Unusable(context.iteration, held.microbatch, is_gradient, proof)
    return [*effects, SendTensor(leader, message, context.tensors.retain(tensor))]


class Complaints:
    """What members have shown the leader in an iteration.

    Args:
        context: The leader's, or of a node that is none.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._heard: set[NodeId] = set()

    def reset(self) -> None:
        """Forget the iteration."""
        self._heard.clear()

    def received(self, received: Received) -> list[Effect]:
        """Have the device look at what a member has shown: one thing of each, in an iteration."""
        context, message, tensor = self._context, received.message, received.tensor
        assert isinstance(message, Unusable), message
        if tensor is None:
            return []
        shown = context.tensors.add(tensor)
        subject = Subject(message.iteration, message.microbatch, message.is_gradient)
        signer = context.proofs.signer_of(message.proof, subject)
        signed = signer is not None and digest_in(message.proof) == tensor.digest
        leads = context.node_id == context.view.leader
        if signer is None or not signed or not leads or received.sender in self._heard:
            return context.tensors.release(shown)
        self._heard.add(received.sender)
        looks = Inspect(message.microbatch, message.is_gradient)
        return context.compute.submit(looks, _Complaint(context, received.sender, signer), [shown])


@dataclass(frozen=True, slots=True)
class _Complaint:
    """One of them, which the device looks at."""

    context: Context
    by: NodeId
    signer: NodeId

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        return [noted("complaint.unfounded", peer=self.by, of=self.signer)]

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        return [Send(self.context.node_id, Suspect(self.signer, NOT_FINITE))]
