"""What a data node does with its share of the batch, where stages are organised as servers.

    COMPUTING -> SENT -> HEAD -> AWAITING_GRADIENT -> RETURNING -> FOLDED: home

It sends activations to the frontal servers of the first stage, and gets them back from the backward
servers of the last. At most so many are under way as the smallest stage has room for. Whatever a
stage's workers do, a microbatch stays with the stage's servers: so a data node hears of nothing
else than what comes home.
"""

from collections import deque
from collections.abc import Callable, Sequence

from decod.ids import FlowId, MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Note
from decod.protocol.core.events import JobFinished
from decod.protocol.core.jobs import Drop, Embed, EmbedBackward, Head, Job, Loss
from decod.protocol.core.messages.server_messages import Leg
from decod.protocol.core.view import View
from decod.protocol.strategy.data_share import ShareReport, shares_of
from decod.protocol.strategy.microbatch import HeldMicrobatch, Phase
from decod.protocol.strategy.servers.placement import Courier, KeptTensors, Kind, Placement

_AHEAD_RATIO = 2
"""Microbatches under way, beside those for which the smallest stage has room: some are between
hosts."""


class HomeMicrobatches:
    """A data node's share of the batch, in one iteration after another.

    Args:
        context: The node's.
        courier: Carries tensors.
        kept: What this node has sent.
        folded: Called when a microbatch has come all the way home.
        num_microbatches: Of each share, per iteration.
    """

    def __init__(
        self,
        context: Context,
        courier: Courier,
        kept: KeptTensors,
        folded: Callable[[], list[Effect]],
        *,
        num_microbatches: int,
    ) -> None:
        self._context = context
        self._courier = courier
        self._kept = kept
        self._has_folded = folded
        self._num_microbatches = num_microbatches
        self._placement: Placement | None = None
        self._queue: deque[MicrobatchId] = deque()
        self.held: dict[MicrobatchId, HeldMicrobatch] = {}
        """Under way."""
        self.share = ShareReport(context)

    @property
    def folded(self) -> Sequence[MicrobatchId]:
        """Microbatches that came home in this iteration: this node's share of the committed set."""
        return [*self.share.done]

    @property
    def all_done(self) -> bool:
        """Whether all microbatches that were reported are folded."""
        return not self.held

    @property
    def awaited(self) -> set[NodeId]:
        """Servers from which something is to come."""
        found = set[NodeId | None]()
        for microbatch, held in self.held.items():
            if held.phase is Phase.SENT:
                found.add(self._behind(microbatch))
            elif held.phase is Phase.AWAITING_GRADIENT:
                found.add(self._first(microbatch))
        return {node for node in found if node is not None}

    # --- iterations -------------------------------------------------------------------------------

    def reset(self) -> list[Effect]:
        """Forget the iteration; what had been put off before it stays put off."""
        self.held.clear()
        self._queue.clear()
        self.share.reset()
        return self._kept.clear()

    def open(self, placement: Placement) -> list[Effect]:
        """Begin the context's iteration with this node's shares of its batch."""
        self._placement = placement
        context = self._context
        iteration = self._context.iteration.number
        shares = shares_of(
            context.view, context.node_id, num_shares=context.run.batch.num_data_nodes
        )
        deferrals = self.share.deferrals
        due, notes = deferrals.due(shares, num_again=0) if shares else ([], [])
        indexes = range(self._num_microbatches)
        batch = (MicrobatchId(iteration, share, k) for share in shares for k in indexes)
        self._queue = deque([*due, *(m for m in batch if m not in deferrals)])
        self.share.open()
        return notes + self.inject() + self._report()

    def committed(self, *, marked: bool) -> None:
        """The context's iteration is final. `marked`: states of it are kept."""
        self.share.committed(marked=marked)

    def go_back(self, iteration: int) -> None:
        """The run goes on from an earlier state."""
        self.share.deferrals.go_back(iteration)

    def inject(self) -> list[Effect]:
        """Start as many microbatches as there is room for."""
        effects: list[Effect] = []
        for _ in range(min(len(self._queue), self._room - len(self.held))):
            microbatch = self._queue.popleft()
            flow_id = FlowId(self._context.node_id, 0)
            self.held[microbatch] = HeldMicrobatch(microbatch, flow_id, (), 0, 0)
            effects += self._context.compute.submit(Embed(microbatch), self)
        return effects

    @property
    def _room(self) -> int:
        """How many microbatches this data node may have under way."""
        view = self._context.view
        stages = [
            sum(m.capacity for m in (*view.workers[stage], *view.clients[stage]))
            for stage in range(1, view.num_stages)
        ]
        room = max(1, _AHEAD_RATIO * min(stages) // len(view.data_nodes))
        return min(room, self._context.member.capacity)

    def _report(self) -> list[Effect]:
        return self.share.report(self._queue, self.held)

    # --- a microbatch's way -------------------------------------------------------------------

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """A pass has been computed."""
        self._context.links.computed(job, event.duration_s)
        match job, event.result:
            case Embed(microbatch), _:
                return self._embedded(microbatch, event.outputs[0].id)
            case Head(microbatch), Loss() as loss:
                return self._headed(microbatch, loss, event.outputs[0].id)
            case EmbedBackward(microbatch), _:
                return self._returned(microbatch)
        raise AssertionError(f"{job} is no pass of a data node's")

    def _embedded(self, microbatch: MicrobatchId, output: TensorId) -> list[Effect]:
        self.held[microbatch].phase = Phase.SENT
        self._kept.keep(Kind.OUTPUT, microbatch, output)
        return self._courier.activation(self._first(microbatch), microbatch, Leg.ONWARD, output)

    def activation(self, microbatch: MicrobatchId, tensor: TensorId) -> list[Effect]:
        """The last stage's output has come home: compute the loss."""
        held = self.held.get(microbatch)
        if held is None or held.phase is not Phase.SENT:
            again = self._gradient_again(microbatch)
            return self._context.tensors.release(tensor) + again
        held.phase = Phase.HEAD
        return self._context.compute.submit(Head(microbatch), self, [tensor])

    def _headed(self, microbatch: MicrobatchId, loss: Loss, output: TensorId) -> list[Effect]:
        self.held[microbatch].phase = Phase.AWAITING_GRADIENT
        self.share.losses[microbatch] = loss
        self._kept.keep(Kind.RETURN, microbatch, output)
        return self._courier.gradient(self._behind(microbatch), microbatch, Leg.ONWARD, output)

    def gradient(self, microbatch: MicrobatchId, tensor: TensorId) -> list[Effect]:
        """The gradient of the embedding's output has come."""
        held = self.held.get(microbatch)
        if held is None or held.phase is not Phase.AWAITING_GRADIENT:
            return self._context.tensors.release(tensor)
        held.phase = Phase.RETURNING
        effects = self._context.compute.submit(EmbedBackward(microbatch), self, [tensor])
        return effects + self._report()

    def _returned(self, microbatch: MicrobatchId) -> list[Effect]:
        held = self.held.pop(microbatch)
        held.phase = Phase.FOLDED
        self.share.done[microbatch] = held
        return self.inject() + self._has_folded()

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """This node's device refused the microbatch."""
        assert isinstance(job, (Embed, Head, EmbedBackward))
        held = self.held.get(job.microbatch)
        if held is None:
            return []
        if held.phase is not Phase.COMPUTING:
            return self.unable(job.microbatch, reason)
        del self.held[job.microbatch]
        self.share.put_off.add(job.microbatch)
        fields = (("microbatch", str(job.microbatch)), ("reason", reason))
        effects = self._context.compute.submit(Drop(job.microbatch))
        return [Note("microbatch.deferred", fields), *effects, *self.inject(), *self._report()]

    def unable(self, microbatch: MicrobatchId, reason: str) -> list[Effect]:
        """The iteration can't be ended with a microbatch: ask for it to be repeated."""
        if self.share.failed:
            return []
        return self.share.ask_again(f"microbatch {microbatch}: {reason}")

    # --- after a loss -------------------------------------------------------------------------

    def mend(self, before: View) -> list[Effect]:
        """Some members are not in the context's view any more, as they were in the one before."""
        if self.share.failed:
            return []
        effects: list[Effect] = []
        for microbatch in (*self.held, *self.share.done):
            if self._first(microbatch) != self._first(microbatch, before):
                effects += self._output_again(microbatch)
            if self._behind(microbatch) != self._behind(microbatch, before):
                effects += self._gradient_again(microbatch)
        self.share.open()
        return effects + self.inject() + self._report()

    def fetched(self, microbatch: MicrobatchId) -> list[Effect]:
        """The first stage lacks an activation."""
        known = microbatch in self.held or microbatch in self.share.done
        return self._output_again(microbatch) if known else []

    def _output_again(self, microbatch: MicrobatchId) -> list[Effect]:
        held = self.held.get(microbatch)
        if held is not None and held.phase is Phase.COMPUTING:
            return []
        output = self._kept.get(Kind.OUTPUT, microbatch)
        if output is None:
            return self.unable(microbatch, "an activation that is needed again was not kept")
        output = self._context.tensors.retain(output)
        return self._courier.activation(self._first(microbatch), microbatch, Leg.ONWARD, output)

    def _gradient_again(self, microbatch: MicrobatchId) -> list[Effect]:
        held = self.held.get(microbatch)
        if held is not None and held.phase in (Phase.COMPUTING, Phase.SENT, Phase.HEAD):
            return []
        gradient = self._kept.get(Kind.RETURN, microbatch)
        if gradient is None:
            if held is None and microbatch not in self.share.done:
                return []
            return self.unable(microbatch, "a gradient that is needed again was not kept")
        gradient = self._context.tensors.retain(gradient)
        return self._courier.gradient(self._behind(microbatch), microbatch, Leg.ONWARD, gradient)

    # --- whose microbatch it is ---------------------------------------------------------------

    def _first(self, microbatch: MicrobatchId, view: View | None = None) -> NodeId | None:
        """Return the frontal server of the first stage."""
        assert self._placement is not None
        return self._placement.frontal(view or self._context.view, 1, microbatch)

    def _behind(self, microbatch: MicrobatchId, view: View | None = None) -> NodeId | None:
        """Return the backward server of the last stage."""
        assert self._placement is not None
        view = view or self._context.view
        return self._placement.backward(view, view.num_stages - 1, microbatch)
