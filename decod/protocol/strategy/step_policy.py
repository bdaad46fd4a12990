"""What the sums of a stage's members stand for when they average.

The leader says which iterations end with an average. `decod.train.update_rule` says what the device
does with a sum and with an average.
"""

from collections.abc import Sequence
from typing import Protocol

from decod.ids import MicrobatchId
from decod.protocol.averaging.averager import Weight
from decod.protocol.core.digest import add_digests, digest_of
from decod.protocol.core.messages import BeginAggregation


class StepPolicy(Protocol):
    """One member's policy. It sees every iteration of that member, in order."""

    def weigh(self, folded: Sequence[MicrobatchId]) -> Weight:
        """Return what this node's contribution to the average stands for.

        Args:
            folded: Microbatches of this iteration whose gradients this node has added up.
        """
        ...

    def total(self, begun: BeginAggregation) -> Weight | None:
        """Return what all contributions must add up to. None: whatever the members still have."""
        ...

    def closed(self, folded: Sequence[MicrobatchId], *, averaged: bool) -> None:
        """The step of an iteration is final here. `averaged`: it came from an average."""
        ...

    def returned(self) -> None:
        """This node has given up its own steps: it holds what its stage has in common."""
        ...


class EveryIteration:
    """Average the gradients of each iteration. Every microbatch of the batch must be in it (I2)."""

    def weigh(self, folded: Sequence[MicrobatchId]) -> Weight:
        """Return what this node's sum stands for: the iteration's microbatches."""
        return weight_of(folded)

    def total(self, begun: BeginAggregation) -> Weight | None:
        """Return the whole batch."""
        return Weight(begun.num_committed, begun.digest)

    def closed(self, folded: Sequence[MicrobatchId], *, averaged: bool) -> None:
        """The step is final: nothing is left of the iteration."""

    def returned(self) -> None:
        """There are no steps of its own."""


class LocalSteps:
    """Average what each member has learnt in several iterations.

    A member that was lost has taken along what it learnt. So nobody knows beforehand what the
    contributions add up to.
    """

    def __init__(self) -> None:
        self._kept = Weight(0, 0)
        """Of the iterations since the last average."""

    def weigh(self, folded: Sequence[MicrobatchId]) -> Weight:
        """Return what this node has trained on since the last average."""
        own = weight_of(folded)
        return Weight(self._kept.num + own.num, add_digests((self._kept.digest, own.digest)))

    def total(self, begun: BeginAggregation) -> Weight | None:  # noqa: ARG002
        """Return nothing: members may have been lost."""
        return None

    def closed(self, folded: Sequence[MicrobatchId], *, averaged: bool) -> None:
        """Keep account of what this node has learnt by itself."""
        self._kept = Weight(0, 0) if averaged else self.weigh(folded)

    def returned(self) -> None:
        """What this node had learnt by itself is lost."""
        self._kept = Weight(0, 0)


def weight_of(folded: Sequence[MicrobatchId]) -> Weight:
    """Return how much the sum over some microbatches stands for."""
    return Weight(len(folded), digest_of(folded))
