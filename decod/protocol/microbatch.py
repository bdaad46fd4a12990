"""Microbatches on their way: what a relay and a data node do with each.

A microbatch goes forward along a flow, stage by stage, back to its data node, which computes the
loss, and then the same way backward. `Held` is a node's record of one of them:

    relay:      COMPUTING -> SENT -> AWAITING -> RETURNING -> (folded)
    data node:  COMPUTING -> SENT -> AWAITING -> HEAD -> AWAITING_GRADIENT -> RETURNING -> (home)

SENT ends with the next node's COMPLETE; without it in time, the sender tells the leader that the
peer may be gone. AWAITING ends with the gradient (at the data node: the last activation). A DENY
goes back up the flow; each node on the way forgets the microbatch and the flow; the data node tries
another flow, or puts the microbatch off to the next iteration.

Everything belongs to one round. If a node vanishes the leader repeats the round, and `reset`
forgets all of it. (Re-sending along a repaired path is later work: its place is here.)
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from decod.ids import FlowId, MicrobatchId, NodeId, TensorId
from decod.protocol.context import Context
from decod.protocol.deadline import earliest
from decod.protocol.digest import digest_of
from decod.protocol.effects import Effect, Note, Send, SendTensor
from decod.protocol.events import Tensor
from decod.protocol.flow import DataFlows, RelayFlows
from decod.protocol.jobs import Backward, Drop, Embed, EmbedBackward, Forward, Head, Loss
from decod.protocol.messages import (
    BackwardGradient,
    Complete,
    Deny,
    ForwardActivation,
    Report,
    Suspect,
)

_DEFERRALS_MAX = 3
"""Iterations that a microbatch may be put off to before it is given up, and counted as lost."""

_FLOW_PATIENCE = 4
"""Answer timeouts that a data node waits for its first flow; all bounds on relays fell before."""

_LATE_FACTOR = 4.0
"""A COMPLETE is late after this many times the usual wait: slow is not dead."""


class Phase(Enum):
    COMPUTING = "computing"
    SENT = "sent"
    AWAITING = "awaiting"
    HEAD = "head"
    AWAITING_GRADIENT = "awaiting_gradient"
    RETURNING = "returning"


@dataclass(slots=True)
class Held:
    """A microbatch that this node has not finished in this round."""

    microbatch: MicrobatchId
    flow_id: FlowId
    upstream: NodeId
    downstream: NodeId
    phase: Phase = Phase.COMPUTING
    sent_s: float = 0.0
    complete_by_s: float | None = None


class _Waits:
    """How long COMPLETE usually takes, and who is late."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._usual_s: float | None = None
        self.deadline_s: float | None = None
        """Not after the first COMPLETE that is due; one that came leaves it as it was."""

    def sent(self, now_s: float, held: Held) -> None:
        held.phase, held.sent_s = Phase.SENT, now_s
        usual_s = self._usual_s or 0.0
        patience_s = max(self._context.config.complete_timeout_s, _LATE_FACTOR * usual_s)
        held.complete_by_s = now_s + patience_s
        self.deadline_s = earliest(self.deadline_s, held.complete_by_s)

    def completed(self, now_s: float, held: Held) -> None:
        waited_s = now_s - held.sent_s
        self._usual_s = (
            waited_s if self._usual_s is None else self._usual_s + 0.1 * (waited_s - self._usual_s)
        )
        held.phase, held.complete_by_s = Phase.AWAITING, None

    def overdue(self, now_s: float, held_all: dict[MicrobatchId, Held]) -> list[Effect]:
        """Tell the leader of peers whose COMPLETE is late, once for each wait."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return []
        self.deadline_s = None
        late: dict[NodeId, Held] = {}
        for held in held_all.values():
            if held.complete_by_s is not None and held.complete_by_s <= now_s:
                late[held.downstream] = held
                self.sent(now_s, held)
            self.deadline_s = earliest(self.deadline_s, held.complete_by_s)
        leader = self._context.view.leader
        reason = "no COMPLETE in time"
        return [Send(leader, Suspect(peer, reason)) for peer in late if peer != leader]


class RelayMicrobatches:
    """A relay's microbatches of one round after another."""

    def __init__(self, context: Context, flows: Callable[[], RelayFlows]) -> None:
        self._context = context
        self._flows = flows
        self.held: dict[MicrobatchId, Held] = {}
        self.folded: list[MicrobatchId] = []
        """What is in this node's gradient sum."""
        self._waits = _Waits(context)

    @property
    def settled(self) -> bool:
        """Whether all reported microbatches are folded: none was, while one was here."""
        return True

    @property
    def deadline_s(self) -> float | None:
        return self._waits.deadline_s

    def reset(self) -> None:
        """Forget the round. Tensors are inputs or sends of others' records: nothing is owned."""
        self.held.clear()
        self.folded.clear()

    def overdue(self, now_s: float) -> list[Effect]:
        return self._waits.overdue(now_s, self.held)

    def activation(
        self, sender: NodeId, message: ForwardActivation, tensor: Tensor
    ) -> list[Effect]:
        """Take an activation in, or DENY it."""
        context = self._context
        context.tensors.add(tensor)
        if message.microbatch in self.held or message.microbatch in self.folded:
            return context.tensors.release(tensor.id)
        entry = self._flows().entries.get(message.flow_id)
        if entry is None or self._flows().outflows.paired.get(message.flow_id) != sender:
            deny = Deny(context.round, message.microbatch, message.flow_id, "no such flow here")
            return [*context.tensors.release(tensor.id), Send(sender, deny)]
        held = Held(message.microbatch, message.flow_id, sender, entry.downstream)
        self.held[message.microbatch] = held
        return context.compute.submit(Forward(message.microbatch), [tensor.id])

    def gradient(self, sender: NodeId, message: BackwardGradient, tensor: Tensor) -> list[Effect]:
        context = self._context
        context.tensors.add(tensor)
        held = self.held.get(message.microbatch)
        if held is None or held.downstream != sender or held.phase is Phase.RETURNING:
            return context.tensors.release(tensor.id)
        held.phase, held.complete_by_s = Phase.RETURNING, None
        return context.compute.submit(Backward(message.microbatch), [tensor.id])

    def complete(self, now_s: float, sender: NodeId, message: Complete) -> list[Effect]:
        held = self.held.get(message.microbatch)
        if held is not None and held.downstream == sender and held.phase is Phase.SENT:
            self._waits.completed(now_s, held)
        return []

    def denied(self, now_s: float, sender: NodeId, message: Deny) -> list[Effect]:
        """Pass a DENY upstream and forget the microbatch and its flow."""
        held = self.held.get(message.microbatch)
        if held is None or held.downstream != sender or held.phase is Phase.RETURNING:
            return []
        del self.held[message.microbatch]
        effects: list[Effect] = [Send(held.upstream, message)]
        effects += self._context.compute.submit(Drop(message.microbatch))
        return effects + self._flows().drop(now_s, message.flow_id)

    def forwarded(
        self, now_s: float, microbatch: MicrobatchId, output: TensorId, duration_s: float
    ) -> list[Effect]:
        """The forward pass has been computed: send it on, and COMPLETE back."""
        context, held = self._context, self.held[microbatch]
        self._waits.sent(now_s, held)
        message = ForwardActivation(context.round, microbatch, held.flow_id)
        complete = Complete(context.round, microbatch, duration_s)
        return [
            SendTensor(held.downstream, message, output),
            Send(held.upstream, complete),
        ]

    def returned(self, microbatch: MicrobatchId, output: TensorId) -> list[Effect]:
        """The backward pass has been computed: it counts, and its gradient goes upstream."""
        held = self.held.pop(microbatch)
        self.folded.append(microbatch)
        message = BackwardGradient(self._context.round, microbatch, held.flow_id)
        return [SendTensor(held.upstream, message, output)]

    def failed(self, now_s: float, microbatch: MicrobatchId, reason: str) -> list[Effect]:
        """This node's device refused the microbatch (a value was not finite, say)."""
        held = self.held.pop(microbatch, None)
        if held is None:
            return []
        deny = Deny(self._context.round, microbatch, held.flow_id, reason)
        effects: list[Effect] = [Send(held.upstream, deny)]
        effects += self._context.compute.submit(Drop(microbatch))
        return effects + self._flows().drop(now_s, held.flow_id)


