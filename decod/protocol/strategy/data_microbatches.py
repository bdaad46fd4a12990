"""What a data node does with its share of the batch: injected as flows allow, home, reported.

The share waits in `WaitingMicrobatches`, and is accounted for in `ShareReport`. A DENY makes the
data node try another flow, or put the microbatch off to the next iteration. When relays are lost
and the iteration goes on without them, it chooses others for all its microbatches that went through
them, also for those that had come home: what a lost relay had folded in is gone with it, and must
be folded in by another before the share is done.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from typing_extensions import override

from decod.ids import FlowId, MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.events import JobFinished, Tensor, earliest
from decod.protocol.core.jobs import Drop, Embed, EmbedBackward, Head, Job, Loss
from decod.protocol.core.messages import (
    BackwardGradient,
    CanTake,
    Complete,
    Deny,
    ForwardActivation,
    Mended,
    Message,
    Reroute,
)
from decod.protocol.core.messages.microbatch_messages import Travelling
from decod.protocol.flows.building import DataFlows, Granted
from decod.protocol.flows.substitutes import Path, Substitutes
from decod.protocol.strategy.data_share import Learners, ShareReport, shares_of
from decod.protocol.strategy.microbatch import (
    HeldMicrobatch,
    Microbatches,
    Phase,
    origin_of,
)

_FLOW_PATIENCE = 4
"""Answer timeouts that a data node waits for its first flow; all bounds on relays fell before."""


class WaitingMicrobatches:
    """The queue of one data node's share in an iteration.

    Args:
        context: The node's.
        flows: Returns the flows in use.
    """

    def __init__(self, context: Context, flows: Callable[[], DataFlows]) -> None:
        self._context = context
        self._flows = flows
        self.queue: deque[MicrobatchId] = deque()
        self.can_take: set[NodeId] = set()
        """Relays that are ready to be sent microbatches."""
        self._flow_by_s: float | None = None
        self._follow_s: float | None = None
        """When microbatches that find no free flow may follow those under way."""

    @property
    def deadline_s(self) -> float | None:
        return earliest(self._flow_by_s, self._follow_s)

    def reset(self) -> None:
        """Forget the iteration, but not which relays were ready in it."""
        self.queue.clear()

    def open(self, now_s: float, microbatches: Iterable[MicrobatchId], *, ready: bool) -> None:
        """Begin an iteration with these.

        Args:
            now_s: The instant.
            microbatches: What is to start.
            ready: Whether relays that were ready in the last iteration are so in this one.
        """
        if not ready:
            self.can_take.clear()
        self.queue.extend(microbatches)
        timeout_s = self._context.run.protocol.answer_timeout_s
        self._flow_by_s = now_s + _FLOW_PATIENCE * timeout_s
        self._follow_s = now_s + timeout_s

    def in_vain(self, now_s: float) -> bool:
        """Return whether the wait for a first flow ends now, and there is none."""
        if self._flow_by_s is None or now_s < self._flow_by_s:
            return False
        self._flow_by_s = None
        return not self._flows().forwarding and not self._context.view.idle_stages

    def may_follow(self, now_s: float) -> bool:
        """Return whether microbatches may follow others from now on."""
        if self._follow_s is None or now_s < self._follow_s:
            return False
        self._follow_s = None
        return True

    def start(
        self, under_way: Collection[HeldMicrobatch], done: Collection[HeldMicrobatch]
    ) -> list[HeldMicrobatch]:
        """Take those that can start now, on flows whose first hop is ready.

        Only as many start as keep the device busy, so a flow is chosen when it is known which
        relays have little to do. Each flow is used once. Flows take turns, so that each relay gets
        its part evenly over time. In the order of their costs, one relay might get its whole part
        before its neighbour gets anything.

        Once all flows are ready, or should have been found, those for which none is free follow the
        others, on the flow that would be done with them first, as many as this node can hold: a
        relay that is full makes them wait, and has the next one at hand as soon as there is room.

        Args:
            under_way: This node's microbatches that have not come home.
            done: Those that have, in this iteration.
        """
        num_entering = sum(not held.passed_on for held in under_way)
        room = min(self._context.member.capacity - len(under_way), _ENTERING_MAX - num_entering)
        if room <= 0 or not self.queue:
            return []
        flows = self._flows()
        ready = {
            flow_id: granted
            for flow_id, granted in flows.forwarding.items()
            if granted.peer in self.can_take or flows.carried
        }
        final = flows.carried or (flows.final and len(ready) == len(flows.forwarding))
        follows = self._follow_s is None or final
        loads = Counter(held.flow_id for held in under_way)
        used = {*loads, *(held.flow_id for held in done)}
        num_at = Counter(relay for held in under_way for relay in held.path)
        num_flows = Counter(relay for flow in flows.forwarding.values() for relay in flow.path)

        def place(granted: Granted) -> tuple[bool, bool, float, float, FlowId]:
            """Return what orders flows: new ones first, then free ones."""
            num, was_used = loads[granted.flow_id], granted.flow_id in used
            parts = () if was_used else ((num_at[k] + 1) / num_flows[k] for k in granted.path)
            cost_s = (num + 1) * granted.cost_s
            return num > 0, was_used, max(parts, default=0.0), cost_s, granted.flow_id

        started: list[HeldMicrobatch] = []
        while ready and self.queue and len(started) < room:
            flow = min(ready.values(), key=place)
            if loads[flow.flow_id] and not follows:
                break
            loads[flow.flow_id] += 1
            used.add(flow.flow_id)
            num_at.update(flow.path)
            microbatch = self.queue.popleft()
            started.append(
                HeldMicrobatch(
                    microbatch, flow.flow_id, flow.path, flow.path_version, stage_index=0
                )
            )
        return started

    def give_up(self) -> list[MicrobatchId]:
        """Return what waits; nothing does any longer."""
        given_up = [*self.queue]
        self.queue.clear()
        return given_up

    def mend(self, others: Substitutes) -> None:
        """Put substitutes in the place of lost relays, in the flows in use."""
        flows = self._flows()
        for flow_id, granted in flows.forwarding.items():
            path = others.mend(granted.path)
            if path != granted.path:
                flows.forwarding[flow_id] = replace(
                    granted, peer=path[0], path=path, path_version=self._context.view.version
                )
                self.can_take.add(path[0])


_ENTERING_MAX = 2
"""Microbatches whose tokens are on their way through this node's first blocks: as many as the
compute process holds."""
_AT_HAND = 2
"""Microbatches that a relay needs from a data node: one that it computes, and one that travels."""

_NEW_PER_AGAIN = 2
"""An iteration has at least so many new microbatches for each that is trained on again."""


class DataMicrobatches(Microbatches):
    """A data node's share of the batch: injected as flows allow, counted when it comes home.

    Args:
        context: The node's.
        flows: Returns the flows in use.
        folded: Called when a microbatch has come all the way home.
        num_microbatches: Of each share, per iteration.
    """

    def __init__(
        self,
        context: Context,
        flows: Callable[[], DataFlows],
        folded: Callable[[], None],
        *,
        num_microbatches: int,
    ) -> None:
        super().__init__(context)
        self._flows = flows
        self._has_folded = folded
        self._num_microbatches = num_microbatches
        self.share = ShareReport(context)
        self.done = self.share.done
        self.learners = Learners(context)
        self._waiting = WaitingMicrobatches(context, flows)

    @override
    def relays_work(self) -> Counter[NodeId]:
        # A relay that took a lost one's place counts in its stead.
        return Counter(relay for held in self.done.values() for relay in held.path)

    @property
    def all_done(self) -> bool:
        """Whether all microbatches that were reported are folded."""
        return not self.held

    @property
    @override
    def deadline_s(self) -> float | None:
        return earliest(super().deadline_s, self._waiting.deadline_s)

    @override
    def overdue(self, now_s: float) -> None:
        super().overdue(now_s)
        if self._waiting.in_vain(now_s):
            self._give_up()
        if self._waiting.may_follow(now_s):
            self.inject()

    def _give_up(self) -> None:
        """Put the share off, for which no flow was found: others must not wait for ever."""
        if self.held or not self._waiting.queue:
            return
        self.share.put_off.update(self._waiting.give_up())
        reason = "no flow of this data node could be built"
        self._out.note("microbatch.deferred", microbatch="all", reason=reason)
        self._report()

    def reset(self) -> None:
        """Forget the iteration; what had been put off before it stays put off."""
        for held in (*self.held.values(), *self.done.values()):
            self._sent.release(held)
        self.held.clear()
        self.share.reset()
        self._waiting.reset()
        self._context.detours.reset()

    @override
    def open(self, now_s: float, *, ready: bool = False) -> None:
        """Begin the context's iteration with this node's shares of its batch."""
        self.reset()
        context = self._context
        iteration = self._context.iteration.number
        shares = shares_of(
            context.view, context.node_id, num_shares=context.run.batch.num_data_nodes
        )
        deferrals = self.share.deferrals
        deferrals.read_again(self.learners.take_lost())
        due: list[MicrobatchId] = []
        if shares:  # Else it is about to leave, and has no flows.
            num_again = max(1, len(shares) * self._num_microbatches // _NEW_PER_AGAIN)
            due = deferrals.due(shares, num_again=num_again)
        indexes = range(self._num_microbatches)
        batch = (MicrobatchId(iteration, share, k) for share in shares for k in indexes)
        self._waiting.open(now_s, [*due, *(m for m in batch if m not in deferrals)], ready=ready)
        self.share.open()
        self.inject()
        self._report()  # A share may be empty.

    @override
    def committed(self, averaged: int | None, *, arrived: bool, marked: bool) -> None:
        self.share.committed(marked=marked)
        self.learners.committed(self.done, averaged, arrived=arrived)

    @override
    def go_back(self, iteration: int) -> None:
        self.share.deferrals.go_back(iteration)
        self.learners.clear()

    def can_take(self, peer: NodeId) -> None:
        self._waiting.can_take.add(peer)
        self.inject()

    @override
    def received(self, now_s: float, sender: NodeId, message: Message) -> None:
        match message:
            case CanTake():
                self.can_take(sender)
            case Mended():
                self.mended(sender, message)
            case _:
                super().received(now_s, sender, message)
                self._feed()  # It may have been a COMPLETE.

    @override
    def inject(self) -> None:
        """Start the waiting microbatches that find a flow."""
        for held in self._waiting.start(self.held.values(), self.done.values()):
            self.held[held.microbatch] = held
            self._context.compute.submit(Embed(held.microbatch), self)
        self._feed()

    def _feed(self) -> None:
        """Embed at once what a relay with little at hand waits for.

        Otherwise a data node with much to do would finish what comes home first, and start the last
        microbatches when nothing is left to do beside them.
        """
        entering = [held for held in self.held.values() if not held.passed_on]
        if not entering:
            return
        ahead = [held for held in self.held.values() if held.phase is Phase.SENT]
        num_at_hand = Counter(held.downstream for held in (*entering, *ahead))
        for held in entering:
            if num_at_hand[held.downstream] <= _AT_HAND:
                self._context.compute.hasten(Embed(held.microbatch))

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:
        """A pass has been computed."""
        self._context.links.computed(job, event.duration_s)
        match job, event.result:
            case Embed(microbatch), _:
                self.embedded(now_s, microbatch, event.outputs[0].id)
            case Head(microbatch), Loss() as loss:
                self.headed(microbatch, loss, event.outputs[0].id, event.duration_s)
            case EmbedBackward(microbatch), _:
                self.returned(microbatch)
                self._has_folded()
            case _:
                raise AssertionError(f"{job} is no pass of a data node's")

    def embedded(self, now_s: float, microbatch: MicrobatchId, output: TensorId) -> None:
        held = self.held[microbatch]
        self._waits.sent(now_s, held)
        self._sent.send_forward(held, output)
        self.inject()

    def activation(self, sender: NodeId, message: ForwardActivation, tensor: Tensor) -> None:
        """The last relay's output has come home: compute the loss."""
        context = self._context
        context.tensors.add(tensor)
        held = self.held.get(message.microbatch) or self.done.get(message.microbatch)
        if self._pass_on(sender, message, tensor):
            return
        sender = origin_of(message, sender, context.node_id, context.view)
        ours = held is not None and held.flow_id == message.flow_id
        if held is None or not ours or sender != held.upstream:
            deny = Deny(context.iteration, message.microbatch, message.flow_id, "no such flow here")
            context.tensors.release(tensor.id)
            self._out.send(sender, deny)
        elif held.phase not in (Phase.SENT, Phase.AWAITING):
            context.tensors.release(tensor.id)
            self._out.send(sender, Complete(context.iteration, message.microbatch, 0.0))
        else:
            held.phase = Phase.HEAD
            held.complete_by_s = None
            held.proofs[False] = message.proof
            context.compute.submit(Head(message.microbatch), self, [tensor.id])

    def headed(
        self, microbatch: MicrobatchId, loss: Loss, output: TensorId, duration_s: float
    ) -> None:
        """The loss is known; its gradient goes back the way the activation came."""
        held = self.held[microbatch]
        held.phase = Phase.AWAITING_GRADIENT
        self.share.losses[microbatch] = loss
        self._sent.send_backward(held, output)
        complete = Complete(self._context.iteration, microbatch, duration_s)
        self._out.send(held.upstream, complete)

    def _pass_on(self, sender: NodeId, message: Travelling, tensor: Tensor) -> bool:
        """Send on what only comes by way of this node, if it is or may be waited for.

        Returns whether it was sent on.
        """
        known = self.done if message.microbatch in self.share.owing else {}
        held = self.held.get(message.microbatch) or known.get(message.microbatch)
        return self._sent.pass_on(held, sender, message, tensor.id)

    def gradient(self, sender: NodeId, message: BackwardGradient, tensor: Tensor) -> None:
        context = self._context
        context.tensors.add(tensor)
        held = self.held.get(message.microbatch)
        if self._pass_on(sender, message, tensor):
            return
        sender = origin_of(message, sender, context.node_id, context.view)
        awaited = held is not None and held.phase is Phase.AWAITING_GRADIENT
        if held is None or not awaited or sender != held.downstream:
            context.tensors.release(tensor.id)
            return
        held.phase = Phase.RETURNING
        held.proofs[True] = message.proof
        context.compute.submit(EmbedBackward(message.microbatch), self, [tensor.id])
        self._report()

    def returned(self, microbatch: MicrobatchId) -> None:
        """A microbatch has come all the way home."""
        held = self.held.pop(microbatch)
        held.phase = Phase.FOLDED
        self.done[microbatch] = held
        self.inject()

    @override
    def denied(self, now_s: float, sender: NodeId, message: Deny) -> None:
        """A flow is broken: try the microbatch on another, or put it off."""
        known = self.done.get(message.microbatch)
        held = self.held.get(message.microbatch, known)
        if self._sent.stuck(held, sender) or held is None:
            return
        if held.path_version and sender in held.path:
            self._fail_iteration(held, message.reason)
        elif held.downstream != sender:
            return
        elif held.phase in (Phase.SENT, Phase.AWAITING):
            self._put_back(held, message.reason)
        else:
            self._fail_iteration(held, message.reason)

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """This node's device refused the microbatch."""
        assert isinstance(job, (Embed, Head, EmbedBackward))
        held = self.held.get(job.microbatch)
        if held is None:
            return
        if held.phase is Phase.COMPUTING:
            self._put_off_now(held, reason)
        else:
            back = isinstance(job, EmbedBackward)
            sender = held.downstream if back else held.upstream
            self._refused(held, sender, reason, is_gradient=back)
            self._fail_iteration(held, reason)

    def _fail_iteration(self, held: HeldMicrobatch, reason: str) -> None:
        """Others have parts of this microbatch in their sums: ask for the iteration to be
        repeated.
        """
        if self.share.failed:
            return
        if not held.path_version or self._flows().carried:
            self.share.deferrals.put_off(held.microbatch)
        self.share.ask_again(f"microbatch {held.microbatch}: {reason}")

    def _put_back(self, held: HeldMicrobatch, reason: str) -> None:
        self._flows().drop(held.flow_id)
        if not self._flows().forwarding:
            self._put_off_now(held, reason)
            return
        del self.held[held.microbatch]
        self._waiting.queue.appendleft(held.microbatch)
        self._sent.release(held)
        self._context.compute.submit(Drop(held.microbatch))
        self.inject()

    def _put_off_now(self, held: HeldMicrobatch, reason: str) -> None:
        del self.held[held.microbatch]
        self.share.put_off.add(held.microbatch)
        if not self._flows().forwarding:
            self.share.put_off.update(self._waiting.give_up())
        self._out.note("microbatch.deferred", microbatch=str(held.microbatch), reason=reason)
        self._sent.release(held)
        self._context.compute.submit(Drop(held.microbatch))
        self.inject()
        self._report()

    # --- after a loss -------------------------------------------------------------------------

    @override
    def mend(self, now_s: float) -> None:
        if self.share.failed:
            return
        if self._waiting.queue and not self._flows().forwarding:
            self.share.ask_again("relays were lost before flows had been found")
            return
        self.share.open()
        everything = [*self.held.values(), *self.done.values()]
        paths = [held.path for held in everything]
        others = Substitutes(self._context, paths, newest=self._context.iteration.number - 1)
        self._waiting.mend(others)
        for held in everything:
            path = others.mend(held.path)
            if path != held.path:
                self._reroute(now_s, held, path)
        self.inject()
        self._report()

    def _reroute(self, now_s: float, held: HeldMicrobatch, path: Path) -> None:
        """Have a microbatch take another path, and send again what its new neighbours lack."""
        context = self._context
        before = held.path
        first = held.downstream
        last = held.upstream
        held.path = path
        held.path_version = context.view.version
        owing = self.share.rerouted(held.microbatch, before, path)
        onward = held.downstream != first and held.passed_on
        if onward and held.phase in (Phase.SENT, Phase.AWAITING):
            self._waits.sent(now_s, held)
        headed = held.phase in (Phase.AWAITING_GRADIENT, Phase.RETURNING, Phase.FOLDED)
        back = held.upstream != last and headed
        if (onward and held.forward is None) or (back and held.backward is None):
            self._fail_iteration(held, "what the lost node had been sent was not kept")
            return
        message = Reroute(
            context.iteration,
            held.microbatch,
            held.flow_id,
            path,
            held.path_version,
            owing,
        )
        self._out.send_all(_concerned(before, path), message)
        if onward:
            self._sent.forward_again(held)
        if back:
            self._sent.backward_again(held)

    def mended(self, sender: NodeId, message: Mended) -> None:
        """A relay that took a lost one's place has folded a microbatch in."""
        self.share.mended(message.microbatch, sender)
        self._report()

    def _report(self) -> None:
        self.share.report(self._waiting.queue, self.held)


def _concerned(before: Path, path: Path) -> list[NodeId]:
    """Return the relays that take another's place, and those next to them."""
    changed = [new != old for new, old in zip(path, before, strict=True)]
    return [
        relay for stage, relay in enumerate(path) if any(changed[max(0, stage - 1) : stage + 2])
    ]
