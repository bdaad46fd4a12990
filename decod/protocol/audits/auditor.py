"""A member does the work of another member of its stage again, and compares.

Both hold the same parameters. So from the same activations and gradients, the auditor gets the same
results, but for what their devices do differently. It gets the inputs from those who gave them to
the audited relay, and sketches of the relay's results from those who got them.

    GATHERING (replays what is there) -> COMPARING -> OVER

A relay is audited for a whole iteration, since a sum of gradients can only be checked as a whole.
"""

from dataclasses import dataclass

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.digest import add_digests, digest_of
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.events import JobFinished, Received
from decod.protocol.core.jobs import Compared, ComparePart, Job, Replayed, ReplayPasses
from decod.protocol.core.messages import AuditedPart, AuditedTensor, AuditResult

_DOUBTS_MAX = 64


@dataclass(frozen=True, slots=True)
class _Given:
    """What one neighbour of the relay has told."""

    witness: NodeId
    tensor: TensorId
    sketch: bytes


class Auditor:
    """The audit of one relay's work of one iteration.

    Args:
        context: The node's.
        relay: A member of the node's stage.
    """

    def __init__(self, context: Context, relay: NodeId) -> None:
        self._context, self._relay = context, relay
        stage = context.member.stage_index
        self._roster = [member.node_id for member in context.view.roster(stage)]
        self._number = self._roster.index(relay)
        self._given: dict[tuple[MicrobatchId, bool], _Given] = {}
        self._seen: set[tuple[MicrobatchId, bool]] = set()
        self._parts: dict[NodeId, AuditedPart] = {}
        """What the relay has contributed, by the member that has reduced the part."""
        self._witnesses: dict[MicrobatchId, tuple[NodeId, NodeId]] = {}
        """Of what is being replayed: who got the relay's activation, and who its gradient."""
        self._errors: dict[NodeId, float] = {}
        """The largest of what each witness got."""
        self._num, self._digest = 0, 0
        """Of the microbatches that were replayed."""
        self._num_to_compare: int | None = None
        """Parts that are not compared yet. None: something is to be replayed first."""
        self._over = False

    def abandon(self) -> list[Effect]:
        """Release what is held."""
        self._over = True
        tensors = [given.tensor for given in self._given.values()]
        self._given.clear()
        return self._context.tensors.release(*tensors)

    # --- what others tell ---------------------------------------------------------------------

    def received(self, received: Received) -> list[Effect]:
        """Take in what a member knows of the relay's work. Its tensor is held already."""
        message, sender = received.message, received.sender
        if isinstance(message, AuditedPart):
            return self._part(sender, message)
        assert isinstance(message, AuditedTensor), message
        key, tensor = (message.microbatch, message.is_gradient), received.tensor
        if self._over or key in self._seen or not self._is_neighbour(sender, message):
            return [] if tensor is None else self._context.tensors.release(tensor.id)
        self._seen.add(key)
        if tensor is None:
            return self._end(f"{_name(sender)} has not kept microbatch {message.microbatch}")
        self._given[key] = _Given(sender, tensor.id, message.sketch)
        return self._replay(message.microbatch)

    def _is_neighbour(self, sender: NodeId, message: AuditedTensor) -> bool:
        """Whether a member is of the stage that has dealt with the relay in this way."""
        view, stage = self._context.view, self._context.member.stage_index
        there = stage + 1 if message.is_gradient else stage - 1
        return view.by_id[sender].stage_index == there % view.num_stages

    def _part(self, sender: NodeId, message: AuditedPart) -> list[Effect]:
        owner = message.part < len(self._roster) and self._roster[message.part] == sender
        if self._over or not owner or sender in self._parts:
            return []
        self._parts[sender] = message
        return self._compare()

    # --- what the device finds ----------------------------------------------------------------

    def _replay(self, microbatch: MicrobatchId) -> list[Effect]:
        """Repeat both passes of a microbatch, if both of its inputs are here."""
        before, behind = (self._given.get((microbatch, back)) for back in (False, True))
        if before is None or behind is None:
            return []
        del self._given[microbatch, False], self._given[microbatch, True]
        self._witnesses[microbatch] = behind.witness, before.witness
        # Who sends a gradient has got the relay's activation, and the other way round.
        job = ReplayPasses(self._number, microbatch, behind.sketch, before.sketch)
        return self._context.compute.submit(job, self, [before.tensor, behind.tensor])

    def _compare(self) -> list[Effect]:
        """Compare the relay's contribution, when all that should be in it was replayed."""
        others = {*self._roster} - {self._relay}
        if self._over or self._num_to_compare is not None or self._parts.keys() != others:
            return []
        claimed = {(part.num_microbatches, part.digest) for part in self._parts.values()}
        if len(claimed) > 1:
            return self._end("members differ in what the relay has contributed")
        if claimed != {(self._num, self._digest)}:
            return []  # More is to come. If it does not, the leader ends the audit.
        if not self._num:
            return self._end()
        self._num_to_compare, effects = len(self._parts), list[Effect]()
        for part in self._parts.values():
            job = ComparePart(self._number, part.part, len(self._roster), part.sketch)
            effects += self._context.compute.submit(job, self)
        return effects

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """Passes were replayed, or a part of the contribution was compared."""
        if self._over:
            return []
        match job, event.result:
            case ReplayPasses(microbatch=microbatch), Replayed(activation_error, gradient_error):
                behind, before = self._witnesses.pop(microbatch)
                self._differs(behind, activation_error)
                self._differs(before, gradient_error)
                self._num += 1
                self._digest = add_digests((self._digest, digest_of([microbatch])))
                return self._compare()
            case ComparePart(part=part), Compared(error):
                self._differs(self._roster[part], error)
                assert self._num_to_compare is not None
                self._num_to_compare -= 1
                return self._end() if not self._num_to_compare else []
        raise AssertionError(f"{job} ended with {event.result}")

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """The device can't work with what others have told."""
        return self._end(reason)

    def _differs(self, witness: NodeId, error: float) -> None:
        self._errors[witness] = max(error, self._errors.get(witness, 0.0))

    def _end(self, failure: str = "") -> list[Effect]:
        """Tell the leader what was found, once."""
        if self._over:
            return []
        context = self._context
        tolerance = context.audits.tolerance
        found = [(node, error) for node, error in self._errors.items() if error > tolerance]
        doubts = tuple(sorted(found, key=lambda each: -each[1])[:_DOUBTS_MAX])
        result = AuditResult(context.averaging, self._relay, self._num, failure[:200], doubts)
        return [*self.abandon(), Send(context.view.leader, result)]


def _name(node: NodeId) -> str:
    return node[:8]
