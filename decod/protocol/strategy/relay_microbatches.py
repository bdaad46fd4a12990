"""What a relay does with microbatches: forward, backward, and in the place of one that was lost.

A microbatch comes along a flow that this relay carries, or, when its path was changed because a
relay was lost, from wherever the new path comes from. More than the relay has room for wait in a
queue; that can't last, because those at the last stage never wait for anybody who waits.

Where links are slower than devices, a relay that is full would stand idle until a gradient comes
back. So it *sheds* a microbatch that waits for its gradient: it lets go of what the forward pass
has left for the backward pass, keeps the activation that came, and computes the forward pass again
when the gradient is there. So the capacity bounds what is in the device's memory at a time, not
what is on its way. Deviation from GWTF, in which a full node takes nothing more.

A DENY goes back up the flow: each node on the way forgets the microbatch and the flow. After a
change of path others may have it in their sums, so then the data node alone is told.
"""

from collections import deque
from collections.abc import Callable, Sequence

from typing_extensions import override

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.events import JobFinished, Tensor
from decod.protocol.core.jobs import Backward, Drop, Forward, Job
from decod.protocol.core.messages import (
    BackwardGradient,
    Complete,
    Deny,
    ForwardActivation,
    Mended,
    Message,
    Reroute,
)
from decod.protocol.flows.building import RelayFlows
from decod.protocol.strategy.microbatch import (
    HeldMicrobatch,
    Microbatches,
    Phase,
    origin_of,
)


