"""A microbatch on its way, as each node that it passes remembers it.

A microbatch goes forward along a path, stage by stage, back to its data node, which computes the
loss, and then the same way backward. `HeldMicrobatch` is a node's record of one of them:

    relay:      QUEUED -> COMPUTING -> SENT -> AWAITING -> RETURNING -> FOLDED
    data node:  COMPUTING -> SENT -> AWAITING -> HEAD -> AWAITING_GRADIENT -> RETURNING -> FOLDED

SENT ends with the next node's COMPLETE; without it in time, the sender tells the leader that the
peer may be gone. AWAITING ends with the gradient (at the data node: the last activation).

What a node has sent, forward and backward, it keeps until the iteration is over: if the receiver is
lost, another node of its stage takes its place and gets the same again (GWTF V-D). See
`relay_microbatches` and `data_microbatches`.

An activation or gradient may take a detour (`detours`): its sender gives it to a data node, which
sends it on. Both messages say the microbatch's path, so every node sees from its own place there
who comes before it and who behind; the data node on the way need not have heard of the microbatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from decod.ids import FlowId, MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.detours import Detour
from decod.protocol.core.effects import SendTensor
from decod.protocol.core.events import JobFinished, Received, SendFailed, earliest
from decod.protocol.core.jobs import ACTIVATION_RECEIVED, GRADIENT_RECEIVED, Inspect, Job
from decod.protocol.core.messages import (
    NOT_FINITE,
    SLOW,
    BackwardGradient,
    Complete,
    Deny,
    ForwardActivation,
    Message,
    Suspect,
    Unusable,
)
from decod.protocol.core.messages.microbatch_messages import Travelling
from decod.protocol.core.proofs import Subject, digest_in
from decod.protocol.core.view import Role, View


def origin_of(message: Travelling, sender: NodeId, receiver: NodeId, view: View) -> NodeId:
    """Return who has computed what came: its sender, or who had it sent by way of that.

    Args:
        message: What came.
        sender: Who sent it.
        receiver: Who got it.
        view: Of the receiver.
    """
    places = _places(message)
    member = view.by_id.get(sender)
    passed_on = member is not None and not member.stage_index and receiver in places
    return places[receiver][0] if passed_on else sender


def goal_of(message: Travelling, sender: NodeId) -> NodeId | None:
    """Return for whom is what its sender has computed; None if the path does not say so."""
    around = _places(message).get(sender)
    return around[1] if around is not None else None


def _places(message: Travelling) -> dict[NodeId, tuple[NodeId, NodeId]]:
    """Return who is before each node and behind it, on the way that a tensor takes."""
    way = (message.flow_id.data_node, *message.path)
    if isinstance(message, BackwardGradient):
        way = way[::-1]
    return {node: (way[i - 1], way[(i + 1) % len(way)]) for i, node in enumerate(way)}


_LATE_FACTOR = 4.0
"""A COMPLETE is late after this many times the usual wait: slow is not dead."""


class Phase(Enum):
    QUEUED = "queued"
    """A relay that has taken over for another has no room for it yet."""
    COMPUTING = "computing"
    SENT = "sent"
    AWAITING = "awaiting"
    HEAD = "head"
    AWAITING_GRADIENT = "awaiting_gradient"
    RETURNING = "returning"
    FOLDED = "folded"


@dataclass(slots=True)
class HeldMicrobatch:
    """A microbatch of this iteration at one node."""

    microbatch: MicrobatchId
    flow_id: FlowId
    path: tuple[NodeId, ...]
    """The relays that it passes, one for each stage."""
    path_version: int
    """0, or the version of the view in which another relay was put into the path."""
    stage_index: int
    """This node's."""
    phase: Phase = Phase.COMPUTING
    sent_s: float = 0.0
    complete_by_s: float | None = None
    forward: TensorId | None = None
    """What was sent downstream, if it is kept."""
    backward: TensorId | None = None
    """The gradient that was sent upstream (at the data node: back to the last relay), if kept."""
    entry: TensorId | None = None
    """The activation that came, if it is kept until the backward pass."""
    detour: Detour | None = None
    """The one that the activation takes that went, if any."""
    detour_back: Detour | None = None
    """Likewise the gradient's."""
    proofs: dict[bool, bytes] = field(default_factory=dict)
    """Of what came: of the gradient (True), and of the activation (False)."""
    shed: bool = False
    """What the backward pass needs was let go of: the forward pass is computed again before it."""

    @property
    def home(self) -> NodeId:
        return self.flow_id.data_node

    @property
    def upstream(self) -> NodeId:
        """Who sends the activation; at the data node the last relay."""
        if self.stage_index == 1:
            return self.home
        return self.path[self.stage_index - 2] if self.stage_index else self.path[-1]

    @property
    def downstream(self) -> NodeId:
        """Who gets the activation and sends the gradient."""
        return self.path[self.stage_index] if self.stage_index < len(self.path) else self.home

    @property
    def awaits(self) -> bool:
        """Whether the next node has to do something: say COMPLETE, or send what comes back."""
        return self.phase in (Phase.SENT, Phase.AWAITING, Phase.AWAITING_GRADIENT)

    @property
    def passed_on(self) -> bool:
        """Whether the forward pass of this node is done."""
        return self.phase not in (Phase.QUEUED, Phase.COMPUTING)


