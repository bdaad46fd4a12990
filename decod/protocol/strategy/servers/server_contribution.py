"""A client's part in its stage's step: it contributes its sum, and no more.

It has no optimizer, and no vote. The servers average what all workers contribute, and step; the
client then fetches the parameters.
"""

from collections.abc import Sequence

from decod.ids import MicrobatchId, NodeId
from decod.protocol.averaging.averager import Averager, AveragingState, Weight, port_of
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send, Stop, StopReason
from decod.protocol.core.events import Received
from decod.protocol.core.messages import BeginAggregation, Leave
from decod.protocol.core.view import tree_place
from decod.protocol.strategy.commits import Account, account_of
from decod.protocol.strategy.step import averaging_of
from decod.protocol.strategy.step_policy import weight_of


class Contribution:
    """One client's contribution to one average.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.begun: BeginAggregation | None = None
        averaging = averaging_of(context)
        self._num_members = len(averaging.roster)
        self.averager = Averager(context.node_id, averaging, port_of(context), self)
        self._own: Weight | None = None
        """What is in this node's sum, once it is whole."""

    @property
    def made(self) -> bool:
        """Whether this node's sum is whole, and goes to the servers."""
        return self.averager.state is not AveragingState.WAITING

    @property
    def awaited(self) -> set[NodeId]:
        """Nobody: the servers have what they need, and the leader will say so."""
        return set()

    @property
    def account(self) -> Account:
        """What this node has contributed, as fields of a note: by them a run can be audited."""
        if self.begun is None or self._own is None:
            return ()
        return account_of(self._context, self.begun, self._own, num_members=self._num_members)

    def received(self, received: Received) -> list[Effect]:
        """Take in which microbatches count, once; pass the word on down the tree."""
        message, context, tensor = received.message, self._context, received.tensor
        if tensor is not None:
            context.tensors.add(tensor)
            return context.tensors.release(tensor.id)
        if not isinstance(message, BeginAggregation) or self.begun is not None:
            return []
        self.begun = message
        place = tree_place(context.view, context.node_id, fanout=context.run.protocol.tree_fanout)
        return [Send(child, message) for child in place.children]

    def contribute(self, folded: Sequence[MicrobatchId]) -> list[Effect]:
        """Send this node's sum to the servers, once: it is whole.

        Args:
            folded: What is in it.
        """
        begun = self.begun
        if begun is None or self.averager.state is not AveragingState.WAITING:
            return []
        total = Weight(begun.num_committed, begun.digest)
        self._own = weight_of(folded)
        return self.averager.begin(self._own, total)

    def abandon(self) -> list[Effect]:
        """Release all that is held for the average."""
        return self.averager.abandon()

    # --- the average ------------------------------------------------------------------------------

    def part_squared(self, part: int, square_sum: float) -> list[Effect]:  # noqa: ARG002
        """A client reads no average."""
        return []

    def averaged(self) -> list[Effect]:
        """A client reads no average."""
        return []

    def stand_out(self, nodes: tuple[NodeId, ...]) -> list[Effect]:  # noqa: ARG002
        """A client compares nothing."""
        return []

    def lacking(self, found: Weight) -> list[Effect]:  # noqa: ARG002
        """A client adds nothing up."""
        return []

    def averaging_failed(self, reason: str) -> list[Effect]:
        """The device has refused its own sum: others do this node's work again."""
        leave = Leave(reason[:200], at_once=True)
        stop = Stop(StopReason.REMOVED, f"its device has lost its gradients: {reason}")
        return [Send(self._context.view.leader, leave), stop]