@dataclass(slots=True)
class _Deferral:
    """A microbatch that was put off."""

    times: int = 0
    not_before: int = 0
    """First iteration that may take it again."""


class DataMicrobatches:
    """A data node's share of the batch: injected as flows allow, counted when it comes home."""

    def __init__(
        self, context: Context, flows: Callable[[], DataFlows], *, num_microbatches: int
    ) -> None:
        self._context = context
        self._flows = flows
        self._num_microbatches = num_microbatches
        self.held: dict[MicrobatchId, Held] = {}
        self.folded: list[MicrobatchId] = []
        """Microbatches that came home in this round: this node's share of the committed set."""
        self._waiting: deque[MicrobatchId] = deque()
        self._last_outputs: dict[MicrobatchId, NodeId] = {}
        self._deferred: dict[MicrobatchId, _Deferral] = {}
        self._put_off: set[MicrobatchId] = set()
        """Put off in this round; becomes a deferral when the round is committed."""
        self._can_take: set[NodeId] = set()
        self._losses: dict[MicrobatchId, Loss] = {}
        self._reported = True
        self._failed = True
        """The leader has been asked to repeat the round, or there is none."""
        self._flow_by_s: float | None = None
        self._waits = _Waits(context)

    @property
    def settled(self) -> bool:
        """Whether all microbatches that were reported are folded."""
        return not self.held

    @property
    def deadline_s(self) -> float | None:
        return earliest(self._waits.deadline_s, self._flow_by_s)

    def overdue(self, now_s: float) -> list[Effect]:
        effects = self._waits.overdue(now_s, self.held)
        if self._flow_by_s is not None and self._flow_by_s <= now_s:
            self._flow_by_s = None
            effects += self._give_up()
        return effects

    def _give_up(self) -> list[Effect]:
        """Put the share off if no flow has been found for it: others must not wait for ever."""
        no_way = not self._flows().complete and not self._context.view.empty_stages
        if not no_way or self.held or not self._waiting:
            return []
        fields = (("microbatch", "all"), ("reason", "no flow of this data node could be built"))
        self._put_off.update(self._waiting)
        self._waiting.clear()
        return [Note("microbatch.deferred", fields), *self._report()]

    def reset(self) -> None:
        """Forget the round; what had been put off before it stays put off."""
        for record in (self.held, self.folded, self._waiting, self._last_outputs, self._losses):
            record.clear()
        self._put_off.clear()
        self._can_take.clear()
        self._reported = self._failed = True

    def committed(self) -> None:
        """The round is final: what was folded needs no second chance."""
        for microbatch in self.folded:
            self._deferred.pop(microbatch, None)
        for microbatch in self._put_off:
            self._defer(microbatch)

    def _defer(self, microbatch: MicrobatchId) -> None:
        deferral = self._deferred.setdefault(microbatch, _Deferral())
        deferral.times += 1
        deferral.not_before = self._context.round.iteration + 1

    def open(self, now_s: float) -> list[Effect]:
        """Begin the context's round with this node's share of its batch."""
        self.reset()
        effects: list[Effect] = []
        iteration, index = self._context.round.iteration, self._context.member.data_node_index
        for microbatch, deferral in sorted(self._deferred.items()):
            if deferral.not_before <= iteration and deferral.times > _DEFERRALS_MAX:
                del self._deferred[microbatch]
                effects.append(Note("microbatch.lost", (("microbatch", str(microbatch)),)))
            elif deferral.not_before <= iteration:
                self._waiting.append(microbatch)
        batch = (MicrobatchId(iteration, index, k) for k in range(self._num_microbatches))
        self._waiting.extend(m for m in batch if m not in self._deferred)
        self._reported = self._failed = False
        self._flow_by_s = now_s + _FLOW_PATIENCE * self._context.config.answer_timeout_s
        return effects

    def can_take(self, peer: NodeId) -> list[Effect]:
        self._can_take.add(peer)
        return self.inject()

    def inject(self) -> list[Effect]:
        """Start waiting microbatches on the cheapest free flows whose first hop is ready."""
        busy = {held.flow_id for held in self.held.values()}
        free = sorted(
            (granted.cost_s, flow_id)
            for flow_id, granted in self._flows().complete.items()
            if flow_id not in busy and granted.peer in self._can_take
        )
        effects: list[Effect] = []
        for _, flow_id in free:
            if not self._waiting:
                break
            microbatch = self._waiting.popleft()
            me, first = self._context.node_id, self._flows().complete[flow_id].peer
            self.held[microbatch] = Held(microbatch, flow_id, me, first)
            effects += self._context.compute.submit(Embed(microbatch))
        return effects

    def embedded(self, now_s: float, microbatch: MicrobatchId, output: TensorId) -> list[Effect]:
        held = self.held[microbatch]
        self._waits.sent(now_s, held)
        message = ForwardActivation(self._context.round, microbatch, held.flow_id)
        return [SendTensor(held.downstream, message, output)]

    def complete(self, now_s: float, sender: NodeId, message: Complete) -> list[Effect]:
        held = self.held.get(message.microbatch)
        if held is not None and held.downstream == sender and held.phase is Phase.SENT:
            self._waits.completed(now_s, held)
        return []

    def activation(
        self, sender: NodeId, message: ForwardActivation, tensor: Tensor
    ) -> list[Effect]:
        """The last relay's output has come home: compute the loss."""
        context = self._context
        context.tensors.add(tensor)
        held = self.held.get(message.microbatch)
        expected = self._flows().outflows.paired.get(message.flow_id)
        if held is None or held.flow_id != message.flow_id or expected != sender:
            deny = Deny(context.round, message.microbatch, message.flow_id, "no such flow here")
            return [*context.tensors.release(tensor.id), Send(sender, deny)]
        if held.phase not in (Phase.SENT, Phase.AWAITING):
            return context.tensors.release(tensor.id)
        held.phase, held.complete_by_s = Phase.HEAD, None
        self._last_outputs[message.microbatch] = sender
        return context.compute.submit(Head(message.microbatch), [tensor.id])

    def headed(
        self, microbatch: MicrobatchId, loss: Loss, output: TensorId, duration_s: float
    ) -> list[Effect]:
        """The loss is known; its gradient goes back the way the activation came."""
        held, last = self.held[microbatch], self._last_outputs[microbatch]
        held.phase = Phase.AWAITING_GRADIENT
        self._losses[microbatch] = loss
        message = BackwardGradient(self._context.round, microbatch, held.flow_id)
        return [
            SendTensor(last, message, output),
            Send(last, Complete(self._context.round, microbatch, duration_s)),
        ]

    def gradient(self, sender: NodeId, message: BackwardGradient, tensor: Tensor) -> list[Effect]:
        context = self._context
        context.tensors.add(tensor)
        held = self.held.get(message.microbatch)
        awaited = held is not None and held.phase is Phase.AWAITING_GRADIENT
        if held is None or held.downstream != sender or not awaited:
            return context.tensors.release(tensor.id)
        held.phase = Phase.RETURNING
        effects = context.compute.submit(EmbedBackward(message.microbatch), [tensor.id])
        return effects + self._report()

    def returned(self, microbatch: MicrobatchId) -> list[Effect]:
        """A microbatch has come all the way home."""
        del self.held[microbatch]
        self.folded.append(microbatch)
        return self.inject()

    def denied(
        self,
        now_s: float,  # noqa: ARG002 - as a relay is called.
        sender: NodeId,
        message: Deny,
    ) -> list[Effect]:
        """A flow is broken: try the microbatch on another, or put it off."""
        held = self.held.get(message.microbatch)
        if held is None or held.downstream != sender:
            return []
        if held.phase in (Phase.SENT, Phase.AWAITING):
            return self._put_back(held, message.reason)
        return self._fail_round(held, message.reason)

    def failed(
        self,
        now_s: float,  # noqa: ARG002 - as a relay is called.
        microbatch: MicrobatchId,
        reason: str,
    ) -> list[Effect]:
        """This node's device refused the microbatch."""
        held = self.held.get(microbatch)
        if held is None:
            return []
        if held.phase is Phase.COMPUTING:
            return self._put_off_now(held, reason)
        return self._fail_round(held, reason)

    def _fail_round(self, held: Held, reason: str) -> list[Effect]:
        """Others have parts of this microbatch in their sums: ask for the round to be repeated."""
        if self._failed:
            return []
        self._defer(held.microbatch)
        self._reported = self._failed = True
        report = Report(
            round=self._context.round,
            num_committed=0,
            digest=0,
            num_deferred=1,
            loss_sum=0.0,
            num_tokens=0,
            failure=f"microbatch {held.microbatch}: {reason}"[:200],
        )
        return [Send(self._context.view.leader, report)]

    def _put_back(self, held: Held, reason: str) -> list[Effect]:
        self._flows().drop(held.flow_id)
        if not self._flows().complete:
            return self._put_off_now(held, reason)
        del self.held[held.microbatch]
        self._waiting.appendleft(held.microbatch)
        effects = self._context.compute.submit(Drop(held.microbatch))
        return effects + self.inject()

    def _put_off_now(self, held: Held, reason: str) -> list[Effect]:
        del self.held[held.microbatch]
        self._put_off.add(held.microbatch)
        if not self._flows().complete:
            self._put_off.update(self._waiting)
            self._waiting.clear()
        fields = (("microbatch", str(held.microbatch)), ("reason", reason))
        effects: list[Effect] = [Note("microbatch.deferred", fields)]
        effects += self._context.compute.submit(Drop(held.microbatch))
        return effects + self.inject() + self._report()

    def _report(self) -> list[Effect]:
        """Tell the leader, once, when all relays have done their part of this node's share.

        What is left to do then concerns nobody else: the relays' reductions need not wait for it.
        """
        returning = [m for m, held in self.held.items() if held.phase is Phase.RETURNING]
        if self._reported or self._waiting or len(returning) < len(self.held):
            return []
        self._reported = True
        done = [*self.folded, *returning]
        losses = [self._losses[m] for m in done]
        report = Report(
            round=self._context.round,
            num_committed=len(done),
            digest=digest_of(done),
            num_deferred=len(self._put_off | self._deferred.keys() - set(done)),
            loss_sum=math.fsum(loss.loss for loss in losses),
            num_tokens=sum(loss.num_tokens for loss in losses),
        )
        return [Send(self._context.view.leader, report)]