class SentTensors:
    """References to what was sent in this iteration, as far as there is room for it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._out = context.out
        self._size_bytes = 0

    def send_forward(self, held: HeldMicrobatch, output: TensorId) -> None:
        """Send an activation to the next node, and keep it."""
        self.keep_forward(held, output)
        self._on(held, output)

    def keep_forward(self, held: HeldMicrobatch, output: TensorId) -> None:
        """Keep an activation that the next node may still come to need."""
        if self._keep(output):
            held.forward = output

    def send_backward(self, held: HeldMicrobatch, output: TensorId) -> None:
        """Send a gradient to the node before, and keep it."""
        if self._keep(output):
            held.backward = output
        self._back(held, output)

    def _keep(self, tensor: TensorId) -> bool:
        tensors = self._context.tensors
        size_bytes = tensors.size_of(tensor)
        if self._size_bytes + size_bytes > self._context.run.protocol.keep_max_bytes:
            return False
        self._size_bytes += size_bytes
        tensors.retain(tensor)
        return True

    def keep_entry(self, held: HeldMicrobatch, entry: TensorId) -> None:
        """Keep an activation that came, from which the forward pass can be computed again."""
        if self._keep(entry):
            held.entry = entry

    def take_entry(self, held: HeldMicrobatch) -> TensorId | None:
        """Hand over the activation that came, with its reference, if it is kept."""
        entry = held.entry
        held.entry = None
        if entry is not None:
            self._size_bytes -= self._context.tensors.size_of(entry)
        return entry

    def forward_again(self, held: HeldMicrobatch) -> bool:
        """Send the activation to the present next node. Return whether it was kept."""
        if held.forward is None:
            return False
        self._context.tensors.retain(held.forward)
        self._on(held, held.forward)
        return True

    def backward_again(self, held: HeldMicrobatch) -> bool:
        """Send the gradient to the present node before. Return whether it was kept."""
        if held.backward is None:
            return False
        self._context.tensors.retain(held.backward)
        self._back(held, held.backward)
        return True

    def undelivered(self, event: SendFailed, *known: Mapping[MicrobatchId, HeldMicrobatch]) -> None:
        """A tensor could not be sent: if this was a part of a detour, there may be another way.

        Args:
            event: The failure.
            known: Microbatches of this node.
        """
        message = event.message
        here = self._context.node_id
        if not isinstance(message, Travelling):
            return
        origin = origin_of(message, here, event.to, self._context.view)
        if origin == here:
            held = next((h[message.microbatch] for h in known if message.microbatch in h), None)
            self.stuck(held, event.to)
        else:
            reason = f"it can't be passed on: {event.reason}"[:200]
            deny = Deny(message.iteration, message.microbatch, message.flow_id, reason)
            self._out.send(origin, deny)

    def stuck(self, held: HeldMicrobatch | None, by: NodeId) -> bool:
        """What went by way of a data node does not get on from there, or not even there: send it
        again, another way. Return whether anything was sent: nothing is if nothing went that way,
        or if it has arrived all the same."""
        detours = self._context.detours
        if held is None:
            return False
        sent = False
        if held.phase is Phase.SENT and held.detour is not None and held.detour.by == by:
            detours.avoid(by, held.downstream)
            sent = self.forward_again(held)
        if held.detour_back is not None and held.detour_back.by == by:
            detours.avoid(by, held.upstream)
            sent = self.backward_again(held) or sent
        return sent

    def pass_on(
        self, held: HeldMicrobatch | None, sender: NodeId, message: Travelling, tensor: TensorId
    ) -> bool:
        """At a data node: send on what is for another node. Return whether it was.

        Args:
            held: The microbatch, if this node waits for it; its path is the newest then.
            sender: Who has computed what came.
            message: What came.
            tensor: It.
        """
        here = self._context.node_id
        if held is not None:
            back = isinstance(message, BackwardGradient)
            newest = self._gradient(held) if back else self._activation(held)
            message = replace(newest, proof=message.proof)
        elif message.flow_id.data_node == here:
            return False
        goal = goal_of(message, sender)
        if goal is None or goal == here or goal not in self._context.view:
            return False
        self._context.detours.sends(goal, tensor)
        self._out.put(SendTensor(goal, message, tensor))
        return True

    def _on(self, held: HeldMicrobatch, tensor: TensorId) -> None:
        to, held.detour = self._choose(held.downstream, held, tensor)
        self._out.put(SendTensor(to, self._activation(held), tensor))

    def _back(self, held: HeldMicrobatch, tensor: TensorId) -> None:
        to, held.detour_back = self._choose(held.upstream, held, tensor)
        self._out.put(SendTensor(to, self._gradient(held), tensor))

    def _choose(
        self, to: NodeId, held: HeldMicrobatch, tensor: TensorId
    ) -> tuple[NodeId, Detour | None]:
        """Return to whom a tensor for the next node is sent, and the detour that it takes."""
        byways = {held.home, *self._context.neighbours.byways} - {to, self._context.node_id}
        detour = self._context.detours.choose(to, byways, tensor)
        return (to, None) if detour is None else (detour.by, detour)

    def release(self, held: HeldMicrobatch) -> None:
        """Let go of what was kept of one microbatch."""
        all_three = (held.entry, held.forward, held.backward)
        kept = [tensor for tensor in all_three if tensor is not None]
        self._size_bytes -= sum(map(self._context.tensors.size_of, kept))
        held.entry = held.forward = held.backward = None
        self._context.tensors.release(*kept)

    def _activation(self, held: HeldMicrobatch) -> ForwardActivation:
        return ForwardActivation(
            self._context.iteration, held.microbatch, held.flow_id, held.path, held.path_version
        )

    def _gradient(self, held: HeldMicrobatch) -> BackwardGradient:
        return BackwardGradient(
            self._context.iteration, held.microbatch, held.flow_id, held.path, held.path_version
        )


class Waits:
    """How long COMPLETE usually takes, and who is late."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._out = context.out
        self._usual_s: float | None = None
        self.deadline_s: float | None = None
        """Not after the first COMPLETE that is due; one that came leaves it as it was."""

    def sent(self, now_s: float, held: HeldMicrobatch) -> None:
        held.phase = Phase.SENT
        held.sent_s = now_s
        usual_s = self._usual_s or 0.0
        patience_s = max(self._context.run.protocol.complete_timeout_s, _LATE_FACTOR * usual_s)
        held.complete_by_s = now_s + patience_s
        self.deadline_s = earliest(self.deadline_s, held.complete_by_s)

    def completed(self, now_s: float, sender: NodeId, held: HeldMicrobatch | None) -> None:
        """Take in a COMPLETE, if it is the one that `held` waits for."""
        if held is None or held.downstream != sender or held.phase is not Phase.SENT:
            return
        waited_s = now_s - held.sent_s
        self._usual_s = (
            waited_s if self._usual_s is None else self._usual_s + 0.1 * (waited_s - self._usual_s)
        )
        held.phase = Phase.AWAITING
        held.complete_by_s = None

    def overdue(self, now_s: float, held_all: Mapping[MicrobatchId, HeldMicrobatch]) -> None:
        """Tell the leader of peers whose COMPLETE is late, once for each wait."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return
        self.deadline_s = None
        late: dict[NodeId, HeldMicrobatch] = {}
        for held in held_all.values():
            if held.complete_by_s is not None and held.complete_by_s <= now_s:
                late[held.downstream] = held
                self.sent(now_s, held)
            self.deadline_s = earliest(self.deadline_s, held.complete_by_s)
        leader = self._context.view.leader
        for peer in late:
            if peer != leader:
                self._out.send(leader, Suspect(peer, SLOW))


class Microbatches:
    """A node's microbatches of one iteration after another: what data nodes and relays share.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._out = context.out
        self.held: dict[MicrobatchId, HeldMicrobatch] = {}
        """Under way."""
        self.done: dict[MicrobatchId, HeldMicrobatch] = {}
        """In this node's sum of gradients."""
        self._sent = SentTensors(context)
        self._waits = Waits(context)

    @property
    def deadline_s(self) -> float | None:
        return self._waits.deadline_s

    def overdue(self, now_s: float) -> None:
        self._waits.overdue(now_s, self.held)

    @property
    def folded(self) -> Sequence[MicrobatchId]:
        """What is in this node's sum of gradients."""
        return [*self.done]

    def dealt_with(self, relay: NodeId) -> Sequence[HeldMicrobatch]:
        """Return what this node has folded in that a relay has got from it, or given to it; all of
        it, of this relay.
        """
        own = self._context.node_id
        return [h for h in self.done.values() if relay in (own, h.upstream, h.downstream)]

    def undelivered(self, event: SendFailed) -> None:
        """An activation or gradient could not be sent."""
        self._sent.undelivered(event, self.held, self.done)

    def relays_work(self) -> dict[NodeId, int]:
        """Return how many microbatches of the iteration relays have worked on, as far as known."""
        return {}

    def open(self, now_s: float, *, ready: bool = False) -> None:
        """Begin the context's iteration.

        Args:
            now_s: The instant.
            ready: Whether relays that were ready in the last iteration need not say so again.
        """
        raise NotImplementedError

    def inject(self) -> None:
        """Start what has waited for a flow."""

    def admit(self) -> None:
        """Start what has waited for room or the stage's state."""

    def mend(self, now_s: float) -> None:
        """Some relays are not in the context's view any more: have others take their place."""
        raise NotImplementedError

    def committed(self, averaged: int | None, *, arrived: bool, marked: bool) -> None:
        """The context's iteration is final.

        Args:
            averaged: The fragment whose local phase it has ended. 0: that of all. None: none.
            arrived: It has ended with an average that had travelled.
            marked: States of it are kept.
        """

    def go_back(self, iteration: int) -> None:
        """The run goes on from an earlier state."""

    def received(self, now_s: float, sender: NodeId, message: Message) -> None:
        """Take in what another says of a microbatch, if it is of use to this role."""
        match message:
            case Complete():
                self.complete(now_s, sender, message)
            case Deny():
                self.denied(now_s, sender, message)

    def complete(self, now_s: float, sender: NodeId, message: Complete) -> None:
        """The next node has computed a microbatch."""
        self._waits.completed(now_s, sender, self.held.get(message.microbatch))

    def denied(self, now_s: float, sender: NodeId, message: Deny) -> None:
        """The next node does not take a microbatch."""
        raise NotImplementedError

    def _refused(
        self, held: HeldMicrobatch, sender: NodeId, reason: str, *, is_gradient: bool
    ) -> None:
        """This node's device did not compute with a microbatch.

        If what another has sent can't be used, the leader hears of it. A data node is believed.

        Args:
            held: The microbatch. The job that was refused read what has come.
            sender: Who has sent what the device was given.
            reason: Why it was refused.
            is_gradient: The device was given a gradient, and not an activation.
        """
        context = self._context
        about = {"microbatch": str(held.microbatch), "peer": sender, "reason": reason}
        self._out.note("microbatch.refused", **about)
        if not any(what in reason for what in (ACTIVATION_RECEIVED, GRADIENT_RECEIVED)):
            return
        leader = context.view.leader
        proof = held.proofs.get(is_gradient)
        if not proof or context.member.role is Role.DATA:
            self._out.send(leader, Suspect(sender, NOT_FINITE))
        else:
            (tensor,) = context.compute.refused
            message = Unusable(context.iteration, held.microbatch, is_gradient, proof)
            self._out.put(SendTensor(leader, message, context.tensors.retain(tensor)))


