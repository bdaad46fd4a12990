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
        folded: Callable[[], None],
        *,
        num_microbatches: int,
    ) -> None:
        self._context = context
        self._out = context.out
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

    def reset(self) -> None:
        """Forget the iteration; what had been put off before it stays put off."""
        self.held.clear()
        self._queue.clear()
        self.share.reset()
        self._kept.clear()

    def open(self, placement: Placement) -> None:
        """Begin the context's iteration with this node's shares of its batch."""
        self._placement = placement
        context = self._context
        iteration = self._context.iteration.number
        shares = shares_of(
            context.view, context.node_id, num_shares=context.run.batch.num_data_nodes
        )
        deferrals = self.share.deferrals
        due = deferrals.due(shares, num_again=0) if shares else []
        indexes = range(self._num_microbatches)
        batch = (MicrobatchId(iteration, share, k) for share in shares for k in indexes)
        self._queue = deque([*due, *(m for m in batch if m not in deferrals)])
        self.share.open()
        self.inject()
        self._report()

    def committed(self, *, marked: bool) -> None:
        """The context's iteration is final. `marked`: states of it are kept."""
        self.share.committed(marked=marked)

    def go_back(self, iteration: int) -> None:
        """The run goes on from an earlier state."""
        self.share.deferrals.go_back(iteration)

    def inject(self) -> None:
        """Start as many microbatches as there is room for."""
        for _ in range(min(len(self._queue), self._room - len(self.held))):
            microbatch = self._queue.popleft()
            flow_id = FlowId(self._context.node_id, 0)
            self.held[microbatch] = HeldMicrobatch(microbatch, flow_id, (), 0, 0)
            self._context.compute.submit(Embed(microbatch), self)

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

    def _report(self) -> None:
        self.share.report(self._queue, self.held)

    # --- a microbatch's way -------------------------------------------------------------------

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        """A pass has been computed."""
        self._context.links.computed(job, event.duration_s)
        match job, event.result:
            case Embed(microbatch), _:
                self._embedded(microbatch, event.outputs[0].id)
            case Head(microbatch), Loss() as loss:
                self._headed(microbatch, loss, event.outputs[0].id)
            case EmbedBackward(microbatch), _:
                self._returned(microbatch)
            case _:
                raise AssertionError(f"{job} is no pass of a data node's")

    def _embedded(self, microbatch: MicrobatchId, output: TensorId) -> None:
        self.held[microbatch].phase = Phase.SENT
        self._kept.keep(Kind.OUTPUT, microbatch, output)
        self._courier.activation(self._first(microbatch), microbatch, Leg.ONWARD, output)

    def activation(self, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """The last stage's output has come home: compute the loss."""
        held = self.held.get(microbatch)
        if held is None or held.phase is not Phase.SENT:
            self._context.tensors.release(tensor)
            self._gradient_again(microbatch)
        else:
            held.phase = Phase.HEAD
            self._context.compute.submit(Head(microbatch), self, [tensor])

    def _headed(self, microbatch: MicrobatchId, loss: Loss, output: TensorId) -> None:
        self.held[microbatch].phase = Phase.AWAITING_GRADIENT
        self.share.losses[microbatch] = loss
        self._kept.keep(Kind.RETURN, microbatch, output)
        self._courier.gradient(self._behind(microbatch), microbatch, Leg.ONWARD, output)

    def gradient(self, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """The gradient of the embedding's output has come."""
        held = self.held.get(microbatch)
        if held is None or held.phase is not Phase.AWAITING_GRADIENT:
            self._context.tensors.release(tensor)
        else:
            held.phase = Phase.RETURNING
            self._context.compute.submit(EmbedBackward(microbatch), self, [tensor])
            self._report()

    def _returned(self, microbatch: MicrobatchId) -> None:
        held = self.held.pop(microbatch)
        held.phase = Phase.FOLDED
        self.share.done[microbatch] = held
        self.inject()
        self._has_folded()

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """This node's device refused the microbatch."""
        assert isinstance(job, (Embed, Head, EmbedBackward))
        held = self.held.get(job.microbatch)
        if held is None:
            return
        if held.phase is not Phase.COMPUTING:
            self.unable(job.microbatch, reason)
            return
        del self.held[job.microbatch]
        self.share.put_off.add(job.microbatch)
        self._out.note("microbatch.deferred", microbatch=str(job.microbatch), reason=reason)
        self._context.compute.submit(Drop(job.microbatch))
        self.inject()
        self._report()

    def unable(self, microbatch: MicrobatchId, reason: str) -> None:
        """The iteration can't be ended with a microbatch: ask for it to be repeated."""
        if not self.share.failed:
            self.share.ask_again(f"microbatch {microbatch}: {reason}")

    # --- after a loss -------------------------------------------------------------------------

    def mend(self, before: View) -> None:
        """Some members are not in the context's view any more, as they were in the one before."""
        if self.share.failed:
            return
        for microbatch in (*self.held, *self.share.done):
            if self._first(microbatch) != self._first(microbatch, before):
                self._output_again(microbatch)
            if self._behind(microbatch) != self._behind(microbatch, before):
                self._gradient_again(microbatch)
        self.share.open()
        self.inject()
        self._report()

    def fetched(self, microbatch: MicrobatchId) -> None:
        """The first stage lacks an activation."""
        if microbatch in self.held or microbatch in self.share.done:
            self._output_again(microbatch)

    def _output_again(self, microbatch: MicrobatchId) -> None:
        held = self.held.get(microbatch)
        if held is not None and held.phase is Phase.COMPUTING:
            return
        output = self._kept.get(Kind.OUTPUT, microbatch)
        if output is None:
            self.unable(microbatch, "an activation that is needed again was not kept")
        else:
            output = self._context.tensors.retain(output)
            self._courier.activation(self._first(microbatch), microbatch, Leg.ONWARD, output)

    def _gradient_again(self, microbatch: MicrobatchId) -> None:
        held = self.held.get(microbatch)
        if held is not None and held.phase in (Phase.COMPUTING, Phase.SENT, Phase.HEAD):
            return
        gradient = self._kept.get(Kind.RETURN, microbatch)
        if gradient is not None:
            gradient = self._context.tensors.retain(gradient)
            self._courier.gradient(self._behind(microbatch), microbatch, Leg.ONWARD, gradient)
        elif held is not None or microbatch in self.share.done:
            self.unable(microbatch, "a gradient that is needed again was not kept")

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