class RelayMicrobatches(Microbatches):
    """A relay's microbatches of one iteration after another.

    Args:
        context: The node's.
        flows: What it carries.
        loaded: Whether it holds its stage's committed parameters.
    """

    def __init__(
        self, context: Context, flows: Callable[[], RelayFlows], loaded: Callable[[], bool]
    ) -> None:
        super().__init__(context)
        self._flows = flows
        self._loaded = loaded
        self._queue: deque[tuple[HeldMicrobatch, TensorId]] = deque()
        self._early: dict[MicrobatchId, dict[NodeId, tuple[TensorId, bytes]]] = {}
        """Gradients that came before this node was ready for them, by sender, and the proofs."""
        self._returns: deque[tuple[HeldMicrobatch, TensorId]] = deque()
        """Shed microbatches whose gradients have come; they wait for room."""
        self._repeating: dict[MicrobatchId, TensorId] = {}
        """Gradients of those whose forward pass is being computed again."""
        self._routes: dict[MicrobatchId, Reroute] = {}
        """The newest change of each microbatch's path."""

    @property
    def all_done(self) -> bool:
        """Whether all reported microbatches are folded: none was, while one was here."""
        return True

    @override
    def open(self, now_s: float, *, ready: bool = False) -> None:
        """Begin the context's iteration: with what data nodes send."""

    @override
    def mend(self, now_s: float) -> None:
        """Go on with what data nodes reroute."""

    def reset(self) -> None:
        """Forget the iteration, and what was kept for it."""
        self._context.tensors.release(*(tensor for _, tensor in self._queue))
        early = [tensor for senders in self._early.values() for tensor, _ in senders.values()]
        self._context.tensors.release(*early)
        self._context.tensors.release(*(tensor for _, tensor in self._returns))
        self._context.tensors.release(*self._repeating.values())
        for held in (*self.held.values(), *self.done.values()):
            self._sent.release(held)
        for record in (self.held, self.done, self._early, self._repeating, self._routes):
            record.clear()
        self._queue.clear()
        self._returns.clear()
        self._context.detours.reset()

    @override
    def received(self, now_s: float, sender: NodeId, message: Message) -> None:
        if isinstance(message, Reroute):
            self.reroute(now_s, sender, message)
        else:
            super().received(now_s, sender, message)

    # --- forward ------------------------------------------------------------------------------

    def activation(self, sender: NodeId, message: ForwardActivation, tensor: Tensor) -> None:
        """Take an activation in, or DENY it."""
        context = self._context
        microbatch = message.microbatch
        context.tensors.add(tensor)
        sender = origin_of(message, sender, context.node_id, context.view)
        known = self.held.get(microbatch) or self.done.get(microbatch)
        if known is not None:
            context.tensors.release(tensor.id)
            if known.passed_on:
                self._out.send(sender, Complete(context.iteration, microbatch, 0.0))
            return
        held = self._record(message)
        if held is None or not self._expected(sender, message, held):
            deny = Deny(context.iteration, microbatch, message.flow_id, "no such flow here")
            context.tensors.release(tensor.id)
            self._out.send(sender, deny)
            return
        held.phase = Phase.QUEUED
        held.proofs[False] = message.proof
        self.held[microbatch] = held
        self._queue.append((held, tensor.id))
        self.admit()

    def _record(self, message: ForwardActivation) -> HeldMicrobatch | None:
        """Return a microbatch's record, with its newest path; None if that is not through here."""
        newest: ForwardActivation | Reroute = message
        route = self._routes.get(message.microbatch)
        if route is not None and route.path_version > message.path_version:
            newest = route
        member = self._context.member
        held = HeldMicrobatch(
            message.microbatch,
            message.flow_id,
            newest.path,
            newest.path_version,
            member.stage_index,
        )
        return held if _place(newest.path, member.stage_index) == member.node_id else None

    def _expected(self, sender: NodeId, message: ForwardActivation, held: HeldMicrobatch) -> bool:
        """Whether a microbatch comes along a flow of this node's, or along a changed path."""
        if message.path_version or held.path_version:
            return sender == held.upstream and self._is_of(sender, -1)
        flows = self._flows()
        flow_id = message.flow_id
        entry = flows.entries.get(flow_id)
        along = entry is not None and entry.downstream == held.downstream
        return along and flows.outflows.paired.get(flow_id) == sender == held.upstream

    @override
    def admit(self) -> None:
        """Begin with what waits, as far as there is room; those on their way back first."""
        while (self._returns or self._queue) and self._loaded():
            if not self._has_room() and not self._shed_one():
                break
            if self._returns:
                held, gradient = self._returns.popleft()
                entry = self._sent.take_entry(held)
                assert entry is not None, held
                held.shed = False
                self._repeating[held.microbatch] = gradient
            else:
                held, entry = self._queue.popleft()
                held.phase = Phase.COMPUTING
                self._sent.keep_entry(held, entry)
            self._context.compute.submit(Forward(held.microbatch), self, [entry])

    def _has_room(self) -> bool:
        here = sum(h.phase is not Phase.QUEUED and not h.shed for h in self.held.values())
        return here < self._context.member.capacity

    def _shed_one(self) -> bool:
        """Let go of the microbatch that will be back last. Return whether that is worth it.

        It is worth a forward pass where the device has nothing else to do, and the gradient's way
        takes longer than that pass.
        """
        links = self._context.links
        if not self._context.compute.idle:
            return False
        for held in reversed(self.held.values()):
            away = held.phase in (Phase.SENT, Phase.AWAITING) and not held.shed
            if away and held.entry is not None:
                if links.transfer_s(held.downstream) <= links.compute_s:
                    return False
                held.shed = True
                self._context.compute.submit(Drop(held.microbatch))
                return True
        return False

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:
        """A pass has been computed."""
        self._context.links.computed(job, event.duration_s)
        assert len(event.outputs) == 1, f"{job} ended with {len(event.outputs)} outputs"
        output = event.outputs[0]
        match job:
            case Forward(microbatch):
                self.forwarded(now_s, microbatch, output.id, event.duration_s)
            case Backward(microbatch):
                self.returned(microbatch, output.id)
            case _:
                raise AssertionError(f"{job} is no pass of a relay's")

    def forwarded(
        self, now_s: float, microbatch: MicrobatchId, output: TensorId, duration_s: float
    ) -> None:
        """The forward pass has been computed: send it on, and COMPLETE back."""
        context = self._context
        held = self.held.get(microbatch)
        if held is None:
            # It was refused while it was computed: nobody waits for the output.
            context.tensors.release(output)
            self.admit()
            return
        if (gradient := self._repeating.pop(microbatch, None)) is not None:
            context.tensors.release(output)
            context.compute.submit(Backward(microbatch), self, [gradient])
            return
        sender, early, unused = self._take_early(held)
        if early is None:
            self._waits.sent(now_s, held)
        if sender == held.downstream:
            # It has had the activation from the one whose place this one takes.
            self._sent.keep_forward(held, output)
            unused.append(output)
        else:
            # Even if a gradient is here: whoever sent that is lost too, and another needs both to
            # do its part again.
            self._sent.send_forward(held, output)
        self._out.send(held.upstream, Complete(context.iteration, microbatch, duration_s))
        context.tensors.release(*unused)
        if early is None:
            self.admit()
        else:
            gradient, held.proofs[True] = early
            held.phase = Phase.RETURNING
            self._begin_backward(held, gradient)

    def _take_early(
        self, held: HeldMicrobatch
    ) -> tuple[NodeId | None, tuple[TensorId, bytes] | None, list[TensorId]]:
        """Return who sent the gradient that came early, the gradient, and those of others.

        It is of the next node on the path, or of the one before that, which is lost. Any member of
        the next stage may have sent others.
        """
        early = self._early.pop(held.microbatch, {})
        lost = [node for node in early if node not in self._context.view]
        sender = next((node for node in (held.downstream, *lost) if node in early), None)
        rest = [tensor for node, (tensor, _) in early.items() if node != sender]
        return sender, None if sender is None else early[sender], rest

    @override
    def complete(self, now_s: float, sender: NodeId, message: Complete) -> None:
        held = self.held.get(message.microbatch)
        if (
            held is not None
            and held.detour is not None
            and (held.phase, held.downstream) == (Phase.SENT, sender)
        ):
            took_s = now_s - held.sent_s - message.compute_s
            self._context.detours.completed(now_s, sender, held.detour, took_s)
        super().complete(now_s, sender, message)

    # --- backward -----------------------------------------------------------------------------

    def gradient(self, sender: NodeId, message: BackwardGradient, tensor: Tensor) -> None:
        """Begin the backward pass, or keep the gradient until the forward pass is done."""
        context = self._context
        microbatch = message.microbatch
        context.tensors.add(tensor)
        held = self.held.get(microbatch)
        sender = origin_of(message, sender, context.node_id, context.view)
        over = microbatch in self.done or sender in self._early.get(microbatch, ())
        if held is not None:
            over |= held.phase is Phase.RETURNING or sender != held.downstream
        if over or not self._is_of(sender, 1):
            context.tensors.release(tensor.id)
            return
        if held is None or not held.passed_on:
            self._early.setdefault(microbatch, {})[sender] = (tensor.id, message.proof)
            return
        held.phase = Phase.RETURNING
        held.complete_by_s = None
        held.proofs[True] = message.proof
        if held.shed:
            self._returns.append((held, tensor.id))
            self.admit()
        else:
            self._begin_backward(held, tensor.id)

    def _begin_backward(self, held: HeldMicrobatch, gradient: TensorId) -> None:
        """The forward pass won't be needed again, unless the iteration is repeated."""
        entry = self._sent.take_entry(held)
        if entry is not None:
            self._context.tensors.release(entry)
        self._context.compute.submit(Backward(held.microbatch), self, [gradient])

    def _is_of(self, sender: NodeId, away: int) -> bool:
        """Whether a sender is of the stage so many behind this one."""
        view = self._context.view
        stage = self._context.member.stage_index
        member = view.by_id.get(sender)
        return member is not None and member.stage_index == (stage + away) % view.num_stages

    def returned(self, microbatch: MicrobatchId, output: TensorId) -> None:
        """The backward pass has been computed: it counts, and its gradient goes upstream."""
        held = self.held.pop(microbatch)
        held.phase = Phase.FOLDED
        self.done[microbatch] = held
        self._sent.send_backward(held, output)
        self._say_mended(held)
        self.admit()

    # --- other ways ---------------------------------------------------------------------------

    def reroute(self, now_s: float, sender: NodeId, message: Reroute) -> None:
        """A microbatch takes another path: give its new neighbours what the old ones had."""
        known = self._routes.get(message.microbatch)
        newer = known is None or known.path_version < message.path_version
        if sender != message.flow_id.data_node or not newer:
            return
        self._routes[message.microbatch] = message
        held = self.held.get(message.microbatch) or self.done.get(message.microbatch)
        here = _place(message.path, self._context.member.stage_index)
        if held is None or held.path_version >= message.path_version:
            if held is not None:
                self._say_mended(held)
            return
        if here != self._context.node_id:
            return
        before = held.upstream
        behind = held.downstream
        held.path = message.path
        held.path_version = message.path_version
        self._say_mended(held)
        if held.downstream != behind and held.passed_on:
            self._sent_again(held, kept=self._sent.forward_again(held))
            if held.phase in (Phase.SENT, Phase.AWAITING):
                self._waits.sent(now_s, held)
        if held.upstream != before and held.phase is Phase.FOLDED:
            self._sent_again(held, kept=self._sent.backward_again(held))

    def _sent_again(self, held: HeldMicrobatch, *, kept: bool) -> None:
        if not kept:
            reason = "what the lost node had been sent was not kept"
            self._out.send(held.home, self._refusal(held, reason))

    def _say_mended(self, held: HeldMicrobatch) -> None:
        route = self._routes.get(held.microbatch)
        owing = route is not None and self._context.node_id in route.owing
        if owing and held.phase is Phase.FOLDED:
            self._out.send(held.home, Mended(self._context.iteration, held.microbatch))

    # --- refusals -----------------------------------------------------------------------------

    @override
    def denied(self, now_s: float, sender: NodeId, message: Deny) -> None:
        """Pass a DENY upstream and forget the microbatch and its flow."""
        held = self.held.get(message.microbatch)
        if self._sent.stuck(held or self.done.get(message.microbatch), sender):
            return
        if held is None or held.downstream != sender or held.phase is Phase.RETURNING:
            return
        if held.path_version:
            self._out.send(held.home, message)
        else:
            self._forget(now_s, held, message)

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:
        """This node's device refused the microbatch (a value was not finite, say)."""
        assert isinstance(job, (Forward, Backward))
        held = self.held.get(job.microbatch)
        if held is None:
            return
        deny = self._refusal(held, reason)
        back = isinstance(job, Backward)
        sender = held.downstream if back else held.upstream
        self._refused(held, sender, reason, is_gradient=back)
        if held.path_version:
            self._out.send(held.home, deny)
        else:
            self._forget(now_s, held, deny)

    def _refusal(self, held: HeldMicrobatch, reason: str) -> Deny:
        return Deny(self._context.iteration, held.microbatch, held.flow_id, reason)

    def _forget(self, now_s: float, held: HeldMicrobatch, message: Deny) -> None:
        del self.held[held.microbatch]
        self._out.send(held.upstream, message)
        self._sent.release(held)
        gradient = self._repeating.pop(held.microbatch, None)
        if gradient is not None:
            self._context.tensors.release(gradient)
        self._context.compute.submit(Drop(held.microbatch))
        self._flows().drop(now_s, held.flow_id)
        self.admit()


def _place(path: Sequence[NodeId], stage_index: int) -> NodeId | None:
    """Return the relay of a stage on a path; None: that is the data node's, or there is none."""
    return path[stage_index - 1] if 0 < stage_index <= len(path) else None
