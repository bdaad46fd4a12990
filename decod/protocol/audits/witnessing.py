"""One member's part in audits: it passes them on, tells auditors what it knows, and audits others.

After the vote on a step, and before its commit, the leader may have the work of some relays done
again. By then each relay has sent all that it sends in the iteration, so it can't behave better
because it is watched. Members that have dealt with such a relay tell its auditor two things: what
they gave it, which they have kept in case a relay is lost, and a sketch of what it gave them.

Nothing is audited where members step by themselves: no two of them have the same parameters then.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from decod.ids import NodeId, TensorId
from decod.protocol.audits.auditor import Auditor
from decod.protocol.averaging.averager import Contributed
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send, SendTensor
from decod.protocol.core.events import JobFinished, Received
from decod.protocol.core.jobs import Job, Sketched, SketchPart, SketchPass
from decod.protocol.core.messages import Audit, AuditedPart, AuditedTensor
from decod.protocol.core.view import tree_place
from decod.protocol.strategy.microbatch import HeldMicrobatch

_EARLY_MAX = 64
"""Messages about an audit of which this node has not heard yet that are kept."""


class Audits:
    """A member's part in the audits of one average.

    Args:
        context: The node's.
        dealt_with: Returns the microbatches that a relay has got from this node or given to it.
        contributed: Returns what a relay has contributed to the parts that this node has reduced.
    """

    def __init__(
        self,
        context: Context,
        dealt_with: Callable[[NodeId], Iterable[HeldMicrobatch]],
        contributed: Callable[[NodeId], Iterable[Contributed]],
    ) -> None:
        self._context, self._dealt_with = context, dealt_with
        self._contributed = contributed
        self._seen: set[tuple[NodeId, NodeId]] = set()
        self._auditors: dict[NodeId, Auditor] = {}
        """This node's audits, by relay."""
        self._early: list[Received] = []
        self.kept: list[TensorId] = []
        """Tensors that auditors are to get once their sketches are there."""
        self.over = False
        """Nobody waits for anything any more."""

    def abandon(self) -> list[Effect]:
        """Release all that is held."""
        self.over = True
        effects = self._context.tensors.release(*self.kept)
        self.kept.clear()
        for early in self._early:
            if early.tensor is not None:
                effects += self._context.tensors.release(early.tensor.id)
        self._early.clear()
        return effects + [e for auditor in self._auditors.values() for e in auditor.abandon()]

    def received(self, received: Received) -> list[Effect]:
        """Take in a message about an audit."""
        message, tensor = received.message, received.tensor
        if isinstance(message, Audit):
            return self._begin(message)
        assert isinstance(message, (AuditedTensor, AuditedPart)), message
        if tensor is not None:
            self._context.tensors.add(tensor)
        auditor = self._auditors.get(message.relay)
        if auditor is not None:
            return auditor.received(received)
        if len(self._early) < _EARLY_MAX:
            self._early.append(received)
            return []
        return [] if tensor is None else self._context.tensors.release(tensor.id)

    def _begin(self, message: Audit) -> list[Effect]:
        """Pass the word on, and do what it asks of this node, once."""
        context, view = self._context, self._context.view
        new = [pair for pair in message.pairs if pair not in self._seen]
        if not new:
            return []
        self._seen.update(new)
        place = tree_place(view, context.node_id, fanout=context.config.tree_fanout)
        effects: list[Effect] = [Send(child, message) for child in place.children]
        for relay, auditor in new:
            both = view.by_id.get(relay), view.by_id.get(auditor)
            if None in both or relay in (auditor, context.node_id):
                continue
            if auditor == context.node_id:
                effects += self._audit(relay)
            effects += self._tell(relay, auditor)
        return effects

    def _audit(self, relay: NodeId) -> list[Effect]:
        self._auditors[relay] = auditor = Auditor(self._context, relay)
        early, self._early = self._early, []
        effects = list[Effect]()
        for each in early:
            assert isinstance(each.message, (AuditedTensor, AuditedPart))
            if each.message.relay == relay:
                effects += auditor.received(each)
            else:
                self._early.append(each)
        return effects

    def _tell(self, relay: NodeId, auditor: NodeId) -> list[Effect]:
        """Tell an auditor what this node knows of a relay's work."""
        context, effects = self._context, list[Effect]()
        compute, averaging = context.compute, context.averaging
        both_ways = [(held, back) for held in self._dealt_with(relay) for back in (False, True)]
        for held, is_gradient in both_ways:
            if relay != (held.upstream if is_gradient else held.downstream):
                continue
            tensor = held.backward if is_gradient else held.forward
            told = AuditedTensor(averaging, relay, held.microbatch, is_gradient, b"")
            if tensor is None:
                effects.append(Send(auditor, told))
                continue
            self.kept.append(context.tensors.retain(tensor))
            job = SketchPass(held.microbatch, not is_gradient)
            effects += compute.submit(job, _Telling(self, auditor, told, tensor))
        for part, weight, position in self._contributed(relay):
            of_part = AuditedPart(averaging, relay, part, weight.num, weight.digest, b"")
            if position is None:
                effects.append(Send(auditor, of_part))
                continue
            owner = _Telling(self, auditor, of_part)
            effects += compute.submit(SketchPart(part, position), owner)
        return effects


@dataclass(slots=True)
class _Telling:
    """What an auditor is to be told, as soon as the device has made a sketch for it."""

    audits: Audits
    auditor: NodeId
    told: AuditedTensor | AuditedPart
    tensor: TensorId | None = None

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        if self.audits.over:
            return []
        assert isinstance(event.result, Sketched), event
        message = replace(self.told, sketch=event.result.sketch)
        if self.tensor is None:
            return [Send(self.auditor, message)]
        self.audits.kept.remove(self.tensor)
        return [SendTensor(self.auditor, message, self.tensor)]

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        # The auditor is told that there is nothing.
        return [] if self.audits.over else [Send(self.auditor, self.told)]