class Complaints:
    """What members have shown the leader in an iteration.

    The leader looks at it. So one member's complaint is enough: nobody can make up what another has
    signed (`decod.protocol.core.proofs`). Honest members compute nothing that is not finite: their
    devices refuse to send it.

    Args:
        context: The leader's, or of a node that is none.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._out = context.out
        self._heard: set[NodeId] = set()

    def reset(self) -> None:
        """Forget the iteration."""
        self._heard.clear()

    def received(self, received: Received) -> None:
        """Have the device look at what a member has shown: one thing of each, in an iteration."""
        context = self._context
        message = received.message
        tensor = received.tensor
        assert isinstance(message, Unusable), message
        if tensor is None:
            return
        shown = context.tensors.add(tensor)
        subject = Subject(message.iteration, message.microbatch, message.is_gradient)
        signer = context.proofs.signer_of(message.proof, subject)
        signed = signer is not None and digest_in(message.proof) == tensor.digest
        leads = context.node_id == context.view.leader
        if signer is None or not signed or not leads or received.sender in self._heard:
            context.tensors.release(shown)
        else:
            self._heard.add(received.sender)
            looks = Inspect(message.microbatch, message.is_gradient)
            complaint = _Complaint(context, received.sender, signer)
            context.compute.submit(looks, complaint, [shown])


@dataclass(frozen=True, slots=True)
class _Complaint:
    """One of them, which the device looks at."""

    context: Context
    by: NodeId
    signer: NodeId

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        self.context.out.note("complaint.unfounded", peer=self.by, of=self.signer)

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        self.context.out.send(self.context.node_id, Suspect(self.signer, NOT_FINITE))
