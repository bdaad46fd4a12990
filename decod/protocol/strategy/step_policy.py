"""When the members of a stage average, and what their sums stand for.

`decod.train.update_rule` is the other half: what the device does with a sum and with an average.
"""

from collections.abc import Sequence
from typing import Protocol

from decod.ids import Iteration, MicrobatchId
from decod.protocol.averaging.averager import Weight
from decod.protocol.core.digest import digest_of
from decod.protocol.core.messages import BeginAggregation


class StepPolicy(Protocol):
    """One member's policy. It sees every iteration of that member, in order."""

    def averages(self, iteration: Iteration) -> bool:
        """Whether an iteration ends with an average. If not, it ends with a `StepLocally` job."""
        ...

    def weigh(self, folded: Sequence[MicrobatchId]) -> Weight:
        """Return what this node's contribution to the average stands for.

        Args:
            folded: Microbatches of this iteration whose gradients this node has added up.
        """
        ...

    def total(self, begun: BeginAggregation) -> Weight | None:
        """Return what all contributions must add up to. None: whatever the members still have."""
        ...

    def closed(self, iteration: Iteration, folded: Sequence[MicrobatchId]) -> None:
        """The step of an iteration is final here."""
        ...


class EveryIteration:
    """Average the gradients of each iteration. Every microbatch of the batch must be in it (I2)."""

    def averages(self, iteration: Iteration) -> bool:  # noqa: ARG002
        """Whether an iteration ends with an average: each does."""
        return True

    def weigh(self, folded: Sequence[MicrobatchId]) -> Weight:
        """Return what this node's sum stands for: the iteration's microbatches."""
        return Weight(len(folded), digest_of(folded))

    def total(self, begun: BeginAggregation) -> Weight | None:
        """Return the whole batch."""
        return Weight(begun.num_committed, begun.digest)

    def closed(self, iteration: Iteration, folded: Sequence[MicrobatchId]) -> None:
        """The step is final: nothing is left of the iteration."""
